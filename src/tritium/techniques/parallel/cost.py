"""The cost model of the mesh: the time of a step and the memory of a rank, for each way to use some ranks.

Pure functions of sizes and rates. Per block, with S tokens of width d in elements of e bytes, P ranks on an axis, `bytes` =
S d e divided by the ranks that split tokens and weights, bandwidth B and latency a of a collective:

    compute     linear operations / (ranks rate) + attention operations / (ranks rate), times the padding
    ulysses     4 bytes (P-1)/P / B + 4 a, or 2 a if q, k and v are exchanged at once
    gather      2 bytes (P-1) / B + a
    ring        P-1 hops of 2 bytes / B + a, partly behind attention; merging the results, attention over shorter keys
    tensor      2 all-reduces of 2 bytes (P-1)/P / B + 2 a
    experts     1 all-reduce in each mixture
    cfg         one exchange of the latents in a step

Nothing else is assumed to be hidden behind computing, so communication is an upper bound.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from tritium.techniques.parallel.config import AXES, Parallel

# Padding above this share of tokens or heads is not chosen; a user may name such degrees.
MOST_PADDING = 0.10

# Attention over n keys reaches n / (n + this many) of the rate for long ones.
_FILL = 256

# The share of the attention of one part of the keys that hides a hop of the ring. With it the orders that others have
# measured come out: on two ranks, the ring is faster than Ulysses and slower than gathered keys.
_HIDING = 0.25

# Below this many bytes of q on a rank, q, k and v are exchanged at once: four launches take as long as the bytes.
PACKED_BELOW = 4 << 20

# Seconds of a kernel launch, and bytes a second that merging the parts of a ring reads and writes.
_LAUNCH, _MEMORY_RATE = 5e-6, 3e12

# Bytes that merging reads and writes for each byte of a result: the sum in float32, and the new part.
_MERGED = 5


@dataclass(frozen=True, kw_only=True)
class Work:
    """One call of a denoiser for one branch of guidance, and the weights of a pipeline.

    `branches` is the number of branches in a step. `all_reduces` are those of a block whose weights are split.
    """

    tokens: int
    width: int
    heads: int
    blocks: int
    linear: float
    attention: float
    weights: int
    activations: int
    branches: int = 1
    element: int = 2
    all_reduces: int = 2
    # Bytes of routed experts, blocks that have them, and experts of a mixture.
    expert_weights: int = 0
    mixtures: int = 0
    experts: int = 0
    # Bytes of latents, and of components that every rank has whole.
    latents: int = 0
    others: int = 0


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Operations a second of linears and attention, bandwidth and latency of a collective, and a rank's memory."""

    linear: float
    attention: float
    bandwidth: float
    latency: float
    # The rate of attention kernels that return a log-sum-exp, relative to the fastest: the ring merges results by it.
    ring: float = 0.7
    # None is unlimited.
    memory: int | None = None
    # Where they come from.
    source: str = "tabled"

    def __str__(self) -> str:
        return (
            f"{self.bandwidth / 1e9:.1f} GB/s and {self.latency * 1e6:.0f} us a collective {self.source}, "
            f"{self.linear / 1e12:.3g} and {self.attention / 1e12:.3g} TFLOP/s of linears and attention"
        )


@dataclass(frozen=True)
class Estimate:
    """A step on a mesh: seconds of computing and of each axis, bytes of a rank, and the share of padding."""

    degrees: Mapping[str, int]
    compute: float
    exchanges: Mapping[str, float]
    memory: int
    padding: float
    # Why it is not chosen, or None.
    declined: str | None = None
    # Median seconds of a step on this machine, or None.
    measured: float | None = None

    @property
    def seconds(self) -> float:
        return self.compute + sum(self.exchanges.values())

    @property
    def mesh(self) -> str:
        return " x ".join(f"{axis}={size}" for axis, size in self.degrees.items() if size > 1) or "one rank"

    def config(self, vae: object = "auto") -> Parallel:
        """Return the degrees as a user names them; 1 where a mesh of one rank names none."""
        named = {axis: size for axis, size in self.degrees.items() if size > 1} or {"ulysses": 1}
        return Parallel(**named, vae=vae)  # type: ignore[arg-type]  # checked by Parallel

    def __str__(self) -> str:
        parts = [f"{self.compute * 1e3:.1f} computing"]
        parts += [f"{seconds * 1e3:.1f} {axis}" for axis, seconds in self.exchanges.items()]
        words = f"{self.mesh}: {self.seconds * 1e3:.1f} ms a step ({', '.join(parts)})"
        words += f", measured {self.measured * 1e3:.1f} ms" if self.measured is not None else ""
        words += f", {self.padding:.0%} padding" if self.padding >= 0.005 else ""
        return words + (f"; {self.declined}" if self.declined else "")


@dataclass(frozen=True)
class Decision:
    """The mesh that was chosen, the reason, and the others in the order of their cost."""

    work: Work
    rates: Rates
    ranked: tuple[Estimate, ...]
    dropped: tuple[Estimate, ...] = field(default=())
    why: str = "the cost model"

    @property
    def best(self) -> Estimate:
        return self.ranked[0]


def choose(work: Work, rates: Rates, world: int, axes: Sequence[str] = AXES) -> Decision:
    """Return the meshes of a world with these axes, in the order of their cost; `ranked` may be empty."""
    found = [estimate(work, rates, degrees) for degrees in meshes(world, axes)]
    ranked = sorted((one for one in found if one.declined is None), key=lambda one: (one.seconds, one.memory))
    dropped = sorted((one for one in found if one.declined is not None), key=lambda one: one.seconds)
    return Decision(work, rates, tuple(ranked), tuple(dropped))


