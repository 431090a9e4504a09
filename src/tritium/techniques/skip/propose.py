"""Propose tables from recorded outputs: growing windows, and a dynamic programme over segments between computed steps.

Every error of a forecast follows from the inner products of the recorded outputs, so nothing is run here. Open-loop errors
alone choose bad tables: an early error changes all later steps. Each step's error is therefore weighted by its measured
sensitivity, and the proposals are only ranked; real images decide.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from tritium.techniques.skip import policies, table
from tritium.techniques.skip.config import Over, Skip
from tritium.techniques.skip.table import DERIVE, FORECASTS, RUN

_FIRST = (2, 3, 4, 6)
_LAST = (1, 2, 3)
_GROWTH = (0.0, 0.3, 0.6, 1.0)
ORDERS = (1, 2)


@dataclass(frozen=True)
class Recording:
    """The outputs of the denoiser in some images, as inner products of every two calls of an image."""

    # [images, branches, steps, branches, steps] in float64.
    products: torch.Tensor
    # The noise level of every step.
    levels: tuple[float, ...]

    @property
    def steps(self) -> int:
        return int(self.products.shape[2])

    @property
    def branches(self) -> int:
        return int(self.products.shape[1])

    def error(self, branch: int, step: int, weights: Sequence[tuple[int, int, float]]) -> float:
        """Return the relative error of a combination of outputs (branch, step, weight) against the output of a step."""
        terms = [*weights, (branch, step, -1.0)]
        square = torch.zeros(len(self.products), dtype=torch.float64)
        for b, s, w in terms:
            for c, t, v in terms:
                square += w * v * self.products[:, b, s, c, t]
        size = self.products[:, branch, step, branch, step].clamp_min(1e-30)
        # Inner products cancel to about 1e-16 of their size.
        return math.sqrt(float((square.clamp_min(0) / size).mean()))


def weights_of(xs: Sequence[float], x: float) -> list[float]:
    """Return the weights of the values at some abscissae in the polynomial through them at another one.

    >>> weights_of([0, 1], 3)
    [-2.0, 3.0]
    """
    found = []
    for place, own in enumerate(xs):
        factors = [(x - other) / (own - other) for at, other in enumerate(xs) if at != place]
        found.append(math.prod(factors, start=1.0))
    return found


@dataclass
class Proposer:
    """Ranks tables by recorded outputs and by the sensitivity of the steps."""

    recording: Recording
    # By step: the error of the final latents divided by that of the step's output.
    sensitivity: tuple[float, ...]
    # Errors of lines by their steps: windows and programmes of every number of runs read the same ones.
    _errors: dict[tuple[int, int, int], float] = field(default_factory=dict)

    def cost(self, skip: Skip) -> float:
        """Return the weighted open-loop error of a table."""
        steps, branches = self.recording.steps, self.recording.branches
        rows = skip.actions(steps, branches=branches)
        places = self._places(skip.over)
        total = 0.0
        for branch, row in enumerate(rows):
            computed: list[int] = []
            difference = -1
            for step, letter in enumerate(row):
                if letter == RUN:
                    computed.append(step)
                    difference = step if rows[0][step] == RUN else difference
                elif letter in FORECASTS:
                    anchors = computed[-(int(letter) + 1) :]
                    weights = weights_of([places[anchor] for anchor in anchors], places[step])
                    terms = [(branch, anchor, weight) for anchor, weight in zip(anchors, weights, strict=True)]
                    total += self.sensitivity[step] * self.recording.error(branch, step, terms)
                elif letter == DERIVE:
                    terms = [(0, step, 1.0), (0, difference, -1.0), (branch, difference, 1.0)]
                    total += self.sensitivity[step] * self.recording.error(branch, step, terms)
        return total / branches

    def _places(self, over: Over) -> list[float]:
        return [float(step) for step in range(self.recording.steps)] if over == "index" else [*self.recording.levels]

    def proposals(self, runs: int, most: int) -> list[Skip]:
        """Return different tables with this number of computed steps, the most promising first."""
        found: dict[str, Skip] = {}
        for row in (*self._windows(runs), *self._planned(runs)):
            found.setdefault(row, Skip(row))
        ranked = sorted(found.values(), key=self.cost)
        # The best of each order first: the ranking between orders is the least certain part of it.
        best = [next((skip for skip in ranked if skip.largest_order == order), None) for order in ORDERS]
        leading = [skip for skip in best if skip is not None]
        return [*leading, *(skip for skip in ranked if skip not in leading)][:most]

    def _windows(self, runs: int) -> Iterator[str]:
        steps = self.recording.steps
        for order in ORDERS:
            for first in _FIRST:
                for last in _LAST:
                    if first > order and first + last <= runs <= steps:
                        for growth in _GROWTH:
                            fields = {"steps": steps, "runs": runs, "first": first, "last": last}
                            yield policies.window(**fields, growth=growth, letter=str(order))

    def _planned(self, runs: int) -> Iterator[str]:
        for first in (3, 4):
            if first <= runs <= self.recording.steps:
                computed = self._shortest(runs, first)
                for order in ORDERS:
                    yield "".join(RUN if step in computed else str(order) for step in range(self.recording.steps))

    def _shortest(self, runs: int, first: int) -> frozenset[int]:
        """Return the computed steps whose segments cost least in sum, by lines through the last two of them."""
        steps = self.recording.steps
        best: dict[tuple[int, int], tuple[float, tuple[int, ...]]] = {
            (first - 2, first - 1): (0.0, tuple(range(first)))
        }
        for _ in range(runs - first):
            following: dict[tuple[int, int], tuple[float, tuple[int, ...]]] = {}
            for (before, last), (so_far, path) in best.items():
                for place in range(last + 1, steps):
                    cost = so_far + self._segment(before, last, place)
                    known = following.get((last, place))
                    if known is None or cost < known[0]:
                        following[last, place] = (cost, (*path, place))
            best = following
        ends = ((so_far + self._segment(*pair, steps), path) for pair, (so_far, path) in best.items())
        return frozenset(min(ends)[1])

    def _segment(self, before: int, last: int, end: int) -> float:
        """Return the weighted error of the steps between `last` and `end`."""
        return sum(self._error(before, last, step) for step in range(last + 1, end))

    def _error(self, before: int, last: int, step: int) -> float:
        found = self._errors.get((before, last, step))
        if found is None:
            a, b = weights_of([before, last], step)
            branches = range(self.recording.branches)
            errors = [self.recording.error(c, step, [(c, before, a), (c, last, b)]) for c in branches]
            found = self._errors[before, last, step] = sum(errors) / len(errors)
        return found * self.sensitivity[step]

    def derived(self, skip: Skip) -> list[Skip]:
        """Return tables that also derive later branches in the last part of an image, the cheapest first."""
        if self.recording.branches < 2 or len(skip.rows) > 1:
            return []
        row, steps = skip.rows[0], self.recording.steps
        found = []
        for share in (0.5, 0.67, 0.8):
            start = max(2, round(share * steps))
            rest = "".join(DERIVE if letter == RUN else letter for letter in row[start:])
            if DERIVE in rest:
                found.append(Skip((row, row[:start] + rest), over=skip.over))
        return found


def interpolated(known: dict[int, float], steps: int) -> tuple[float, ...]:
    """Return a positive value for every step from those of some steps, linear in its logarithm between them.

    >>> [round(value, 3) for value in interpolated({1: 1.0, 3: 0.25}, 5)]
    [1.0, 1.0, 0.5, 0.25, 0.25]
    """
    places = sorted(known)
    found = []
    for step in range(steps):
        left = max((place for place in places if place <= step), default=places[0])
        right = min((place for place in places if place >= step), default=places[-1])
        share = 0.0 if left == right else (step - left) / (right - left)
        low, high = (math.log(max(known[place], 1e-9)) for place in (left, right))
        found.append(math.exp(low + share * (high - low)))
    return tuple(found)


def falling(steps: int) -> tuple[float, ...]:
    """Return a typical sensitivity: it falls 15-fold from the first to the last step."""
    return tuple(15 ** (-step / max(1, steps - 1)) for step in range(steps))


def single(steps: int, step: int) -> Skip:
    """Return a table that forecasts one step alone."""
    return Skip("".join("1" if place == step else RUN for place in range(steps)))


def computed_steps(skip: Skip, steps: int) -> int:
    """Return how many steps the first branch computes."""
    return table.actions(skip.expanded(steps) or (), 1)[0].count(RUN)
