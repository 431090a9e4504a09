"""Every difference between torch versions, and every private door into torch that Tritium uses.

Known to work: 2.11 to 2.13. A newer version is used too; a hook that a version lacks is answered with None or an empty
value here, and whoever asked declines with a reason.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import functools
import importlib
import inspect
import logging
import re
import traceback
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


def steers_dynamo(error: Exception) -> bool:
    """Whether Dynamo steers by this exception, or the machine is out of memory: nothing may catch it on the way."""
    exc = importlib.import_module("torch._dynamo.exc")
    return isinstance(error, (exc.RestartAnalysis, exc.SkipFrame, exc.UserError, torch.OutOfMemoryError))


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
                # One of several places to read from, or one looked up: counted for every result, and at most all of it.
                whole = _buffer_bytes(graph, dep.name)
                found = int(graph.get_dep_size_hint(dep))
                reads[dep.name] = max(reads.get(dep.name, 0), found if whole is None else min(found, whole))
        for dep in node.read_writes.writes:
            if dep.name not in graph.removed_buffers:
                writes[dep.name] = max(writes.get(dep.name, 0), int(graph.get_dep_size_hint(dep)))
    return reads, writes


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


# --- tiling -----------------------------------------------------------------------------------------------------------

# Versions whose tiling code was read: the hooks below mean there what they are taken for.
TILING_KNOWN = ((2, 11), (2, 12), (2, 13))


def tiling_obstacle(version: Version = TORCH) -> str | None:
    """Why Inductor's tiling must be left alone on this torch, or None.

    >>> tiling_obstacle((2, 10))
    'tiling is known of torch 2.11 to 2.13, not of 2.10'
    """
    text = ".".join(map(str, version))
    if version not in TILING_KNOWN:
        return f"tiling is known of torch 2.11 to 2.13, not of {text}"
    for name, owner, attribute, parameters in _tiling_hooks():
        hook = getattr(owner, attribute, None) if owner is not None else None
        if hook is None:
            return f"torch {text} has no {name}"
        missing = [parameter for parameter in parameters if parameter not in inspect.signature(hook).parameters]
        if missing:
            return f"{name} of torch {text} takes no {', '.join(missing)}"
    return None


def _tiling_hooks() -> list[tuple[str, Any, str, tuple[str, ...]]]:
    """Everything of Inductor that the tiling policy wraps: a name, its owner, and the parameters that are relied on."""
    simd = importlib.import_module("torch._inductor.codegen.simd").SIMDScheduling
    question = ("node_schedule", "numel", "reduction_numel", "coalesce_analysis")
    analysis, function = coalescing_analysis()
    return [
        ("SizeVarAllocator.statically_known_multiple_of", *multiple_of_hook(), ("numerator", "denominator")),
        ("SIMDScheduling.get_tiling_and_scores", simd, "get_tiling_and_scores", question),
        ("SIMDScheduling.create_tiling", simd, "create_tiling", ("pw_tiling", "reduction_tiling")),
        ("SIMDScheduling.tiling_is_compatible", simd, "tiling_is_compatible", ("node_schedule", "tiling")),
        ("SIMDScheduling.codegen_node_schedule", simd, "codegen_node_schedule", ("kernel_features",)),
        ("TritonKernel.codegen_kernel", triton_kernel(), "codegen_kernel", ("name",)),
        ("the coalescing analysis", analysis, function, ()),
        ("FxGraphHashDetails", graph_key(), "__init__", ("gm", "example_inputs")),
    ]


# Settings under which Inductor tiles kernels without looking at what their accesses coalesce.
NO_TILING_ANALYSIS = {"triton.coalesce_tiling_analysis": False}

_TILING_FUNCTIONS = frozenset({"get_tiling_and_scores", "compute_tiling_strategy", "_split_iteration_ranges"})


def came_from_tiling(error: BaseException) -> bool:
    """Whether an error, or one that it was raised for, comes from Inductor's tiling analysis."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        for frame, _ in traceback.walk_tb(current.__traceback__):
            code = frame.f_code
            if Path(code.co_filename).name == "tiling_utils.py" or code.co_name in _TILING_FUNCTIONS:
                return True
        current = current.__cause__ or current.__context__
    return False


def multiple_of_hook() -> tuple[Any, str]:
    return importlib.import_module("torch._inductor.sizevars").SizeVarAllocator, "statically_known_multiple_of"


def simd_scheduling() -> Any:
    return importlib.import_module("torch._inductor.codegen.simd").SIMDScheduling


def triton_kernel() -> Any:
    return importlib.import_module("torch._inductor.codegen.triton").TritonKernel


