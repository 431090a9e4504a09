"""Every difference between torch versions, and every private door into torch that Tritium uses.

Known to work: 2.11 to 2.13. A newer version is used too; a hook that a version lacks is answered with None or an empty
value here, and whoever asked declines with a reason.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import logging
import re
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any, Protocol, cast

import torch
from torch import fx

Version = tuple[int, int]


def parse_version(text: str) -> Version:
    """Major and minor as numbers, so that 2.13 is newer than 2.2.

    >>> parse_version("2.13.0+cpu")
    (2, 13)
    """
    match = re.match(r"(\d+)\.(\d+)", text)
    if match is None:
        raise ValueError(f"{text!r} is no version")
    return int(match[1]), int(match[2])


TORCH = parse_version(torch.__version__)


def version_text() -> str:
    """Major and minor: what a measurement stays valid for."""
    return ".".join(map(str, TORCH))


def versions() -> dict[str, str | None]:
    """Versions that decide what compiled code looks like; triton's without importing it."""
    found: dict[str, str | None] = {"torch": torch.__version__}
    metadata = importlib.import_module("importlib.metadata")
    for package in ("triton", "diffusers"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return found


# --- Dynamo -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Frame:
    """The Python frame that Dynamo is compiling while it calls a backend."""

    code: CodeType
    arguments: Mapping[str, Any]
    compile_id: str


def compiling_frame() -> Frame | None:
    """The frame being compiled, or None when a backend is called by hand."""
    convert = importlib.import_module("torch._dynamo.symbolic_convert")
    try:
        output = convert.InstructionTranslator.current_tx().output
    except AttributeError:
        return None
    root = output.root_tx
    return Frame(root.f_code, root.f_locals, str(getattr(output, "dynamo_compile_id", None) or "?"))


def graphs_compiled() -> int:
    """How many graphs Dynamo has handed to any backend in this process."""
    return int(importlib.import_module("torch._dynamo.utils").counters["stats"]["unique_graphs"])


def guard_failures(code: CodeType) -> list[str]:
    """Why the compiled versions of a frame did not fit, oldest first, as Dynamo words it."""
    return list(importlib.import_module("torch._dynamo.utils").guard_failures.get(code, ()))


def break_reason(gm: fx.GraphModule) -> str | None:
    """Why Dynamo ended the graph early, in one line, or None when it did not."""
    reason = getattr(gm, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break:
        return None
    text = str(reason.reason)
    headline = text.strip().splitlines()[0]
    explanation = re.search(r"Explanation: (.+)", text)
    where = reason.user_stack[-1] if reason.user_stack else None
    place = f" at {Path(where.filename).name}:{where.lineno}" if where is not None else ""
    return headline + place + (f" ({explanation[1].strip()})" if explanation else "")


_LIMIT_MESSAGE = "torch._dynamo hit config.%s (%s)"


@dataclass(frozen=True)
class LimitReached:
    """Dynamo gave up recompiling a function: from now on it runs eagerly for arguments that fit no compiled version."""

    limit: str
    value: int
    function: str
    file: str
    line: int
    reason: str


class _LimitHandler(logging.Handler):
    def __init__(self, notify: Callable[[LimitReached], None]) -> None:
        super().__init__(logging.WARNING)
        self.notify = notify

    def emit(self, record: logging.LogRecord) -> None:
        arguments = record.args
        if not str(record.msg).startswith(_LIMIT_MESSAGE) or not isinstance(arguments, tuple) or len(arguments) < 4:
            return
        match = re.match(r"'(.+)' \((.+):(\d+)\)", str(arguments[2]))
        if match is not None:
            value = int(str(arguments[1]))
            self.notify(LimitReached(str(arguments[0]), value, match[1], match[2], int(match[3]), str(arguments[3])))


def watch_recompile_limit(notify: Callable[[LimitReached], None]) -> None:
    """Call `notify` whenever Dynamo reaches a recompile limit; it announces that in its log and nowhere else."""
    logger = logging.getLogger("torch._dynamo.convert_frame")
    if not any(isinstance(handler, _LimitHandler) for handler in logger.handlers):
        logger.addHandler(_LimitHandler(notify))


@contextlib.contextmanager
def many_recompiles() -> Iterator[None]:
    """Lift Dynamo's limits of versions of one function, for whoever compiles it in many ways on purpose."""
    config: Any = importlib.import_module("torch._dynamo.config")
    with config.patch(recompile_limit=4096, accumulated_recompile_limit=65536):
        yield


def is_parameter_placeholder(node: fx.Node) -> bool:
    """Whether Dynamo made this graph input from a parameter or buffer of a module."""
    source = getattr(node, "_dynamo_source", None)
    if source is None:
        return False
    name = source.name
    # A method before it became a property.
    text = str(name() if callable(name) else name)
    return re.search(r"\._(parameters|buffers)\['[^']+'\]$", text) is not None


def source_name(node: fx.Node) -> str:
    """The user's name of a graph input: `hidden_states`, or `transformer.norm.weight` for a parameter."""
    source = getattr(node, "_dynamo_source", None)
    if source is None:
        return node.name
    name = source.name
    text = str(name() if callable(name) else name)
    text = re.sub(r"L\['(\w+)'\]", r"\1", text)
    text = re.sub(r"\._(?:modules|parameters|buffers)\['([^']+)'\]", r".\1", text)
    return re.sub(r"\.__dict__\['([^']+)'\]", r".\1", text)


def module_path(node: fx.Node) -> tuple[str, ...]:
    """The module whose forward a node comes from: `("transformer_blocks", "0", "norm1")`; empty for the model's own."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ()
    innermost = list(stack.values())[-1]
    words = re.findall(r"\w+", str(innermost[0]))
    return tuple(word for word in words if word not in ("L", "self", "__dict__", "_modules"))


def size_hint(size: Any) -> int | None:
    """The number behind a symbolic size in the call that is being compiled; no guard is added."""
    node = getattr(size, "node", None)
    hint = getattr(node, "hint", None)
    return int(hint) if isinstance(hint, int) else None


def describe_new_input(node: fx.Node, *, is_static: bool) -> None:
    """Give a placeholder that Dynamo did not make what AOTAutograd expects of those it did."""
    node._dynamo_source = None
    node.meta["tensor_dict"] = {"_dynamo_static_input_type": "unguarded"} if is_static else {}


@contextlib.contextmanager
def marked_dynamic(marks: Sequence[tuple[torch.Tensor, int]]) -> Iterator[None]:
    """Mark dims dynamic for the calls inside, and leave the caller's tensors as they were."""
    names = [f"_dynamo_{name}" for name in ("dynamic_indices", "weak_dynamic_indices", "dynamic_range")]
    names += ["_dynamo_hint_overrides", "_dynamo_unbacked_indices"]
    saved = [
        (tensor, {name: tensor.__dict__[name] for name in names if name in tensor.__dict__}) for tensor, _ in marks
    ]
    try:
        for tensor, dim in marks:
            # Sizes 0 and 1 are always specialised; asking for them to be dynamic would be an error.
            if tensor.shape[dim] < 2:
                torch._dynamo.maybe_mark_dynamic(tensor, dim)
            else:
                torch._dynamo.mark_dynamic(tensor, dim)
        yield
    finally:
        for tensor, attributes in saved:
            for name in names:
                tensor.__dict__.pop(name, None)
            tensor.__dict__.update(attributes)


def passes_through(error: Exception) -> bool:
    """Whether Dynamo steers by this exception, or speaks to the user, through a backend: never a failure of ours."""
    exc = importlib.import_module("torch._dynamo.exc")
    shapes = importlib.import_module("torch.fx.experimental.symbolic_shapes")
    steering = (
        exc.RestartAnalysis,
        exc.SkipFrame,
        exc.UserError,
        shapes.ConstraintViolationError,
        shapes.GuardOnDataDependentSymNode,
        torch.OutOfMemoryError,
    )
    return isinstance(error, steering)


# --- Inductor ---------------------------------------------------------------------------------------------------------


def inductor_config() -> Any:
    return importlib.import_module("torch._inductor.config")


def inductor_settings() -> dict[str, Any]:
    """All of Inductor's settings as they are for this thread."""
    return cast("dict[str, Any]", inductor_config().get_config_copy())


@contextlib.contextmanager
def inductor_patched(changes: Mapping[str, Any]) -> Iterator[None]:
    """Change settings for what runs inside, in this thread, and restore them on any exit.

    torch 2.13 keeps overrides in context variables, 2.11 in globals; `config.patch` entered and left in the compiling
    thread is right for both, because Dynamo compiles one frame at a time.
    """
    with inductor_config().patch(dict(changes)):
        yield


def unknown_settings(names: Sequence[str]) -> list[str]:
    known = inductor_settings()
    return [name for name in names if name not in known]


def mode_settings(mode: str | None) -> dict[str, Any]:
    """What `torch.compile(mode=...)` means for Inductor."""
    if mode in (None, "default"):
        return {}
    inductor = importlib.import_module("torch._inductor")
    return dict(inductor.list_mode_options(mode))


def allows_tf32() -> bool:
    """Whether float32 convolutions may run on tensor cores."""
    cudnn: Any = torch.backends.cudnn
    return bool(cudnn.conv.fp32_precision == "tf32")


def compile_fx(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    module = importlib.import_module("torch._inductor.compile_fx")
    return cast("Callable[..., Any]", module.compile_fx(gm, example_inputs))


def cache_dir() -> Path:
    """Inductor's cache folder; what Tritium stores lies beside it and moves with it."""
    return Path(importlib.import_module("torch._inductor.runtime.cache_dir_utils").cache_dir())


@contextlib.contextmanager
def empty_cache() -> Iterator[None]:
    """Compile with an empty cache folder, which is gone afterwards."""
    with importlib.import_module("torch._inductor.utils").fresh_cache():
        yield


def vector_isas() -> list[str]:
    """The CPU's vector instruction sets that Inductor knows of; asking which the compiler can use would start it."""
    return list(importlib.import_module("torch._inductor.cpu_vec_isa").x86_isa_checker())


def salted_pass(identity: bytes, inner: Any) -> Any:
    """A post-grad pass that changes nothing but Inductor's cache key, around the user's own pass if there is one.

    Inductor's key knows a custom op by its name alone: without this, editing an op's kernel or its fake would hit the
    code compiled for the old one.
    """
    base = importlib.import_module("torch._inductor.custom_graph_pass").CustomGraphPass

    class Salt(base):  # type: ignore[misc, valid-type]
        def __call__(self, graph: fx.Graph) -> None:
            for step in inner if isinstance(inner, (list, tuple)) else [inner]:
                if step is not None:
                    step(graph)

        def uuid(self) -> Any:
            parts: list[Any] = [identity]
            for step in inner if isinstance(inner, (list, tuple)) else [inner]:
                if step is None:
                    continue
                # A plain function has no identity, and Inductor then does not cache: the user's choice stays theirs.
                theirs = step.uuid() if isinstance(step, base) else None
                if theirs is None:
                    return None
                parts.append(theirs)
            return tuple(parts) if len(parts) > 1 else identity

    return Salt()


class CodegenObserver(Protocol):
    """What `observed_codegen` tells while Inductor generates code."""

    def kernel(self, name: str, nodes: Sequence[Any]) -> None: ...

    def graph(self, lowering: Any) -> None: ...

    def not_fused(self, why: Any) -> None: ...


_OBSERVER: ContextVar[CodegenObserver | None] = ContextVar("tritium_codegen_observer", default=None)


def _observe_define_kernel(scheduling: Any) -> None:
    original = scheduling.define_kernel

    def define_kernel(self: Any, src_code: str, nodes: Any, *args: Any, **kwargs: Any) -> Any:
        name = original(self, src_code, nodes, *args, **kwargs)
        observer = _OBSERVER.get()
        if observer is not None:
            observer.kernel(str(name), [node for node in nodes if hasattr(node, "read_writes")])
        return name

    define_kernel.tritium_original = original  # type: ignore[attr-defined]
    scheduling.define_kernel = define_kernel


def _observe_reasons(why_no_fuse: Any) -> None:
    # Not through the log these go to: at its level Inductor also prints every candidate pair, which takes seconds.
    original = why_no_fuse.__call__

    def call(self: Any, reason: str, *args: Any) -> None:
        original(self, reason, *args)
        observer = _OBSERVER.get()
        if observer is not None:
            observer.not_fused(self)

    why_no_fuse.__call__ = call


def _install_observation() -> None:
    lowering = importlib.import_module("torch._inductor.graph").GraphLowering
    if hasattr(lowering.codegen, "tritium_original"):
        return
    original = lowering.codegen

    def codegen(self: Any) -> Any:
        result = original(self)
        observer = _OBSERVER.get()
        if observer is not None:
            observer.graph(self)
        return result

    codegen.tritium_original = original  # type: ignore[attr-defined]
    _observe_define_kernel(importlib.import_module("torch._inductor.codegen.cpp").CppScheduling)
    _observe_define_kernel(importlib.import_module("torch._inductor.codegen.triton").TritonScheduling)
    _observe_reasons(importlib.import_module("torch._inductor.scheduler").WhyNoFuse)
    lowering.codegen = codegen


@contextlib.contextmanager
def observed_codegen(observer: CodegenObserver) -> Iterator[None]:
    """Let an observer see the kernels Inductor defines inside; it only looks, so no cache key needs to know of it."""
    _install_observation()
    token = _OBSERVER.set(observer)
    try:
        yield
    finally:
        _OBSERVER.reset(token)


def kernel_dependencies(nodes: Sequence[Any]) -> tuple[dict[str, int], dict[str, int]]:
    """Buffers that a kernel reads from and writes to memory, each with its bytes (dynamic sizes by their hint)."""
    virtualized = importlib.import_module("torch._inductor.virtualized")
    graph = virtualized.V.graph
    written = {dep.name for node in nodes for dep in node.read_writes.writes}
    reads: dict[str, int] = {}
    writes: dict[str, int] = {}
    for node in nodes:
        for dep in node.read_writes.reads:
            if dep.name not in written:
                reads[dep.name] = max(reads.get(dep.name, 0), int(graph.get_dep_size_hint(dep)))
        for dep in node.read_writes.writes:
            if dep.name not in graph.removed_buffers:
                writes[dep.name] = max(writes.get(dep.name, 0), int(graph.get_dep_size_hint(dep)))
    return reads, writes


def fallback_operators(lowering: Any) -> list[tuple[str, list[torch.dtype]]]:
    """Operators that Inductor calls instead of generating code for them, with the dtypes that go in."""
    ir = importlib.import_module("torch._inductor.ir")
    found = []
    for operation in lowering.operations:
        if not isinstance(operation, ir.FallbackKernel) or operation.op_overload is None:
            continue
        dtypes = []
        for value in operation.inputs:
            try:
                dtypes.append(value.get_dtype())
            except (AttributeError, NotImplementedError):
                continue
        found.append((str(operation.op_overload), dtypes))
    return found


def library_calls(lowering: Any) -> list[tuple[torch._ops.OpOverload, fx.Node]]:
    """Operators that generated code calls (library products, attention, owned ops), in the order it calls them."""
    ir = importlib.import_module("torch._inductor.ir")
    found = []
    for group in lowering.scheduler.nodes:
        for scheduled in group.get_nodes():
            operation = scheduled.node
            overload = getattr(operation, "op_overload", None)
            if not isinstance(operation, ir.ExternKernel) or not isinstance(overload, torch._ops.OpOverload):
                continue
            # What feeds an operator counts among its origins too.
            origins = [operation.get_origin_node(), *operation.origins]
            own = (node for node in origins if node is not None and _calls(node, overload))
            if (node := next(own, None)) is not None:
                found.append((overload, node))
    return found


def _calls(node: fx.Node, overload: torch._ops.OpOverload) -> bool:
    return getattr(node.target, "overloadpacket", None) is overload.overloadpacket


# --- the profiler -----------------------------------------------------------------------------------------------------

_REGION = "Torch-Compiled Region: "


def region_of(event: Any) -> str | None:
    """The graph that a profiler's event lies directly in; None outside of any, and for what an operator calls inside."""
    parent = event.cpu_parent
    while parent is not None:
        if parent.name.startswith(_REGION):
            return str(parent.name.removeprefix(_REGION))
        if "::" in parent.name:
            return None
        parent = parent.cpu_parent
    return None


def entered_region(event: Any) -> str | None:
    """The graph that starts to run with this event."""
    return str(event.name.removeprefix(_REGION)) if event.name.startswith(_REGION) else None


@contextlib.contextmanager
def visible_kernels(names: Collection[str]) -> Iterator[None]:
    """Let the profiler see generated C++ kernels by their names, as it sees Triton's.

    Inductor has a setting for this which makes it generate other code; here the functions that the code calls are
    wrapped for as long as somebody looks.
    """
    cache = importlib.import_module("torch._inductor.codecache").PyCodeCache
    replaced: list[tuple[dict[str, Any], str, Any]] = []
    for module in cache.modules:
        space = vars(module)
        for name in [name for name in names if name.startswith("cpp_") and callable(space.get(name))]:
            replaced.append((space, name, space[name]))
            space[name] = _named(name, space[name])
    try:
        yield
    finally:
        for space, name, original in reversed(replaced):
            space[name] = original


def _named(name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
    record = importlib.import_module("torch._C._profiler")._RecordFunctionFast

    def named(*args: Any, **kwargs: Any) -> Any:
        with record(name):
            return kernel(*args, **kwargs)

    return named


# --- artifacts --------------------------------------------------------------------------------------------------------


def caching_obstacle() -> str | None:
    """Why Inductor would keep or find nothing in its cache, or None."""
    config = inductor_config()
    if config.force_disable_caches:
        return "torch's compile caches are off (force_disable_caches)"
    if not config.fx_graph_cache:
        return "Inductor's graph cache is off (fx_graph_cache)"
    return None


def cache_artifacts() -> tuple[bytes, int] | None:
    """What torch compiled or found in its caches in this process, as bytes, and how many graphs that is.

    `torch.compiler.save_cache_artifacts` writes one group of entries a call, and reading keeps the last group alone: a
    second save in one process would lose what the first one had. So all entries are written as one group, and torch's
    own count of what is new stays as it was.
    """
    manager = importlib.import_module("torch.compiler._cache").CacheArtifactManager
    seen = list(manager._seen_artifacts)
    with manager.with_fresh_cache():
        for artifact in seen:
            manager._new_cache_artifacts[artifact.type()].append(artifact)
        written = manager.serialize()
    return None if written is None else (written[0], sum(artifact.type() == "inductor" for artifact in seen))


def load_cache_artifacts(content: bytes) -> bool:
    """Put such bytes into torch's caches; False if this torch cannot read them. They are unpickled: only from friends."""
    return torch.compiler.load_cache_artifacts(content) is not None


class LibraryShelf(Protocol):
    """Where libraries of C++ kernels are found before Inductor compiles them."""

    def find(self, request: str) -> Path | None: ...

    def loaded(self, request: str, library: Path) -> None: ...


def share_libraries(shelf: LibraryShelf) -> None:
    """Look for Inductor's C++ kernels on a shelf first, and tell it which libraries were loaded.

    Inductor names a library by the compiler's whole command line, which takes a probe of the compiler for each vector
    instruction set and has torch's folder in it. A shelf knows it by its source and Inductor's settings.
    """
    bindings = importlib.import_module("torch._inductor.codecache").CppPythonBindingsCodeCache
    if hasattr(bindings.load_async, "tritium_original"):
        return
    original = bindings.load_async.__func__

    def load_async(cls: Any, main_code: str, *args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(original).bind(cls, main_code, *args, **kwargs).arguments
        # Subclasses build wrappers with libraries of their own; extra flags may name files.
        if cls is not bindings or given.get("extra_flags"):
            return original(cls, main_code, *args, **kwargs)
        request = _library_request(given)
        found = shelf.find(request)
        # Started now and not at the first call: the compiler works in the background until then.
        started = original(cls, main_code, *args, **kwargs) if found is None else None

        @functools.cache
        def load() -> Any:
            module = _load_library(bindings, found) if found is not None else None
            if module is None:
                module = (started or original(cls, main_code, *args, **kwargs))()
            shelf.loaded(request, Path(module.__file__))
            return module

        return load

    load_async.tritium_original = original  # type: ignore[attr-defined]
    bindings.load_async = classmethod(load_async)


def _library_request(given: Mapping[str, Any]) -> str:
    """Everything about a library but the machine it is for: the source, and the settings that decide how it is compiled."""
    arguments = {name: value for name, value in given.items() if name not in {"cls", "submit_fn"}}
    # Which compiler is asked does not change what the source means.
    settings = {
        name: value
        for name, value in inductor_settings().items()
        if name.startswith(("cpp.", "aot_inductor.")) and name != "cpp.cxx"
    }
    return repr((sorted(arguments.items()), sorted(settings.items())))


def _load_library(bindings: Any, library: Path) -> Any:
    try:
        return bindings._load_library(str(library), library.stem)
    except (ImportError, OSError) as error:
        warnings.warn(
            f"tritium: {library.name} cannot be loaded and is compiled again: {error}", RuntimeWarning, stacklevel=2
        )
        return None
