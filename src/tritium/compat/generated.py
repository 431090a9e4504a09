"""What Inductor knows about the kernel and the graph for which it generates code."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Sequence
from typing import Any

from tritium.compat.inductor import inductor_config


def hinted_size(size: Any) -> int | None:
    """Return a size's value in the call that is compiled; None if unknown."""
    symbols = importlib.import_module("torch.fx.experimental.symbolic_shapes")
    if symbols.free_unbacked_symbols(size):
        return None
    return int(lowering_graph().sizevars.optimization_hint(size))


def reduction_reads(features: Any) -> tuple[int, int, int]:
    """Return a reduction kernel's loads per position of a row: values, bytes, and bytes in all passes."""
    stats = features.memory_stats()
    once, looped = stats.persistent.reads, stats.looped.reads
    return once.count_per_thread, once.bytes_per_thread, looped.bytes_per_thread


def lowering_graph() -> Any:
    """Return the graph that Inductor is lowering."""
    return importlib.import_module("torch._inductor.virtualized").V.graph


def current_device() -> Any:
    """Return the device for which code is being generated."""
    return lowering_graph().get_current_device_or_throw()


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