def graph_key() -> Any:
    """The class whose attributes are hashed into the key of a compiled graph."""
    return importlib.import_module("torch._inductor.codecache").FxGraphHashDetails


def coalescing_analysis() -> tuple[Any, str]:
    """Where code generation looks the coalescing analysis up."""
    utilities = importlib.import_module("torch._inductor.tiling_utils")
    if hasattr(utilities, "_analyze_memory_coalescing"):
        return utilities, "_analyze_memory_coalescing"
    return importlib.import_module("torch._inductor.codegen.simd"), "analyze_memory_coalescing"


def lowering_graph() -> Any:
    """The graph that Inductor lowers right now."""
    return importlib.import_module("torch._inductor.virtualized").V.graph


def compiles_ahead_of_time() -> bool:
    """Whether the code will run without Dynamo's guards."""
    return importlib.import_module("torch._inductor.virtualized").V.aot_compilation is True


def can_guard(size: Any) -> bool:
    """Whether a guard on a size is checked before the code runs."""
    shapes = importlib.import_module("torch.fx.experimental.symbolic_shapes")
    return not compiles_ahead_of_time() and not shapes.free_unbacked_symbols(size)


def division_functions() -> tuple[Any, Any]:
    """`FloorDiv` and `ModularIndexing`, as they stand in index expressions."""
    functions = importlib.import_module("torch.utils._sympy.functions")
    return functions.FloorDiv, functions.ModularIndexing


def next_kernel_name(schedule: Sequence[Any]) -> str:
    """The name, without the part that tells reductions from the rest, that a new kernel of these nodes would get."""
    utilities = importlib.import_module("torch._inductor.utils")
    fused = utilities.get_fused_kernel_name(schedule, inductor_config().triton.descriptive_names)
    wrapper = lowering_graph().wrapper_code
    # A graph inside a graph numbers its kernels with those of the outer one.
    while hasattr(wrapper, "parent_wrapper"):
        wrapper = wrapper.parent_wrapper
    # Looking at the counter must not advance it.
    return f"{fused}_{next(copy.copy(wrapper._names_iter))}"


def kernel_sizes(kernel: Any) -> dict[str, Any]:
    """The whole-numbered size arguments of a Triton kernel by name, as expressions of the graph's symbols."""
    common = importlib.import_module("torch._inductor.codegen.common")
    _, _, signature, _ = kernel.args.python_argdefs()
    sizes = {
        argument.name: original_size(argument.expr)
        for argument in signature
        if isinstance(argument, common.SizeArg) and argument.name.startswith("ks")
    }
    # A scalar that came as a tensor may be a fraction.
    return {name: size for name, size in sizes.items() if getattr(size, "is_integer", False)}


def original_size(size: Any) -> Any:
    """A size without the names that Inductor gives to products it computes on the host."""
    precomputed = lowering_graph().sizevars.inv_precomputed_replacements
    utilities = importlib.import_module("torch._inductor.utils")
    return utilities.sympy_subs(size, precomputed) if hasattr(size, "free_symbols") else size


def kernel_extents(kernel: Any) -> dict[str, Any]:
    """How many values each index variable of a Triton kernel takes."""
    roots = {tree.name: tree.numel for tree in kernel.range_trees}
    parts = {str(symbol): entry.length for symbol, entry in kernel.range_tree_nodes.items()}
    return {name: original_size(extent) for name, extent in {**roots, **parts}.items()}


def guarded_sizes(features: Any) -> list[Any]:
    """What Inductor compared with 2^31 - 1, and guards, before it indexes a kernel with 32 bits."""
    graph = lowering_graph()
    names = {
        name for node in features.scheduler_nodes() for name in [*node.get_buffer_names(), *node.used_buffer_names()]
    }
    buffers = [graph.get_buffer(name) for name in sorted(names)]
    extents = [buffer.get_layout().storage_size() for buffer in buffers if buffer.has_tensor_output()]
    return [original_size(size) for size in [features.numel * features.reduction_numel, *extents]]


def least_size(symbol: Any) -> int | None:
    """The smallest value of a size's symbol, or None where nothing is known."""
    known = lowering_graph().sizevars.shape_env.var_to_range.get(symbol)
    lower: Any = getattr(known, "lower", None)
    return int(lower) if getattr(lower, "is_Integer", False) else None


def indexes_with_32_bits(kernel: Any) -> bool:
    return bool(kernel.index_dtype == "tl.int32")


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


