"""Leave out steps, branches or blocks of a denoiser by a plan, and replace their results by forecasts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from tritium import compat
from tritium.techniques.choice import Choice
from tritium.techniques.quantize.config import Quantize
from tritium.techniques.skip.blocks import repeated_blocks, why_no_ranges
from tritium.techniques.skip.clock import Clock
from tritium.techniques.skip.config import Skip
from tritium.techniques.skip.gate import Gate
from tritium.techniques.skip.ranges import Ranges
from tritium.techniques.skip.record import ImageRecord
from tritium.techniques.skip.table import ATTENTION, BLOCKS
from tritium.techniques.technique import Note, Part, Technique

__all__ = ["TECHNIQUE", "Gate", "ImageRecord", "Skip", "State"]

# Parts whose steps can be left out: denoisers, and a bare model.
_PARTS = ("transformer", "transformer_2", "unet", "model")


@dataclass
class State:
    """The gate of a part, and the attention layers whose calls it replaced."""

    gate: Gate
    # The instance's attribute `forward` of each layer before, or None.
    forwards: list[tuple[nn.Module, Any]] = field(default_factory=list)


def applies_to(part: Part, config: Skip) -> str | None:
    if part.name not in _PARTS:
        return "it leaves out steps of denoisers alone"
    two_stage = next((type(s).__name__ for s in part.schedulers if compat.diffusers.is_two_stage(s)), None)
    if two_stage is not None:
        return f"{two_stage} calls the denoiser twice a step, and a forecast would mix the two"
    if config.span is not None and (config.uses(BLOCKS) or config.uses(ATTENTION)):
        return why_no_ranges(part.module, len(repeated_blocks(part.module)), config.span[1])
    return None


def apply(part: Part, config: Skip) -> State:
    blocks = repeated_blocks(part.module)
    letters = frozenset(letter for letter in (BLOCKS, ATTENTION) if config.uses(letter))
    ranges = Ranges(blocks, config.span, letters) if letters and config.span is not None else None
    gate = Gate(part.module, config, Clock(lambda: part.schedulers), max(1, len(blocks)), ranges)
    part.around(gate, outside=True)
    state = State(gate)
    if ranges is not None and BLOCKS in letters:
        part.around_blocks(ranges.around_block)
    if ranges is not None:
        for place, layer in enumerate(ranges.layers):
            state.forwards.append((layer, layer.__dict__.get("forward")))
            layer.__dict__["forward"] = ranges.around_attention(place, layer.forward)
    return state


def remove(_part: Part, state: State) -> None:
    for layer, forward in reversed(state.forwards):
        if forward is None:
            del layer.__dict__["forward"]
        else:
            layer.__dict__["forward"] = forward


def conflicts(config: Skip, choice: Choice) -> str | None:
    if config.uses(ATTENTION) and choice.how != "eager":
        return (
            "attention that is reused is left out inside of blocks, so its part cannot be compiled; give it to that part: "
            "Plan(components={'transformer': Choice(how='eager', skip=...)})"
        )
    quantize = choice.get(Quantize)
    if config.uses(BLOCKS) and quantize is not None and quantize.steps is not None:
        return "quantize with steps runs two programs, and blocks are left out in one; leave out B, or steps"
    return None


def variants(_part: Part) -> Sequence[Skip]:
    # A table is found by a search with images, and no timing of one call can judge it.
    return []


def report(_part: Part, config: Skip, state: State) -> Note:
    gate = state.gate
    last = gate.last
    data: dict[str, Any] = {
        "table": list(config.rows),
        "over": config.over,
        "span": list(config.span) if config.span is not None else None,
        "block_count": gate.blocks,
        "images": gate.images,
        "off": gate.is_off,
        "declined": list(gate.declined),
        "bytes": gate.bytes,
        "loss": config.loss,
        "last": last.to_dict() if last is not None else None,
    }
    words = [str(config) if not gate.is_off else f"{config}, switched off"]
    if last is not None and not last.declined:
        words.append(f"last image {last.done} of {last.without} block executions ({' / '.join(last.rows)})")
    words += [f"ran every step: {reason}" for reason in gate.declined]
    if gate.ranges is not None and gate.ranges.attention_bytes:
        words.append(f"attention kept in {gate.ranges.attention_bytes / 2**20:.0f} MiB a branch")
    if gate.ranges is not None and gate.ranges.refused:
        words.append(f"no blocks are left out: {gate.ranges.refused}")
    if config.loss:
        words.append(config.loss)
    return Note("; ".join(words), data)


# Not `is_lossy`: that compares the times of one call with and without it, and a call that runs takes as long as before.
TECHNIQUE = Technique(
    name="skip",
    config=Skip,
    applies_to=applies_to,
    apply=apply,
    remove=remove,
    conflicts=conflicts,
    variants=variants,
    report=report,
    # Ranks follow each call, also one that is left out.
    after=("parallel",),
)
