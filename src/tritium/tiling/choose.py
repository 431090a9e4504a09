"""Choose the tiling of one kernel: compare all ways to cut its loops; change only for a clear gain.

Inductor ranks tilings by coalesced bytes. With symbolic sizes a division by a size costs as much as several bytes, and
other cuts avoid it; the cost model adds only this. Reductions and kernels with static sizes keep Inductor's tiling.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import sympy

from tritium import compat
from tritium.report.observation import KernelTiling
from tritium.tiling import cost

Tiling = Mapping[str, sympy.Expr]
# A tiling, its scores, and the record of the decision.
Answer = tuple[Tiling, Any, KernelTiling]

# From this version on, Inductor launches a reduction over three grid dims with a grid of two.
REDUCTIONS_IN_3D_MISCOMPILE: compat.versions.Version = (2, 12)


@dataclass(frozen=True)
class Question:
    """Inductor's arguments when it tiles a kernel, and its answer."""

    # Inductor's scheduling class.
    scheduling: Any
    schedule: Sequence[Any]
    numel: sympy.Expr
    reduction_numel: sympy.Expr
    # Coalesced bytes by loop; None if Inductor's analysis failed.
    analysis: Any
    answer: Tiling
    scores: Any

    @property
    def sizes(self) -> Any:
        """Inductor's object with the hints and guards of sizes."""
        return compat.generated.lowering_graph().sizevars

    @property
    def is_reduction(self) -> bool:
        return bool(self.reduction_numel != 1)

    @property
    def loops(self) -> list[sympy.Symbol]:
        return list(self.analysis.norm_read_writes.index_vars)

    def keep(self, reason: str, costs: Mapping[str, float] | None = None) -> Answer:
        return _answer("coalesced", self.answer, self.scores, reason, costs)

    def flatten(self, reason: str) -> Answer:
        return _answer("1d", self.scheduling.create_tiling([self.numel], [self.reduction_numel]), None, reason)

    def cut(self, cuts: cost.Cuts) -> tuple[Tiling, Any]:
        """Return a tiling in Inductor's form, with its scores."""
        ranges = self.analysis.norm_read_writes.var_ranges
        edges = [0, *cuts, len(self.loops)]
        dims = [self.loops[start:end] for start, end in pairwise(edges)]
        sizes = [sympy.prod([ranges[loop] for loop in dim]) for dim in dims]
        scores = [self.analysis.coalesced_by_var.get(dim[-1], 0) for dim in dims]
        make = self.scheduling.create_tiling
        return make(sizes, [self.reduction_numel]), make(scores, [])


def _answer(choice: str, tiling: Tiling, scores: Any, reason: str, costs: Mapping[str, float] | None = None) -> Answer:
    # Inductor adds a reduction of size 1 to every tiling.
    sizes = {name: str(size) for name, size in tiling.items() if name[0] != "r" or str(size) != "1"}
    dims = {name.rstrip("_"): size for name, size in sizes.items()}
    return tiling, scores, KernelTiling(dims, choice, reason, dict(costs or {}))


def choose(
    question: Question, *, pin: str | None, compare: bool, index_bits: int, multiprocessors: int | None
) -> Answer:
    """Return the pinned tiling, a better one than Inductor's, or Inductor's."""
    if question.is_reduction and "z" in question.answer and compat.versions.TORCH >= REDUCTIONS_IN_3D_MISCOMPILE:
        return question.flatten(
            f"torch {compat.versions.version_text()} miscompiles reductions over three dims of grid"
        )
    if pin == "coalesced":
        return question.keep("pinned to what Inductor chose")
    if pin == "1d" and not question.is_reduction:
        return question.flatten("pinned")
    reason = None
    if question.is_reduction:
        reason = "a reduction keeps the tiling of Inductor's analysis"
    elif question.analysis is None:
        reason = "Inductor could not analyse its accesses"
    elif not question.loops:
        reason = "it has no loops"
    if reason is not None:
        return question.keep(f"pinned to {pin}, but {reason}" if pin else reason)
    if not compare and pin is None:
        return question.keep("choosing tilings is switched off")
    workload = workload_of(question, index_bits=index_bits, multiprocessors=multiprocessors)
    if pin is None and not any(loop.is_symbolic for loop in workload.loops):
        return question.keep("its sizes are static: Inductor's analysis is kept")
    return _compare(question, workload, pin)


