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
from tritium.report.tiling import KernelTiling
from tritium.tiling import cost
from tritium.tiling.policy import printed

Tiling = Mapping[str, sympy.Expr]

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
        """Return Inductor's object with the hints and guards of sizes."""
        return compat.generated.lowering_graph().sizevars

    @property
    def is_reduction(self) -> bool:
        return bool(self.reduction_numel != 1)

    @property
    def loops(self) -> list[sympy.Symbol]:
        return list(self.analysis.norm_read_writes.index_vars)

    def cut(self, cuts: cost.Cuts) -> tuple[Tiling, Any]:
        """Return a tiling in Inductor's form, with its scores."""
        ranges = self.analysis.norm_read_writes.var_ranges
        edges = [0, *cuts, len(self.loops)]
        dims = [self.loops[start:end] for start, end in pairwise(edges)]
        sizes = [sympy.prod([ranges[loop] for loop in dim]) for dim in dims]
        scores = [self.analysis.coalesced_by_var.get(dim[-1], 0) for dim in dims]
        make = self.scheduling.create_tiling
        return make(sizes, [self.reduction_numel]), make(scores, [])


@dataclass(frozen=True)
class Answer:
    tiling: Tiling
    scores: Any
    decision: KernelTiling


def choose(
    question: Question, *, pin: str | None, compare: bool, index_bits: int, multiprocessors: int | None
) -> Answer:
    """Return the pinned tiling, a better one than Inductor's, or Inductor's."""
    kept = question.answer
    if question.is_reduction and "z" in kept and compat.versions.TORCH >= REDUCTIONS_IN_3D_MISCOMPILE:
        flat = question.scheduling.create_tiling([question.numel], [question.reduction_numel])
        why = f"torch {compat.versions.version_text()} miscompiles reductions over three dims of grid"
        return _answer("1d", flat, None, why)
    if pin == "coalesced":
        return _keep(question, "pinned to what Inductor chose")
    reason = _why_not(question)
    if pin == "1d" and not question.is_reduction:
        flat = question.scheduling.create_tiling([question.numel], [question.reduction_numel])
        return _answer("1d", flat, None, "pinned")
    if reason is not None:
        return _keep(question, f"pinned to {pin}, but {reason}" if pin else reason)
    if not compare and pin is None:
        return _keep(question, "choosing tilings is switched off")
    workload = workload_of(question, index_bits=index_bits, multiprocessors=multiprocessors)
    if pin is None and not any(loop.is_symbolic for loop in workload.loops):
        return _keep(question, "its sizes are static: Inductor's analysis is kept")
    return _compare(question, workload, pin)


def _why_not(question: Question) -> str | None:
    if question.is_reduction:
        return "a reduction keeps the tiling of Inductor's analysis"
    if question.analysis is None:
        return "Inductor could not analyse its accesses"
    if not question.loops:
        return "it has no loops"
    return None


def _compare(question: Question, workload: cost.Workload, pin: str | None) -> Answer:
    kept = _cuts_of(question, question.answer)
    if kept is None:
        return _keep(question, "Inductor splits a loop of it, which the cost model does not know")
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
        fitting = {cuts: price for cuts, price in costs.items() if len(cuts) == dims - 1}
        if not fitting:
            whys = sorted({why for cuts, why in declined.items() if len(cuts) == dims - 1})
            return _keep(question, f"pinned to {pin}, but {'; '.join(whys) or 'it has too few loops'}", named)
        return _take(question, min(fitting, key=fitting.__getitem__), "pinned", named)
    best = min(costs, key=costs.__getitem__)
    gain = costs[kept] / max(costs[best], 1e-9)
    if best == kept or gain < cost.LEAST_GAIN:
        return _keep(question, "no other tiling promises a clear gain", named)
    reason = f"{costs[best]:.2f} instead of {costs[kept]:.2f} ps an element by the cost model"
    return _take(question, best, reason, named)


def _take(question: Question, cuts: cost.Cuts, reason: str, costs: Mapping[str, float]) -> Answer:
    tiling, scores = question.cut(cuts)
    if "z" in tiling:
        # A later call with larger sizes recompiles instead of launching a grid that is too large.
        for dim in ("y", "z"):
            question.sizes.check_leq(tiling[dim], sympy.Integer(cost.MOST_BLOCKS))
    return _answer(f"{len(cuts) + 1}d", tiling, scores, reason, costs)


def _keep(question: Question, reason: str, costs: Mapping[str, float] | None = None) -> Answer:
    return _answer("coalesced", question.answer, question.scores, reason, costs)


def _answer(choice: str, tiling: Tiling, scores: Any, reason: str, costs: Mapping[str, float] | None = None) -> Answer:
    return Answer(tiling, scores, KernelTiling(printed(tiling), choice, reason, dict(costs or {})))


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
        if not _stays_below(question.sizes, tiling[dim], cost.MOST_BLOCKS):
            return f"{dim} may need more than {cost.MOST_BLOCKS:,} blocks"
    return None


def _stays_below(sizes: Any, size: sympy.Expr, limit: int) -> bool:
    """Return True if a size stays below a limit: by proof, or by its current value and a guard."""
    if sizes.statically_known_leq(size, limit):
        return True
    return compat.generated.can_guard(size) and int(sizes.optimization_hint(size)) <= limit


def _name(cuts: cost.Cuts, workload: cost.Workload) -> str:
    sizes = [math.prod(loop.size for loop in dim) for dim in cost.groups(workload, cuts)]
    return f"{len(sizes)}d " + "x".join(map(str, sizes))


def workload_of(question: Question, *, index_bits: int, multiprocessors: int | None) -> cost.Workload:
    """Return the kernel's loops with their costs, from Inductor's analysis."""
    analysis = question.analysis
    accesses = analysis.norm_read_writes
    hint = question.sizes.optimization_hint
    loops = []
    for loop in question.loops:
        size = sympy.sympify(accesses.var_ranges[loop])
        symbolic, constant = _divisions_by(loop, [*accesses.reads, *accesses.writes])
        loops.append(
            cost.Loop(
                size=int(hint(size)),
                is_symbolic=bool(size.free_symbols),
                known_factor=_known_factor(size),
                bytes=int(analysis.coalesced_by_var.get(loop, 0)),
                divisions=symbolic,
                constant_divisions=constant,
            )
        )
    return cost.Workload(
        tuple(loops),
        scattered_bytes=int(sum(analysis.uncoalesced_addrs.values())),
        index_bits=index_bits,
        multiprocessors=multiprocessors,
    )


def _divisions_by(loop: sympy.Symbol, accesses: Sequence[sympy.Expr]) -> tuple[int, int]:
    """Count divisions and remainders of a loop's index in the accesses, each once: symbolic and constant."""
    floor_div, modular_indexing = compat.generated.division_functions()
    found = {part for access in accesses for part in access.atoms(floor_div, modular_indexing) if part.has(loop)}
    symbolic = sum(sum(bool(size.free_symbols) for size in part.args[1:]) for part in found)
    constant = sum(sum(size.is_Integer and size != 1 for size in part.args[1:]) for part in found)
    return symbolic, constant


def _known_factor(size: sympy.Expr) -> int:
    """Return the largest integer that divides a size for all values of its symbols.

    >>> s = sympy.Symbol("s", integer=True)
    >>> _known_factor(64 * s + 128), _known_factor(s + 2)
    (64, 1)
    """
    return math.gcd(*(int(term.as_coeff_Mul()[0]) for term in sympy.Add.make_args(sympy.expand(size))))