# --- the text of generated kernels ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class KernelArgument:
    """One argument of a generated kernel's launch, as a value that can be made again (dynamic sizes by their hint)."""

    # "tensor", "number", or "workspace": memory that is zero before the first launch.
    kind: str
    buffer: str = ""
    dtype: str = ""
    size: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    device: str = ""
    value: int | float = 0
    # The node of Inductor's graph whose value the buffer holds; None where no operator returns it.
    node: str | None = None


class KernelRecorder(Protocol):
    """What `recorded_kernels` tells while Inductor generates code."""

    def source(self, name: str, language: str, text: str) -> None: ...

    def launch(self, name: str, arguments: Callable[[], list[KernelArgument]]) -> None: ...


_RECORDER: ContextVar[KernelRecorder | None] = ContextVar("tritium_kernel_recorder", default=None)

# The wrapper's attribute that keeps the scratch memory its kernels are given, by name.
_WORKSPACES = "tritium_workspaces"

# Stands for a size that depends on data, where Inductor has no hint; its own guess is the same.
_UNKNOWN_SIZE = 8192

# What generated code calls to compile a kernel's source -> the source's language.
_LANGUAGES = {"triton": "triton", "cpp_pybinding": "cpp"}


@contextlib.contextmanager
def recorded_kernels(recorder: KernelRecorder) -> Iterator[None]:
    """Let a recorder see the source and the launches of the kernels that Inductor writes into Python wrappers inside."""
    _install_recording()
    token = _RECORDER.set(recorder)
    try:
        yield
    finally:
        _RECORDER.reset(token)


def _install_recording() -> None:
    wrapper: Any = importlib.import_module("torch._inductor.codegen.wrapper").PythonWrapperCodegen
    if hasattr(wrapper.define_kernel, "tritium_original"):
        return
    define, call = wrapper.define_kernel, wrapper.generate_kernel_call
    allocate = wrapper.generate_workspace_allocation

    def define_kernel(self: Any, kernel_name: str, kernel_body: str, *args: Any, **kwargs: Any) -> Any:
        recorder = _RECORDER.get()
        if recorder is not None and (found := _kernel_source(kernel_body)) is not None:
            recorder.source(str(kernel_name), *found)
        return define(self, kernel_name, kernel_body, *args, **kwargs)

    def generate_kernel_call(self: Any, kernel_name: str, call_args: Any, *args: Any, **kwargs: Any) -> Any:
        recorder = _RECORDER.get()
        if recorder is not None:
            given, spaces = list(call_args), vars(self).get(_WORKSPACES, {})
            recorder.launch(str(kernel_name), lambda: [_kernel_argument(argument, spaces) for argument in given])
        return call(self, kernel_name, call_args, *args, **kwargs)

    def generate_workspace_allocation(self: Any, ws: Any) -> Any:
        vars(self).setdefault(_WORKSPACES, {})[ws.outer_name] = ws
        return allocate(self, ws)

    define_kernel.tritium_original = define  # type: ignore[attr-defined]
    wrapper.define_kernel, wrapper.generate_kernel_call = define_kernel, generate_kernel_call
    wrapper.generate_workspace_allocation = generate_workspace_allocation


def _kernel_source(body: str) -> tuple[str, str] | None:
    """Language and source out of the Python expression that compiles a kernel; None for one of another form."""
    try:
        call = ast.parse(body.strip(), mode="eval").body
    except SyntaxError:
        return None
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute) or len(call.args) < 2:
        return None
    source = call.args[1]
    language = _LANGUAGES.get(call.func.attr)
    if language is None or not isinstance(source, ast.Constant) or not isinstance(source.value, str):
        return None
    return language, source.value.strip("\n") + "\n"


def _kernel_argument(argument: Any, workspaces: Mapping[str, Any]) -> KernelArgument:
    """What a wrapper passes to a kernel; to be asked while Inductor still has the graph."""
    graph = importlib.import_module("torch._inductor.virtualized").V.graph
    if not isinstance(argument, str):
        return KernelArgument("number", value=_hint(graph, getattr(argument, "inner_expr", argument)))
    if argument in workspaces:
        space = workspaces[argument]
        dtype, count = str(space.dtype).removeprefix("torch."), int(_hint(graph, space.count))
        return KernelArgument("workspace", dtype=dtype, size=(count,), stride=(1,), device=str(space.device))
    held = graph.try_get_buffer(argument)
    if held is None:
        held = graph.constants.get(argument)
    if held is None:
        return KernelArgument("number", value=_number(graph, argument))
    is_tensor = isinstance(held, torch.Tensor)
    size = held.shape if is_tensor else held.get_size()
    stride = held.stride() if is_tensor else held.get_stride()
    return KernelArgument(
        "tensor",
        buffer=argument,
        dtype=str(held.dtype if is_tensor else held.get_dtype()).removeprefix("torch."),
        size=tuple(int(_hint(graph, part)) for part in size),
        stride=tuple(int(_hint(graph, part)) for part in stride),
        device=str(held.device if is_tensor else held.get_device()),
        node=argument if argument in graph.graph_input_names else _origin_name(held),
    )


