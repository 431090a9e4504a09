"""The functions of Inductor that decide a Triton kernel's tiling, and the data that the policy reads."""

from __future__ import annotations

import copy
import importlib
import inspect
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tritium.compat.inductor import inductor_config
from tritium.compat.versions import TORCH, Version, version_text

# Versions on which the hooks below were compared with Inductor's source.
TILING_KNOWN = ((2, 11), (2, 12), (2, 13), (2, 14), (2, 15))

# From this version on, Inductor proves that a product of sums is a multiple of its factors.
PROVES_PRODUCTS: Version = (2, 14)
# From this version on, `reduction_split_factor` is an instance method; it was static before.
SPLIT_IS_A_METHOD: Version = (2, 14)


_KINDS = {classmethod: "class method", staticmethod: "static method"}


@dataclass(frozen=True)
class _Hook:
    """A function of Inductor that the tiling policy wraps or calls, with the expected signature."""

    name: str
    owner: Any
    attribute: str
    parameters: tuple[str, ...] = ()
    kind: str = "function"

    def obstacle(self) -> str | None:
        """Return how this torch's function differs from the expected one, or None."""
        found = inspect.getattr_static(self.owner, self.attribute, None)
        if found is None:
            return f"torch {version_text()} has no {self.name}"
        signature = inspect.signature(getattr(self.owner, self.attribute)).parameters
        missing = [parameter for parameter in self.parameters if parameter not in signature]
        if missing:
            return f"{self.name} of torch {version_text()} takes no {', '.join(missing)}"
        kind = _KINDS.get(type(found), "function")
        if kind != self.kind:
            return f"{self.name} of torch {version_text()} is a {kind}, not a {self.kind}"
        return None


def tiling_obstacle(version: Version = TORCH) -> str | None:
    """Return why the tiling policy cannot act on this torch, or None.

    >>> tiling_obstacle((2, 10))
    'supported on torch 2.11 to 2.15, not on 2.10'
    """
    if version not in TILING_KNOWN:
        oldest, newest, this = (".".join(map(str, known)) for known in (TILING_KNOWN[0], TILING_KNOWN[-1], version))
        return f"supported on torch {oldest} to {newest}, not on {this}"
    return next((obstacle for hook in _tiling_hooks() if (obstacle := hook.obstacle()) is not None), None)


def _tiling_hooks() -> list[_Hook]:
    simd = simd_scheduling()
    ranking = ("node_schedule", "numel", "reduction_numel", "coalesce_analysis")
    selection, divisibility = selection_hook(), divisibility_hook()
    split = "function" if TORCH >= SPLIT_IS_A_METHOD else "static method"
    hooks = [
        _Hook("SIMDScheduling.get_tiling_and_scores", simd, "get_tiling_and_scores", ranking, "class method"),
        _Hook("SIMDScheduling.create_tiling", simd, "create_tiling", ("pw_tiling", "reduction_tiling"), "class method"),
        _Hook(
            "SIMDScheduling.tiling_is_compatible",
            simd,
            "tiling_is_compatible",
            ("node_schedule", "tiling"),
            "class method",
        ),
        _Hook("SIMDScheduling.codegen_node_schedule", simd, "codegen_node_schedule", ("kernel_features",)),
        _Hook("TritonKernel.codegen_kernel", triton_kernel(), "codegen_kernel", ("name",)),
        _Hook("the coalescing analysis", *coalescing_analysis()),
        _Hook(
            "InductorChoices.should_use_persistent_reduction",
            *persistent_hook(),
            ("features", "cooperative_reduction"),
            "static method",
        ),
        _Hook("InductorChoices.should_use_cooperative_reduction", *cooperative_hook(), (), "static method"),
        _Hook(
            "InductorChoices.reduction_split_factor",
            *split_hook(),
            ("device", "reduction_numel_hint", "numel_hint", "inner_reduction"),
            split,
        ),
        _Hook("FxGraphHashDetails", graph_key(), "__init__", ("gm", "example_inputs")),
    ]
    if selection is not None:
        hooks.append(_Hook("SIMDScheduling.select_tiling_with_memory", *selection, ranking, "class method"))
    if divisibility is not None:
        name = "SizeVarAllocator.statically_known_multiple_of"
        hooks.append(_Hook(name, *divisibility, ("numerator", "denominator")))
    return hooks