def meshes(world: int, axes: Sequence[str] = AXES) -> Iterator[dict[str, int]]:
    """Yield the degrees of all axes whose product is the world.

    >>> [{axis: size for axis, size in mesh.items() if size > 1} for mesh in meshes(2, ("cfg", "ulysses"))]
    [{'ulysses': 2}, {'cfg': 2}]
    """
    divisors = [size for size in range(1, world + 1) if world % size == 0]
    for sizes in itertools.product(divisors, repeat=len(axes)):
        if math.prod(sizes) == world:
            named = dict(zip(axes, sizes, strict=True))
            yield {axis: named.get(axis, 1) for axis in AXES}


def estimate(work: Work, rates: Rates, degrees: Mapping[str, int]) -> Estimate:
    """Return the cost of a step on a mesh."""
    size = {axis: degrees.get(axis, 1) for axis in AXES}
    split = size["ulysses"] * size["gather"] * size["ring"]
    of_tokens = _padding(work.tokens, split)
    heads = max(1, work.heads // size["tensor"])
    of_heads = _padding(heads, size["ulysses"])
    calls = math.ceil(work.branches / size["cfg"])
    share = split * size["tensor"]
    # Bytes of q on one rank, in one block.
    own = work.tokens * of_tokens / split * work.width / size["tensor"] * work.element
    of_experts = work.expert_weights / max(1, work.weights)
    linear = work.linear * of_tokens / share * (1 - of_experts + of_experts / size["experts"]) / rates.linear
    attention = work.attention * of_heads * of_tokens / share / rates.attention
    if size["ring"] > 1:
        attention *= _short(work.tokens, size["ring"]) / rates.ring
    exchanges = {
        "cfg": _latents(work, size["cfg"], rates),
        "ulysses": work.blocks * calls * _ulysses(own * of_heads, size["ulysses"], rates),
        "gather": work.blocks * calls * _gather(own * of_heads, size["gather"], rates),
        "ring": work.blocks
        * calls
        * _ring(own * of_heads * size["gather"], size["ring"], attention / work.blocks, rates),
        "tensor": work.blocks * calls * work.all_reduces * _all_reduce(own * size["tensor"], size["tensor"], rates),
        "experts": work.mixtures * calls * _all_reduce(own * size["tensor"], size["experts"], rates),
    }
    memory = _memory(work, size, split)
    found = Estimate(
        {axis: size[axis] for axis in AXES},
        calls * (linear + attention),
        {axis: exchanges[axis] for axis in AXES if size[axis] > 1},
        memory,
        max(of_tokens, of_heads) - 1,
    )
    return _judged(found, work, rates)


def _judged(found: Estimate, work: Work, rates: Rates) -> Estimate:
    """Return the estimate with the reason why it is not chosen, if there is one."""
    size, reason = found.degrees, None
    if size["cfg"] > work.branches:
        reason = f"{work.branches} branches of guidance leave {size['cfg'] - work.branches} of its ranks idle"
    elif size["experts"] > 1 and not work.experts:
        reason = "it has no routed experts"
    elif work.heads % size["tensor"]:
        reason = f"{work.heads} heads are not divided by {size['tensor']}"
    elif rates.memory is not None and found.memory > rates.memory:
        reason = f"it needs {found.memory / 1e9:.1f} GB of {rates.memory / 1e9:.1f} GB on each rank"
    elif found.padding > MOST_PADDING:
        reason = f"padding of {found.padding:.0%} of the tokens or heads"
    return Estimate(found.degrees, found.compute, found.exchanges, found.memory, found.padding, reason)


def _padding(count: int, ranks: int) -> float:
    return math.ceil(count / ranks) * ranks / count


def _short(tokens: int, parts: int) -> float:
    """Return how much longer attention takes over parts of the keys."""
    keys = tokens / parts
    return (tokens / (tokens + _FILL)) / (keys / (keys + _FILL))


def _ulysses(own: float, ranks: int, rates: Rates) -> float:
    if ranks == 1:
        return 0.0
    volume = own * (ranks - 1) / ranks / rates.bandwidth
    starts = 2 if own < PACKED_BELOW else 4
    return 4 * volume + starts * rates.latency


def _gather(own: float, ranks: int, rates: Rates) -> float:
    return 0.0 if ranks == 1 else 2 * own * (ranks - 1) / rates.bandwidth + rates.latency


def _ring(own: float, ranks: int, attention: float, rates: Rates) -> float:
    hop = 2 * own / rates.bandwidth + rates.latency
    merge = _MERGED * own / _MEMORY_RATE + 2 * _LAUNCH
    return (ranks - 1) * (max(rates.latency, hop - _HIDING * attention / ranks) + merge)


def _all_reduce(own: float, ranks: int, rates: Rates) -> float:
    return 0.0 if ranks == 1 else 2 * own * (ranks - 1) / ranks / rates.bandwidth + 2 * rates.latency


def _latents(work: Work, ranks: int, rates: Rates) -> float:
    return 0.0 if ranks == 1 else work.branches * work.latents / rates.bandwidth + 2 * rates.latency


def _memory(work: Work, size: Mapping[str, int], split: int) -> int:
    experts = work.expert_weights * math.ceil(max(1, work.experts) / size["experts"]) / max(1, work.experts)
    weights = (work.weights - work.expert_weights + experts) / size["tensor"]
    return int(weights + work.activations / split + work.others)