def buffer_argument(name: str) -> KernelArgument:
    """A buffer of the graph that Inductor is working on, as a kernel would be given it."""
    return _kernel_argument(name, {})


def _origin_name(held: Any) -> str | None:
    ask = getattr(held, "get_origin_node", None)
    node = ask() if ask is not None else None
    return node.name if node is not None else None


def _hint(graph: Any, expression: Any) -> int | float:
    if isinstance(expression, (int, float)):
        return expression
    ask = getattr(graph.sizevars, "optimization_hint", None) or graph.sizevars.size_hint
    return cast("int", ask(expression, fallback=_UNKNOWN_SIZE))


def _number(graph: Any, text: str) -> int | float:
    """The value of a size that a wrapper spells as Python (`s0`, `2*s0`), by the hints of the sizes in it."""
    environment = graph.sizevars.shape_env
    hints = environment.backed_var_to_val if hasattr(environment, "backed_var_to_val") else environment.var_to_val
    names = {str(symbol): float(value) if value.is_Float else int(value) for symbol, value in hints.items()}
    try:
        # The text is a size in code that Inductor wrote and that the process runs in any case.
        return cast("int", eval(text, {"__builtins__": {}}, names))  # noqa: S307
    except NameError as error:
        raise ValueError(f"the size {text} is not known before the model runs") from error


def loops_of(nodes: Sequence[Any]) -> str:
    """Inductor's loop IR of what a kernel computes, one body after the other."""
    texts = []
    for inner in dict.fromkeys(inner for node in nodes for inner in node.get_nodes()):
        body = getattr(inner, "_body", None)
        texts.append(f"{inner.get_name()}: {type(inner).__name__}")
        texts.append(body.debug_str().strip("\n") if body is not None else "  (no loops: a template or an operator)")
    return "\n".join(texts) + "\n"


def has_lowering(overload: torch._ops.OpOverload) -> bool:
    """Whether Inductor can generate code for an operator; registering a fallback for one does not count."""
    module = importlib.import_module("torch._inductor.lowering")
    return overload in module.lowerings and overload not in module.fallbacks


def has_decomposition(overload: torch._ops.OpOverload) -> bool:
    """Whether Inductor takes an operator apart before it lowers it."""
    return overload in importlib.import_module("torch._inductor.decomposition").select_decomp_table()


def fallback_nodes(lowering: Any) -> list[tuple[torch._ops.OpOverload, list[tuple[torch.dtype, tuple[int, ...]]]]]:
    """Operators that Inductor calls instead of generating code for them, with the dtypes and sizes that go in."""
    ir = importlib.import_module("torch._inductor.ir")
    found = []
    for operation in lowering.operations:
        overload = getattr(operation, "op_overload", None)
        if not isinstance(operation, ir.FallbackKernel) or not isinstance(overload, torch._ops.OpOverload):
            continue
        inputs = []
        for value in operation.inputs:
            try:
                sizes = tuple(int(_hint(lowering, size)) for size in value.get_size())
                inputs.append((value.get_dtype(), sizes))
            except (AttributeError, NotImplementedError):
                continue
        found.append((overload, inputs))
    return found


def is_view(target: Any) -> bool:
    """Whether an operator returns its input's memory under another shape, or may do so."""
    if not isinstance(target, torch._ops.OpOverload):
        return False
    aliases = [result.alias_info for result in target._schema.returns]
    return target is torch.ops.aten.reshape.default or any(
        found is not None and not found.is_write for found in aliases
    )


def debug_folder() -> Path | None:
    """Where `TORCH_COMPILE_DEBUG=1` makes torch write, or None when it was not asked for."""
    if not inductor_config().trace.enabled:
        return None
    return Path(importlib.import_module("torch._dynamo.utils").get_debug_dir())


def is_work(event: str) -> bool:
    """Whether a profiler's event on a CPU is an operator, or a compiled graph as a whole: not bookkeeping of Dynamo's."""
    return "::" in event or "CompiledFxGraph" in event


def _buffer_bytes(graph: Any, name: str) -> int | None:
    held = graph.try_get_buffer(name)
    if held is None:
        return None
    try:
        return int(_hint(graph, held.get_numel())) * int(held.get_dtype().itemsize)
    except Exception:  # noqa: BLE001 - not every buffer has a size, and a count is no reason to fail
        return None