# Settings that make Inductor tile kernels without its coalescing analysis.
NO_TILING_ANALYSIS = {"triton.coalesce_tiling_analysis": False}


_TILING_FUNCTIONS = frozenset(
    {"get_tiling_and_scores", "select_tiling_with_memory", "compute_tiling_strategy", "_split_iteration_ranges"}
)


def came_from_tiling(error: BaseException) -> bool:
    """Return True if an error, or a cause of it, comes from Inductor's tiling analysis."""
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


def divisibility_hook() -> tuple[Any, str] | None:
    """Return the function that proves multiples; None if Inductor can prove products of sums."""
    if TORCH >= PROVES_PRODUCTS:
        return None
    return importlib.import_module("torch._inductor.sizevars").SizeVarAllocator, "statically_known_multiple_of"


def simd_scheduling() -> Any:
    return importlib.import_module("torch._inductor.codegen.simd").SIMDScheduling


def selection_hook() -> tuple[Any, str] | None:
    """Return the ranking of tilings that the scheduler calls directly; None before torch 2.14."""
    scheduling, name = simd_scheduling(), "select_tiling_with_memory"
    return (scheduling, name) if hasattr(scheduling, name) else None


def triton_kernel() -> Any:
    return importlib.import_module("torch._inductor.codegen.triton").TritonKernel


def inductor_choices() -> Any:
    """Return the class whose methods are Inductor's heuristics."""
    return importlib.import_module("torch._inductor.choices").InductorChoices


def persistent_hook() -> tuple[Any, str]:
    return inductor_choices(), "should_use_persistent_reduction"


def cooperative_hook() -> tuple[Any, str]:
    return inductor_choices(), "should_use_cooperative_reduction"


def split_hook() -> tuple[Any, str]:
    return inductor_choices(), "reduction_split_factor"


def cooperative_sizes(*question: Any) -> tuple[Any, Any]:
    """Return rows and elements from Inductor's arguments: a kernel, or in newer versions two sizes."""
    if len(question) == 1:
        return question[0].numel, question[0].reduction_numel
    _, rows, elements = question
    return rows, elements


def hinted_size(size: Any) -> int | None:
    """Return a size's value in the call that is compiled; None if unknown."""
    symbols = importlib.import_module("torch.fx.experimental.symbolic_shapes")
    if symbols.free_unbacked_symbols(size):
        return None
    return int(lowering_graph().sizevars.optimization_hint(size))


def has_dynamic_sizes() -> bool:
    """Return True if a size of the lowered graph may vary between calls."""
    return bool(lowering_graph().sizevars.shape_env.var_to_range)


def reduction_reads(features: Any) -> tuple[int, int, int]:
    """Return a reduction kernel's loads per position of a row: values, bytes, and bytes in all passes."""
    stats = features.memory_stats()
    once, looped = stats.persistent.reads, stats.looped.reads
    return once.count_per_thread, once.bytes_per_thread, looped.bytes_per_thread


def keeps_order_of_additions(features: Any) -> bool:
    """Return True if the user fixed the order of additions of a reduction kernel (`numerics="strict"`)."""
    block = getattr(features, "strict_reduction_rblock", None)
    return block is not None and block() is not None


def has_nodes_of_another_stage(features: Any) -> bool:
    """Return True if a kernel has nodes outside its schedule: nested reductions, since torch 2.15."""
    indexing = getattr(features, "indexing_node_schedule", None)
    return indexing is not None and indexing is not features.node_schedule


def reduces_contiguous_rows(features: Any) -> bool:
    return bool(features.get_reduction_hint().name == "INNER")


def measures_reductions() -> bool:
    """Return True if Inductor generates several forms of a reduction and times them."""
    return bool(inductor_config().triton.multi_kernel)


def persistence_is_allowed() -> bool:
    return bool(inductor_config().triton.persistent_reductions)


def target_multiprocessors(device: Any) -> int | None:
    """Return the number of multiprocessors for which Inductor generates code."""
    properties = importlib.import_module("torch._inductor.runtime.hints").DeviceProperties
    return properties.create(device).multi_processor_count  # type: ignore[no-any-return]


def graph_key() -> Any:
    """Return the class whose attributes are hashed into the key of a compiled graph."""
    return importlib.import_module("torch._inductor.codecache").FxGraphHashDetails


