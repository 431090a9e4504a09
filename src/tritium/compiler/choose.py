"""Choose the provider of a site in a graph that is being compiled."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from tritium import ops, tuning
from tritium.compiler.passes.arguments import as_fake
from tritium.config import CompilationConfig
from tritium.ops import Op
from tritium.passes import PassContext
from tritium.tiling import tables
from tritium.tiling.reductions import INDUCTOR_PERSISTENT
from tritium.tuning import Machine


def choose_provider(op: Op, arguments: Mapping[str, Any], context: PassContext) -> tuple[str, str]:
    """Return the provider of a site and the reason."""
    fakes = {name: as_fake(value) for name, value in arguments.items()}
    holds = functools.partial(_holds, Machine.of(context.device_type).name, context.config)
    return tuning.choose(op, fakes, context.config, context.device_type, holds)


def _holds(device_name: str, config: CompilationConfig, elements: int, reads: int) -> bool:
    """Return True if Inductor, or the tiling policy, holds a row of so many elements in registers."""
    if elements <= INDUCTOR_PERSISTENT:
        return True
    switches = config.pass_config
    if not (switches.enable_tiling_policy and switches.enable_reduction_choice):
        return False
    return elements <= (tables.table_for(device_name).limit(reads) or 0)


def is_inlined(op: Op, provider: str) -> bool:
    known = ops.providers(op).get(provider)
    return known is not None and known.inlined


def call_of(op: Op, provider: str) -> tuple[Callable[..., Any], dict[str, str]]:
    """Return the callable and options for a rewritten graph."""
    return op.overload, {"provider": provider}