def _compare(question: Question, workload: cost.Workload, pin: str | None) -> Answer:
    kept = _cuts_of(question, question.answer)
    if kept is None:
        return question.keep("Inductor splits a loop of it, which the cost model does not know")
    costs: dict[cost.Cuts, float] = {}
    declined: dict[cost.Cuts, str] = {}
    for cuts in cost.all_cuts(len(workload.loops), most_dims=3):
        if cuts != kept and (why := _decline(question, cuts)) is not None:
            declined[cuts] = why
        else:
            costs[cuts] = cost.cost(workload, cuts)
    named = {_name(cuts, workload): round(price, 3) for cuts, price in sorted(costs.items(), key=lambda item: item[1])}
    if pin is not None:
        dims = int(pin[0])
        fitting = [cuts for cuts in costs if len(cuts) == dims - 1]
        if not fitting:
            whys = sorted({why for cuts, why in declined.items() if len(cuts) == dims - 1})
            return question.keep(f"pinned to {pin}, but {'; '.join(whys) or 'it has too few loops'}", named)
        best, reason = min(fitting, key=costs.__getitem__), "pinned"
    else:
        best = min(costs, key=costs.__getitem__)
        reason = f"{costs[best]:.2f} instead of {costs[kept]:.2f} ps an element by the cost model"
        if best == kept or costs[kept] / max(costs[best], 1e-9) < cost.LEAST_GAIN:
            return question.keep("no other tiling promises a clear gain", named)
    tiling, scores = question.cut(best)
    if "z" in tiling:
        # A later call with larger sizes recompiles instead of launching a grid that is too large.
        for dim in ("y", "z"):
            question.sizes.check_leq(tiling[dim], sympy.Integer(cost.MOST_BLOCKS))
    return _answer(f"{len(best) + 1}d", tiling, scores, reason, named)


def _cuts_of(question: Question, tiling: Tiling) -> cost.Cuts | None:
    """Return the positions where Inductor's tiling cuts the loops, or None if it splits a loop."""
    dims = [size for name, size in tiling.items() if name in ("x", "y", "z")]
    for cuts in cost.all_cuts(len(question.loops), most_dims=3):
        if len(cuts) != len(dims) - 1:
            continue
        sizes = [size for name, size in question.cut(cuts)[0].items() if name in ("x", "y", "z")]
        if all(sympy.expand(mine - theirs) == 0 for mine, theirs in zip(sizes, dims, strict=True)):
            return cuts
    return None


def _decline(question: Question, cuts: cost.Cuts) -> str | None:
    tiling, _ = question.cut(cuts)
    if not question.scheduling.tiling_is_compatible(
        question.schedule, question.numel, question.reduction_numel, tiling
    ):
        return "its loops cannot be cut that way"
    if "z" not in tiling:
        return None
    # In two dims Inductor continues a long y along z; in three dims it cannot.
    for dim in ("y", "z"):
        # By proof, or by its current value and a guard.
        sizes, size = question.sizes, tiling[dim]
        can_guard = compat.generated.can_guard(size) and int(sizes.optimization_hint(size)) <= cost.MOST_BLOCKS
        if not sizes.statically_known_leq(size, cost.MOST_BLOCKS) and not can_guard:
            return f"{dim} may need more than {cost.MOST_BLOCKS:,} blocks"
    return None


def _name(cuts: cost.Cuts, workload: cost.Workload) -> str:
    sizes = [math.prod(loop.size for loop in dim) for dim in cost.groups(workload, cuts)]
    return f"{len(sizes)}d " + "x".join(map(str, sizes))


def workload_of(question: Question, *, index_bits: int, multiprocessors: int | None) -> cost.Workload:
    """Return the kernel's loops with their costs, from Inductor's analysis."""
    analysis, hint = question.analysis, question.sizes.optimization_hint
    accesses = analysis.norm_read_writes
    functions = compat.generated.division_functions()
    divisions = {part for access in (*accesses.reads, *accesses.writes) for part in access.atoms(*functions)}
    loops = []
    for loop in question.loops:
        size = sympy.sympify(accesses.var_ranges[loop])
        # Divisors of divisions and remainders of the loop's index, each once.
        divisors = [divisor for part in divisions if part.has(loop) for divisor in part.args[1:]]
        loops.append(
            cost.Loop(
                size=int(hint(size)),
                is_symbolic=bool(size.free_symbols),
                known_factor=_known_factor(size),
                bytes=int(analysis.coalesced_by_var.get(loop, 0)),
                divisions=sum(bool(divisor.free_symbols) for divisor in divisors),
                constant_divisions=sum(divisor.is_Integer and divisor != 1 for divisor in divisors),
            )
        )
    return cost.Workload(
        tuple(loops),
        scattered_bytes=int(sum(analysis.uncoalesced_addrs.values())),
        index_bits=index_bits,
        multiprocessors=multiprocessors,
    )


def _known_factor(size: sympy.Expr) -> int:
    """Return the largest integer that divides a size for all values of its symbols.

    >>> s = sympy.Symbol("s", integer=True)
    >>> _known_factor(64 * s + 128), _known_factor(s + 2)
    (64, 1)
    """
    return math.gcd(*(int(term.as_coeff_Mul()[0]) for term in sympy.Add.make_args(sympy.expand(size))))
