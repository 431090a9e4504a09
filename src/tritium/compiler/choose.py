"""Choose the provider of a site, with the reason.

1. pinned           `force_provider` names one
2. engine `eager`   the op's reference
3. tables           the provider with the shortest measured device and host time at this shape, or the shortest time
                    predicted from measured shapes nearby
4. otherwise        Inductor: the region is left unchanged

Nothing is measured here: `tritium tune` writes the tables.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from tritium import device, ops, tuning
from tritium.compiler.passes.arguments import as_fake
from tritium.config import CompilationConfig
from tritium.errors import ProviderError, nearest
from tritium.ops import INDUCTOR, REFERENCE, Op
from tritium.ops.op import count
from tritium.passes import PassContext
from tritium.tiling import tables
from tritium.tiling.reductions import INDUCTOR_PERSISTENT
from tritium.tuning import Key, Machine

LEFT_TO_INDUCTOR = "left to Inductor: no owned kernel is measured faster here"


def choose_provider(op: Op, arguments: Mapping[str, Any], context: PassContext) -> tuple[str, str]:
    """Return the provider of a site and the reason."""
    config = context.config
    pinned = config.provider_for(op.name)
    if pinned is not None:
        return _pinned(op, pinned, arguments, config)
    if config.engine == "eager":
        return REFERENCE, "engine 'eager' runs the op's reference"
    able, reasons = _able(op, arguments)
    if not able:
        return INDUCTOR, "; ".join(reasons) or LEFT_TO_INDUCTOR
    key = key_of(op, arguments)
    if key is None:
        return INDUCTOR, LEFT_TO_INDUCTOR
    where = machine(context.device_type)
    on_gpu = context.device_type == "cuda"
    decision = tuning.decide(
        where,
        key,
        able,
        functools.partial(_holds, where.name, config),
        # A CPU has no launches: its times include the host's.
        replayed=config.graphs != "off" or not on_gpu,
        predicts=on_gpu,
    )
    return decision.provider, decision.why


@functools.cache
def machine(device_type: str) -> Machine:
    """Return the device of a type in the form that tables use."""
    found = device.describe(device_type)
    return Machine(found.name, found.capability, device.multiprocessors(device_type))


def _holds(device_name: str, config: CompilationConfig, elements: int, reads: int) -> bool:
    """Return True if Inductor, or the tiling policy, holds a row of so many elements in registers."""
    if elements <= INDUCTOR_PERSISTENT:
        return True
    switches = config.pass_config
    if not (switches.enable_tiling_policy and switches.enable_reduction_choice):
        return False
    return elements <= (tables.table_for(device_name).limit(reads) or 0)


def _able(op: Op, arguments: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Return the owned providers that accept the arguments, and the reasons of the others."""
    fakes = {name: as_fake(value) for name, value in arguments.items()}
    able, reasons = [], []
    for name, provider in ops.providers(op).items():
        reason = provider.decline(op.bind(**fakes))
        if reason is None:
            able.append(name)
        else:
            reasons.append(f"{name}: {reason}")
    return able, reasons


def key_of(op: Op, arguments: Mapping[str, Any]) -> Key | None:
    """Return the table key of a site, or None for an op whose providers are never compared."""
    if op.trial is None:
        return None
    fakes = {name: as_fake(value) for name, value in arguments.items()}
    return Key.of(op.name, op.trial.shape(op.bind(**fakes)), _dtype(fakes.values()))


def least_bytes(op: Op, arguments: Mapping[str, Any]) -> int:
    """Return the minimum number of bytes moved: every input read once, every result written once."""
    made = op.fake(**arguments)
    flat = [part for value in arguments.values() for part in (value if isinstance(value, list) else [value])]
    tensors = {id(part): part for part in (*flat, *(made if isinstance(made, tuple) else (made,)))}
    return sum(count(part.shape) * part.element_size() for part in tensors.values() if isinstance(part, torch.Tensor))


def _dtype(values: Iterable[Any]) -> torch.dtype:
    """Return the dtype of the first tensor, in which the op computes."""
    for value in values:
        for part in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(part, torch.Tensor):
                return part.dtype
    raise TypeError("an op without a tensor argument")


def is_inlined(op: Op, provider: str) -> bool:
    known = ops.providers(op).get(provider)
    return known is not None and known.inlined


def call_of(op: Op, provider: str) -> tuple[Callable[..., Any], dict[str, str]]:
    """Return the callable and options for a rewritten graph."""
    return op.overload, {"provider": provider}


def _pinned(op: Op, pinned: str, arguments: Mapping[str, Any], config: CompilationConfig) -> tuple[str, str]:
    why = f"pinned by force_provider={pinned!r}"
    if pinned in (INDUCTOR, REFERENCE):
        return pinned, why
    owned = ops.providers(op)
    if pinned not in owned:
        # `check_pins` ensured that some op has this provider; this op has not.
        return INDUCTOR, f"op {op.name!r} has no provider {pinned!r}"
    reason = owned[pinned].decline(op.bind(**{name: as_fake(value) for name, value in arguments.items()}))
    if reason is None:
        return pinned, why
    if isinstance(config.force_provider, str):
        return INDUCTOR, f"provider {pinned!r} cannot take it: {reason}"
    able = ", ".join([INDUCTOR, REFERENCE])
    raise ProviderError(f"provider {pinned!r} of op {op.name!r} cannot be used: {reason}; providers that can: {able}")


def check_pins(config: CompilationConfig) -> None:
    """Raise a `ProviderError` for a pin of an unknown op or provider: it would otherwise have no effect."""
    known = {name: [INDUCTOR, REFERENCE, *ops.providers(op)] for name, op in ops.catalog().items()}
    if isinstance(config.force_provider, str):
        every = {provider for providers in known.values() for provider in providers}
        if config.force_provider not in every:
            raise ProviderError(
                f"force_provider: no op has {config.force_provider!r}; {nearest(config.force_provider, every)}"
            )
        return
    for op, provider in dict(config.force_provider or ()).items():
        if op not in known:
            raise ProviderError(f"force_provider: there is no op {op!r}; {nearest(op, known)}")
        if provider not in known[op]:
            raise ProviderError(
                f"force_provider: op {op!r} has no provider {provider!r}; it has {', '.join(known[op])}"
            )