def coalescing_analysis() -> tuple[Any, str]:
    """Return the module and name from which code generation reads the coalescing analysis."""
    utilities = importlib.import_module("torch._inductor.tiling_utils")
    if hasattr(utilities, "_analyze_memory_coalescing"):
        return utilities, "_analyze_memory_coalescing"
    return importlib.import_module("torch._inductor.codegen.simd"), "analyze_memory_coalescing"


def lowering_graph() -> Any:
    """Return the graph that Inductor is lowering."""
    return importlib.import_module("torch._inductor.virtualized").V.graph


def compiles_ahead_of_time() -> bool:
    """Return True if the code will run without Dynamo's guards."""
    return importlib.import_module("torch._inductor.virtualized").V.aot_compilation is True


def can_guard(size: Any) -> bool:
    """Return True if a guard on a size is checked before the code runs."""
    shapes = importlib.import_module("torch.fx.experimental.symbolic_shapes")
    return not compiles_ahead_of_time() and not shapes.free_unbacked_symbols(size)


def division_functions() -> tuple[Any, Any]:
    """Return `FloorDiv` and `ModularIndexing`, as used in index expressions."""
    functions = importlib.import_module("torch.utils._sympy.functions")
    return functions.FloorDiv, functions.ModularIndexing


def next_kernel_name(schedule: Sequence[Any]) -> str:
    """Return the name of a new kernel of these nodes, without the part that marks reductions."""
    utilities = importlib.import_module("torch._inductor.utils")
    fused = utilities.get_fused_kernel_name(schedule, inductor_config().triton.descriptive_names)
    wrapper = lowering_graph().wrapper_code
    # A nested graph continues the outer graph's kernel numbers.
    while hasattr(wrapper, "parent_wrapper"):
        wrapper = wrapper.parent_wrapper
    # Copy the counter, so that reading does not advance it.
    return f"{fused}_{next(copy.copy(wrapper._names_iter))}"


def kernel_sizes(kernel: Any) -> dict[str, Any]:
    """Return the integer size arguments of a Triton kernel by name, as expressions of the graph's symbols."""
    common = importlib.import_module("torch._inductor.codegen.common")
    _, _, signature, _ = kernel.args.python_argdefs()
    sizes = {
        argument.name: original_size(argument.expr)
        for argument in signature
        if isinstance(argument, common.SizeArg) and argument.name.startswith("ks")
    }
    # A scalar that was passed as a tensor may be a fraction.
    return {name: size for name, size in sizes.items() if getattr(size, "is_integer", False)}


def original_size(size: Any) -> Any:
    """Return a size without Inductor's names for products that it computes on the host."""
    precomputed = lowering_graph().sizevars.inv_precomputed_replacements
    utilities = importlib.import_module("torch._inductor.utils")
    return utilities.sympy_subs(size, precomputed) if hasattr(size, "free_symbols") else size


def kernel_extents(kernel: Any) -> dict[str, Any]:
    """Return the number of values of each index variable of a Triton kernel."""
    roots = {tree.name: tree.numel for tree in kernel.range_trees}
    parts = {str(symbol): entry.length for symbol, entry in kernel.range_tree_nodes.items()}
    return {name: original_size(extent) for name, extent in {**roots, **parts}.items()}


def guarded_sizes(features: Any) -> list[Any]:
    """Return the sizes that Inductor compares with 2^31 - 1, and guards, before it uses 32-bit indices."""
    graph = lowering_graph()
    names = {
        name for node in features.scheduler_nodes() for name in [*node.get_buffer_names(), *node.used_buffer_names()]
    }
    buffers = [graph.get_buffer(name) for name in sorted(names)]
    extents = [buffer.get_layout().storage_size() for buffer in buffers if buffer.has_tensor_output()]
    return [original_size(size) for size in [features.numel * features.reduction_numel, *extents]]


def least_size(symbol: Any) -> int | None:
    """Return the smallest value of a size's symbol, or None if unknown."""
    known = lowering_graph().sizevars.shape_env.var_to_range.get(symbol)
    lower: Any = getattr(known, "lower", None)
    return int(lower) if getattr(lower, "is_Integer", False) else None


def indexes_with_32_bits(kernel: Any) -> bool:
    return bool(kernel.index_dtype == "tl.int32")
