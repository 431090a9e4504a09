"""Rules that write rows of tables: growing windows, ratios of residuals, intervals, and the masks of cache-dit."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from tritium.errors import ConfigError, nearest
from tritium.techniques.skip.table import FORECASTS, RUN


def window(*, steps: int, runs: int, first: int, last: int, growth: float, letter: str) -> str:
    """Return a row that runs the first and the last steps, with gaps in between that grow from each to the next.

    >>> window(steps=14, runs=8, first=3, last=1, growth=0.5, letter="1")
    'RRRR1R1R11R11R'
    """
    inner = runs - first - last
    if min(steps, runs, first) < 1 or last < 0 or growth < 0:
        raise ConfigError(
            f"a window has steps, runs and first of 1 or more, last and growth of 0 or more; got steps={steps}, "
            f"runs={runs}, first={first}, last={last}, growth={growth}"
        )
    if not first + last <= runs <= steps:
        raise ConfigError(
            f"a window of {steps} steps with the first {first} and the last {last} cannot have {runs} runs; "
            f"{first + last} to {steps} can"
        )
    if letter in FORECASTS and first <= int(letter):
        raise ConfigError(f"forecasts of order {letter} need {int(letter) + 1} computed steps; first is {first}")
    gaps = [1 + growth * place for place in range(inner + 1)]
    chosen = {*range(first), *range(steps - last, steps)}
    start, end = first - 1, steps - last
    so_far, before = 0.0, start
    for place in range(inner):
        so_far += gaps[place]
        wanted = round(start + (end - start) * so_far / sum(gaps))
        # Leave room for those that follow.
        before = max(before + 1, min(wanted, end - (inner - place)))
        chosen.add(before)
    return "".join(RUN if step in chosen else letter for step in range(steps))


def by_ratios(ratios: Sequence[float], threshold: float, longest: int, retain: float, letter: str) -> str:
    """Return a row from the ratios of the norms of consecutive residuals, one for every step, as MagCache decides.

    >>> by_ratios([1.0, 1.0, 0.99, 0.98, 0.9, 0.99], threshold=0.04, longest=2, retain=0.3, letter="0")
    'RR00R0'
    """
    row = ""
    product, error, length = 1.0, 0.0, 0
    kept_steps = int(retain * len(ratios) + 0.5)
    for step, ratio in enumerate(ratios):
        if step >= kept_steps:
            product, length = product * ratio, length + 1
            error += abs(1 - product)
            # A step without one before it has nothing to reuse.
            if step and error <= threshold and length <= longest:
                row += letter
                continue
            product, error, length = 1.0, 0.0, 0
        row += RUN
    return row


def interval(start: int, every: int, end: int | None, letter: str) -> str:
    """Return a row that runs up to step `start` and then one step of `every`; after step `end`, all run.

    >>> interval(2, 3, None, "B"), interval(1, 3, 5, "A")
    ('RR(RBB)', 'RRAARA(R)')
    """
    if start < 0 or every < 2:
        raise ConfigError(f"an interval starts at step 0 or later and is 2 steps or longer, got {start} and {every}")
    cycle = RUN + letter * (every - 1)
    if end is None:
        return f"{RUN * start}({cycle})"
    if end < start:
        raise ConfigError(f"an interval that starts at step {start} cannot end at step {end}")
    length = end + 1 - start
    return RUN * start + (cycle * (length // every + 1))[:length] + "(R)"


# The lengths of computed and of left-out runs of steps in cache-dit 1.5, by number of steps and by name.
_BINS: dict[int, dict[str, tuple[tuple[int, ...], tuple[int, ...]]]] = {
    28: {
        "slow": ((8, 3, 3, 2, 1, 1), (1, 2, 2, 2, 3)),
        "medium": ((6, 2, 2, 2, 2, 1), (1, 3, 3, 3, 3)),
        "fast": ((6, 1, 1, 1, 1, 1), (1, 3, 4, 5, 4)),
        "ultra": ((4, 1, 1, 1, 1), (2, 5, 6, 7)),
    },
    15: {
        "slow": ((4, 2, 2, 2, 1), (1, 1, 1, 1)),
        "medium": ((4, 2, 1, 1, 1), (1, 1, 2, 2)),
        "fast": ((3, 1, 1, 1, 1), (1, 2, 2, 3)),
        "ultra": ((2, 1, 1, 1, 1), (1, 2, 3, 3)),
    },
    9: {
        "slow": ((5, 2, 1), (1,)),
        "medium": ((5, 1, 1), (1, 1)),
        "fast": ((4, 1, 1), (1, 2)),
        "ultra": ((3, 1, 1), (2, 2)),
    },
    8: {
        "slow": ((5, 1, 1), (1,)),
        "medium": ((4, 1, 1), (1, 1)),
        "fast": ((3, 1, 1), (1, 2)),
        "ultra": ((2, 1, 1), (2, 2)),
    },
    6: dict.fromkeys(("slow", "medium", "fast", "ultra"), ((3, 1), (2,))),
    4: dict.fromkeys(("slow", "medium", "fast", "ultra"), ((2, 1), (1,))),
}


def cache_dit(name: str, steps: int, letter: str) -> str:
    """Return the row of one of cache-dit's step masks; it computes the last step.

    >>> cache_dit("fast", 28, "1")
    'RRRRRR1R111R1111R11111R1111R'
    """
    if name not in _BINS[28]:
        raise ConfigError(f"cache-dit has no step mask {name!r}; {nearest(name, _BINS[28])}")
    if steps < 8 and steps not in _BINS:
        raise ConfigError(f"cache-dit has step masks for 4, 6, and 8 or more steps; got {steps}")
    nearest_size = steps if steps in _BINS else 28 if steps >= 16 else 15
    computed, left = (list(lengths) for lengths in _BINS[nearest_size][name])
    if steps > nearest_size:
        _stretch(computed, left, steps)
    _cut(computed, left, steps)
    pairs = itertools.zip_longest(computed, left, fillvalue=0)
    row = "".join(RUN * runs + letter * skipped for runs, skipped in pairs)
    return row[: steps - 1].ljust(steps - 1, RUN) + RUN


def _stretch(computed: list[int], left: list[int], steps: int) -> None:
    """Lengthen runs in turn, each by half of its share, until they cover the steps."""
    more = [[max(int(length * (steps / 28 * 0.5)), 1) for length in lengths] for lengths in (computed, left)]
    while True:
        for place in range(min(len(computed), len(left))):
            for lengths, growth in zip((computed, left), more, strict=True):
                lengths[place] += growth[place]
                if sum(computed) + sum(left) >= steps:
                    return
        computed[-1] += 1
        if sum(computed) + sum(left) >= steps:
            return


def _cut(computed: list[int], left: list[int], steps: int) -> None:
    """Shorten the last runs of both kinds in turn until they have this number of steps."""
    while True:
        for lengths in (left, computed):
            if sum(computed) + sum(left) <= steps:
                return
            if lengths:
                lengths[-1] -= 1
                if not lengths[-1]:
                    lengths.pop()
