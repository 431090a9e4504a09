"""Keep a pipeline within a budget of device memory: weights that do not fit are copied from the host in time."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from tritium import compat, device
from tritium.compat.peft import MERGES
from tritium.config import CompilationConfig
from tritium.errors import ConfigError, PipelineError
from tritium.sharing.lease import unshare
from tritium.techniques.choice import Choice
from tritium.techniques.memory.config import Memory, gigabytes
from tritium.techniques.memory.planning import cost
from tritium.techniques.memory.pool import Pool, pool_of
from tritium.techniques.memory.streaming import TIMED_CALL, Streamed
from tritium.techniques.memory.tenant import Tenant
from tritium.techniques.memory.units import bytes_in, module_bytes, moved, plain_tensors, streamable, tensors_of
from tritium.techniques.quantize.config import Quantize
from tritium.techniques.quantize.storage import StoredLinear, choose_provider
from tritium.techniques.technique import Note, Part, Technique

__all__ = ["TECHNIQUE", "Memory", "Resident", "Turns"]

# A pipeline stays on the device as a whole if its weights are at most this share of the budget without other tensors.
_FITS = 0.6

# Parts that run once an image.
_ONCE = ("text_encoder", "image_encoder", "vae", "safety_checker", "feature_extractor")

EMULATED = "emulated on the CPU: as right as on a GPU, and slower than without"


@dataclass
class Resident:
    """A part of a pipeline that fits: on the device as a whole."""

    back: Callable[[], None]


@dataclass
class Turns:
    """A part whose weights take turns on the device."""

    pool: Pool
    tenant: Tenant
    hooks: list[Any] = field(default_factory=list)


def device_of(module: nn.Module) -> torch.device:
    """Return the device that a module runs on: that of its weights, or a GPU if they are on the host and there is one."""
    places = {tensor.device for tensor in tensors_of(module)}
    found = next((where for where in places if where.type not in ("cpu", "meta")), None)
    if found is None:
        found = torch.device("cuda", torch.cuda.current_device()) if device.cuda_available() else torch.device("cpu")
    return found


def applies_to(part: Part, _config: Memory) -> str | None:
    for path, module in part.module.named_modules():
        hook = compat.modules.accelerate_hook(module)
        names = [name for name in compat.modules.diffusers_hooks(module) if "offload" in name]
        if names or (hook is not None and getattr(hook, "offload", True)):
            where = ".".join(filter(None, [part.name, path]))
            raise PipelineError(
                f"{where} has {names[0] if names else type(hook).__name__} of another library, which moves its weights, and "
                "so does memory; load the pipeline without offloading (or call pipe.remove_all_hooks()), and keep memory"
            )
    return None if tensors_of(part.module) else "it has no weights"


def apply(part: Part, config: Memory) -> Resident | Turns:
    unshare(part.module)
    where = device_of(part.module)
    pool = pool_of(where, config)
    _choose_providers(part, where)
    if _pipeline_bytes(part, pool) <= _FITS * (pool.budget - _other_bytes(part, pool)):
        return Resident(moved(tensors_of(part.module), where))
    blocks = streamable(part.module, part.blocks)
    # Values of file mappings and a copy of them fit together, or the copies take their place.
    left, size = device.host_memory(), module_bytes(part.module)
    weights = Streamed(part.name, part.module, blocks, keeps_origin=left is None or left > 3 * size)
    graphs = part.config.graphs if part.how == "tritium" else "off"
    tenant = Tenant(weights, not part.name.startswith(_ONCE), tuple(part.blocks), graphs in ("only", "with_compile"))
    pool.join(tenant)
    state = Turns(pool, tenant)
    part.around(pool.around(tenant))
    of_block = {block: weights.around_block(block) for block in blocks}
    part.around_blocks(of_block.get)
    _watch(state)
    return state


def _pipeline_bytes(part: Part, pool: Pool) -> int:
    """Return the bytes of the weights of the pipelines that run a part, also of those that take turns already."""
    tensors = {id(tensor): tensor for module in part.components for tensor in plain_tensors(tensors_of(module))}
    taken = {id(place.tensor): place.extent for place in pool.places}
    known = sum(size for tensor, size in taken.items() if tensor in tensors)
    return known + bytes_in(tensor for key, tensor in tensors.items() if key not in taken)


def _other_bytes(part: Part, pool: Pool) -> int:
    """Return the bytes that PyTorch holds on the device beside the weights of the part's pipelines."""
    weights = {id(tensor): tensor for module in part.components for tensor in plain_tensors(tensors_of(module))}
    here = bytes_in(tensor for tensor in weights.values() if tensor.device == pool.link.device)
    return max(0, pool.link.allocated() - pool.arena.held - here)


