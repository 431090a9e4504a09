"""Time the ways to run a part on its first call, and keep the fastest."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tritium import compat, measure
from tritium.pipelines.part import Part
from tritium.techniques.choice import Choice, Off
from tritium.techniques.parallel import ranks

SECONDS = 2.0

# Consecutive calls of each way: the first one after a switch has colder caches.
_BURST = 3

# Compiling must save this share of eager's time, a lossy technique this share of the time without it, and Tritium may be
# the other share slower than torch.compile (noise).
GAIN = 0.03
TIE = 0.02


def ways(part: Part) -> list[Choice]:
    """Return every way to run a part; a lossy technique that the plan names is compared with going without it."""
    if not part.spec.blocks:
        return [Choice(how="eager")]
    without = [Choice(techniques=(Off(name),)) for name in part.insisted]
    return [Choice(how="eager"), Choice(how="inductor"), Choice(how="tritium"), *without, *part.variants()]


# The arguments of one call of a part.
Call = tuple[tuple[Any, ...], Mapping[str, Any]]


def decide(part: Part, calls: Sequence[Call], seconds: float = SECONDS) -> None:
    """Time all ways to run the calls, interleaved; switch to the fastest and record the reason."""
    taken = timed(part, ways(part), calls, seconds)
    insisted = part.insisted
    if insisted:
        best = Choice(how="tritium")
        part.why = _figures(taken)
        for name in insisted:
            tell_if_slower(part, name, taken[best], taken[Choice(techniques=(Off(name),))])
    else:
        best, part.why = pick(taken)
    part.use(best)


def timed(
    part: Part, choices: Sequence[Choice], calls: Sequence[Call], seconds: float = SECONDS
) -> dict[Choice, float]:
    """Return the median milliseconds of a call in several ways, interleaved; the part stays in the last one timed."""
    by_name = {str(choice): choice for choice in choices}

    def run() -> None:
        for call in calls:
            # Copy lists: each call changes the frame cache in them.
            args, kwargs = compat.tensors.map_tensors(lambda tensor: tensor, call)
            part.run(*args, **kwargs)

    # Tiles of a VAE differ by rank, and contain no collectives.
    others = ranks.control() if "parallel" in part.configs() and part.component is part.module else None
    timings = measure.interleave(
        dict.fromkeys(by_name, run),
        _device_type(part, calls),
        seconds=seconds if others is None else None,
        # All ranks make as many calls.
        rounds=None if others is None else measure.balanced_rounds(len(by_name)),
        burst=_BURST,
        prepare=lambda name: part.use(by_name[name]),
    )
    taken = {choice: timings[str(choice)].median_ms / len(calls) for choice in choices}
    if others is not None:
        # The slowest rank decides, on all of them alike.
        by_rank = others.gather(list(taken.values()))
        taken = dict(zip(taken, map(max, zip(*by_rank, strict=True)), strict=True))
    part.measured = {str(choice): milliseconds for choice, milliseconds in taken.items()}
    return taken


def tell_if_slower(part: Part, technique: str, with_it: float, without: float) -> None:
    """Warn in one line if a technique that the plan names makes a part slower; it is kept."""
    if with_it > without:
        warnings.warn(
            f"tritium: {technique} makes {part.name} {with_it / without:.2f} times slower here ({with_it:.2f} ms a call, "
            f"{without:.2f} ms without); it is used because the plan names it",
            RuntimeWarning,
            stacklevel=3,
        )


def pick(taken: Mapping[Choice, float]) -> tuple[Choice, str]:
    """Return the way to keep, and why. Eager wins if the gain is small; Tritium wins ties.

    >>> pick({Choice(how="eager"): 10.0, Choice(how="inductor"): 8.0, Choice(how="tritium"): 7.0})
    (Choice(how='tritium'), 'eager 10.00 ms, inductor 8.00 ms, tritium 7.00 ms')
    """
    figures = _figures(taken)
    eager = min(milliseconds for choice, milliseconds in taken.items() if choice.how == "eager")
    lossless = min(milliseconds for choice, milliseconds in taken.items() if not choice.is_lossy)
    compiled = {
        choice: milliseconds
        for choice, milliseconds in taken.items()
        if choice.how != "eager" and (not choice.is_lossy or milliseconds < lossless * (1 - GAIN))
    }
    if not compiled or min(compiled.values()) > eager * (1 - GAIN):
        left = next(choice for choice in taken if choice.how == "eager")
        return left, f"left alone: nothing saves {GAIN:.0%} of eager ({figures})"
    fastest = min(compiled.values())
    ours = {c: ms for c, ms in compiled.items() if c.how == "tritium" and ms <= fastest * (1 + TIE)}
    best = min(ours or compiled, key=compiled.__getitem__)
    # Prefer no techniques if that is about as fast.
    plain = Choice(how=best.how)
    if not best.is_lossy and plain in compiled and compiled[plain] <= compiled[best] * (1 + TIE):
        best = plain
    return best, figures


def _figures(taken: Mapping[Choice, float]) -> str:
    return ", ".join(f"{choice} {milliseconds:.2f} ms" for choice, milliseconds in taken.items())


def _device_type(part: Part, calls: Sequence[Call]) -> str:
    for value in (*calls[0][0], *calls[0][1].values(), *part.module.parameters()):
        if isinstance(value, torch.Tensor):
            return value.device.type
    return "cpu"
