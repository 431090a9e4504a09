"""Time the ways to run a part on its first call, and keep the fastest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tritium import compat, measure
from tritium.pipelines.part import Part
from tritium.techniques.choice import Choice

SECONDS = 2.0

# Consecutive calls of each way: the first one after a switch has colder caches.
_BURST = 3

# Compiling must save this share of eager's time, and Tritium may be this share slower than torch.compile (noise).
GAIN = 0.03
TIE = 0.02


def ways(part: Part) -> list[Choice]:
    """Return every way to run a part."""
    compiled = [Choice(how="inductor"), Choice(how="tritium"), *part.variants()] if part.spec.blocks else []
    return [Choice(how="eager"), *compiled]


# The arguments of one call of a part.
Call = tuple[tuple[Any, ...], Mapping[str, Any]]


def decide(part: Part, calls: Sequence[Call], seconds: float = SECONDS) -> None:
    """Time all ways to run the calls, interleaved; switch to the fastest and record the reason."""
    choices = ways(part)
    device_type = _device_type(part, calls)
    by_name = {str(choice): choice for choice in choices}

    def run() -> None:
        for call in calls:
            # Copy lists: each call changes the frame cache in them.
            args, kwargs = compat.tensors.map_tensors(lambda tensor: tensor, call)
            part.run(*args, **kwargs)

    timings = measure.interleave(
        dict.fromkeys(by_name, run),
        device_type,
        seconds=seconds,
        burst=_BURST,
        prepare=lambda name: part.use(by_name[name]),
    )
    taken = {choice: timings[str(choice)].median_ms / len(calls) for choice in choices}
    best, part.why = pick(taken)
    part.use(best)
    part.measured = {str(choice): milliseconds for choice, milliseconds in taken.items()}


def pick(taken: Mapping[Choice, float]) -> tuple[Choice, str]:
    """Return the way to keep, and why. Eager wins if the gain is small; Tritium wins ties.

    >>> pick({Choice(how="eager"): 10.0, Choice(how="inductor"): 8.0, Choice(how="tritium"): 7.0})
    (Choice(how='tritium'), 'eager 10.00 ms, inductor 8.00 ms, tritium 7.00 ms')
    """
    figures = ", ".join(f"{choice} {milliseconds:.2f} ms" for choice, milliseconds in taken.items())
    eager = min(milliseconds for choice, milliseconds in taken.items() if choice.how == "eager")
    compiled = {choice: milliseconds for choice, milliseconds in taken.items() if choice.how != "eager"}
    if not compiled or min(compiled.values()) > eager * (1 - GAIN):
        left = next(choice for choice in taken if choice.how == "eager")
        return left, f"left alone: nothing saves {GAIN:.0%} of eager ({figures})"
    fastest = min(compiled.values())
    ours = {c: ms for c, ms in compiled.items() if c.how == "tritium" and ms <= fastest * (1 + TIE)}
    best = min(ours or compiled, key=compiled.__getitem__)
    # Prefer no techniques if that is about as fast.
    plain = Choice(how=best.how)
    if plain in compiled and compiled[plain] <= compiled[best] * (1 + TIE):
        best = plain
    return best, figures


def _device_type(part: Part, calls: Sequence[Call]) -> str:
    for value in (*calls[0][0], *calls[0][1].values(), *part.module.parameters()):
        if isinstance(value, torch.Tensor):
            return value.device.type
    return "cpu"