def _choose_providers(part: Part, where: torch.device) -> None:
    """Choose the products of linears that were quantized on the host for the device that they run on."""
    for module in part.module.modules():
        if isinstance(module, StoredLinear) and module.weight.device != where:
            choose_provider(module, where)


def _watch(state: Turns) -> None:
    """Give readers and writers of a state dict, and merges of adapters, the values on the host."""
    weights = state.tenant.weights
    stack = contextlib.ExitStack()

    def reads(*_: Any) -> None:
        stack.enter_context(weights.on_host())

    def writes(*_: Any) -> None:
        stack.enter_context(weights.on_host(writes=True))

    def done(*_: Any) -> None:
        stack.close()

    module = weights.module
    state.hooks = [
        module.register_state_dict_pre_hook(reads),
        module.register_state_dict_post_hook(done),
        module.register_load_state_dict_pre_hook(writes),
        module.register_load_state_dict_post_hook(done),
    ]

    @contextlib.contextmanager
    def merging(layer: Any) -> Iterator[None]:
        weight = getattr(getattr(layer, "base_layer", None), "weight", None)
        with state.pool.lock, weights.opened(weight):
            yield

    MERGES.around.append(merging)
    MERGES.watch()
    state.hooks.append(_Removable(lambda: MERGES.around.remove(merging)))


@dataclass
class _Removable:
    remove: Callable[[], None]


def remove(_part: Part, state: Resident | Turns) -> None:
    if isinstance(state, Resident):
        state.back()
        return
    for hook in state.hooks:
        hook.remove()
    state.pool.drop(state.tenant)


def conflicts(_config: Memory, choice: Choice) -> str | None:
    quantized = choice.get(Quantize)
    if quantized is not None and not quantized.keeps_bytes:
        return (
            "quantize keeps the original weights on the device, and memory has no room for both; write "
            "Quantize(..., keep='cpu')"
        )
    return None


def reconcile(config: Memory, compilation: CompilationConfig) -> Memory:
    if compilation.enable_freezing:
        raise ConfigError(
            "enable_freezing keeps copies of weights on the device, and memory has no room for them; leave one of them out"
        )
    return config


def report(_part: Part, config: Memory, state: Resident | Turns) -> Note:
    if isinstance(state, Resident):
        return Note(f"{config}: all weights stay on the device", {"budget": config.budget, "resident": True})
    pool, tenant = state.pool, state.tenant
    schedule, missed = tenant.schedule, tenant.weights.missed
    texts = [f"{config}: planned at its first call"]
    if not tenant.loops:
        texts = [f"takes its turn in the memory of the denoiser ({gigabytes(tenant.weights.size)})"]
    elif schedule is not None:
        texts = [cost(tenant.name, schedule, pool.budget, pool.machine)]
    texts += [EMULATED] if pool.link.device.type == "cpu" and tenant.loops else []
    if missed:
        texts.append(
            f"{sum(missed.values())} blocks ran out of order and were loaded when called ({next(iter(missed))})"
        )
    unlocked = pool.link.unlocked(seat.unit.host for seat in tenant.weights.seats)
    data: dict[str, Any] = {"budget": pool.budget, "size": tenant.weights.size, "unlocked": unlocked}
    data |= {"misses": dict(missed), "notes": list(tenant.notes)}
    if schedule is not None:
        data |= {"resident": sorted(schedule.resident), "streamed": list(schedule.streamed), "slots": schedule.slots}
        data |= {"activations": tenant.reserve, "measured": tenant.measured is not None}
        data |= {"step_ms": schedule.step_ms, "resident_step_ms": schedule.compute_ms} if tenant.loops else {}
    if data["unlocked"]:
        texts.append(
            f"{gigabytes(data['unlocked'])} are not page-locked, which is slow: the host has too little memory"
        )
    return Note("; ".join([*texts, *tenant.notes]), data)


def settles_after(part: Part, _config: Memory) -> int:
    """Return the calls after which the blocks are timed, and planned with these times."""
    return 1 if part.name.startswith(_ONCE) else TIMED_CALL + 2


TECHNIQUE = Technique(
    name="memory",
    config=Memory,
    applies_to=applies_to,
    apply=apply,
    remove=remove,
    conflicts=conflicts,
    report=report,
    reconcile=reconcile,
    settles_after=settles_after,
    after=("channels_last", "graphs", "quantize", "skip", "parallel", "attention", "sparse"),
)
