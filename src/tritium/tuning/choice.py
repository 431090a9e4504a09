"""Choose the provider of a site, with the reason.

1. pinned           `force_provider` names one
2. first use        an op that is measured at its first call: the winner of a stored verdict, on a GPU and unless the engine
                    is `eager`; without a verdict, or if the preferred provider wins, Inductor
3. engine `eager`   the op's reference
4. default          the op's default provider, if it has one and nothing was measured on this device
5. tables           the provider with the shortest measured device and host time at this shape, or the shortest time
                    predicted from measured shapes nearby
6. otherwise        Inductor: the region is left unchanged

Compiled blocks are not measured here: `tritium tune` writes the tables. Near measured shapes, a kernel is predicted to take
a floor, which short kernels take whatever they compute, and then the time of its work at a rate:

    time = FLOOR_US + work / rate(op, forms, provider)

Work is the product of the sizes: elements of an op that moves memory, multiplications of a product. The rate at a shape is
the mean of the rates of the measured shapes, weighted by distance: memory-bound ops reach another share of the bandwidth
at another width, and products another share of the arithmetic. Nothing is predicted far from every measured shape.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from tritium import ops
from tritium.config import CompilationConfig
from tritium.errors import ProviderError, nearest
from tritium.ops import INDUCTOR, REFERENCE, Arguments, Op
from tritium.tuning import tables
from tritium.tuning.first_use import choose_from_tables, key_of
from tritium.tuning.tables import INDUCTOR_LIMITS, Machine, ReductionLimits
from tritium.tuning.verdict import LONG, Cost, Key, Site, Verdict

LEFT_TO_INDUCTOR = "left to Inductor: no owned kernel is measured faster here"

# The shortest kernels of the H200's table take 1.7 to 2.5 us, of which their bytes would take 0.2.
FLOOR_US = 1.5

# Sizes that select code instead of adding work.
FORMS = ("groups", "parts")

# A size that equals `tokens`.
SAME = "same"

# A shape is near a measured one if no size differs by more than these factors: sizes of LONG, and others.
NEAR_LONG = 64
NEAR = 4

# Types of 16 bits move the same bytes and have the same arithmetic rate.
HALF = ("bfloat16", "float16")


class Decision(NamedTuple):
    """A provider for one site, and the reason."""

    provider: str
    why: str


def choose(op: Op, arguments: Mapping[str, Any], config: CompilationConfig, device_type: str) -> Decision:
    """Return the provider for a call of an op, and the reason; tensors may be fake."""
    bound = op.bind(**arguments)
    pinned = config.provider_for(op.name)
    if pinned is not None:
        return _pinned(op, pinned, bound, config)
    if op.trial is not None and op.trial.first_use is not None:
        return _by_first_use(op, bound, config, device_type)
    if config.engine == "eager":
        return Decision(REFERENCE, "engine 'eager' runs the op's reference")
    declines = ops.declines(op, bound)
    able = [name for name, reason in declines.items() if reason is None]
    if not able:
        reasons = [f"{name}: {reason}" for name, reason in declines.items()]
        return Decision(INDUCTOR, "; ".join(reasons) or LEFT_TO_INDUCTOR)
    if op.default in able and not _is_measured(op, device_type):
        return Decision(op.default, f"the default of {op.name}, which was not measured on this device")
    if op.trial is None:
        return Decision(INDUCTOR, LEFT_TO_INDUCTOR)
    machine, on_gpu = Machine.of(device_type), device_type == "cuda"
    switches = config.pass_config
    policy = switches.enable_tiling_policy and switches.enable_reduction_choice
    return decide(
        machine,
        key_of(op, bound),
        able,
        tables.reduction_limits(machine) if policy else INDUCTOR_LIMITS,
        # A CPU has no launches: its times include the host's.
        replayed=config.graphs != "off" or not on_gpu,
        predicts=on_gpu,
    )


def _is_measured(op: Op, device_type: str) -> bool:
    """Return True if this machine's tables have a row of an op."""
    if op.trial is None:
        return False
    machine = Machine.of(device_type)
    return any(key.op == op.name for key in (*tables.own_rows(machine), *tables.shipped_rows(machine)))


def _by_first_use(op: Op, arguments: Arguments, config: CompilationConfig, device_type: str) -> Decision:
    """Choose by stored verdicts alone: a compilation measures nothing, and without a verdict it changes nothing."""
    assert op.trial is not None
    assert op.trial.first_use is not None
    if config.engine == "eager":
        return Decision(INDUCTOR, f"engine 'eager' runs {op.name} as the model calls it")
    if device_type != "cuda":
        return _decision(INDUCTOR, f"providers of {op.name} are chosen on a GPU")
    provider, why = choose_from_tables(op, arguments, torch.device(device_type))
    if provider is None:
        return _decision(INDUCTOR, why)
    if provider == op.trial.first_use.preferred:
        return _decision(INDUCTOR, f"{provider} is what the model calls; {why}")
    return Decision(provider, why)


def decide(
    machine: Machine,
    key: Key,
    able: Iterable[str],
    limits: ReductionLimits,
    *,
    replayed: bool = False,
    predicts: bool = True,
) -> Decision:
    """Choose the provider of a site among Inductor and those that can take it.

    Args:
        machine: The device that runs the graph.
        key: The op, the class of the shape, and the dtype.
        able: The owned providers that can take the arguments.
        limits: The rows that Inductor holds in registers in this graph; rows measured against the other form are left out.
        replayed: Whether the graph is captured and replayed, so that the host's time does not count.
        predicts: Whether costs may be predicted from other shapes. Otherwise a row must be of this very key.
    """
    own, shipped = tables.own_rows(machine), tables.shipped_rows(machine)
    row, where = own.get(key), "on this machine"
    if row is None and key in shipped and _of_one_form([shipped[key]], shipped, key, limits):
        row, where = shipped[key], "shipped"
    if row is not None:
        site = row.site(replayed=replayed)
        best, provider = site.choose(), site.among(able).choose()
        why = f"{row.why(replayed=replayed)}, {where}"
        if best != provider:
            why = f"provider {best!r} is fastest for such shapes and cannot take this one; {why}"
        return _decision(provider, why)
    if not predicts:
        return _decision(INDUCTOR, f"nothing was measured for {key.op}, {key.shape} on this device")
    rows, elsewhere = shipped | own, ""
    if not rows and (other := tables.like(machine)) is not None:
        rows, elsewhere = tables.shipped_rows(other), f", measured on {other.name}"
    prediction = predict(key, _of_one_form(rows.values(), rows, key, limits), replayed=replayed)
    if prediction is None:
        return _decision(INDUCTOR, _nothing_near(machine, key, rows))
    site = prediction.site.among(able)
    owned = [name for name in site.costs if name != INDUCTOR]
    if not owned:
        return _decision(INDUCTOR, "no provider that was measured at such shapes can take this one")
    provider = site.choose()
    told = max(owned, key=site.ratio) if provider == INDUCTOR else provider
    return _decision(provider, prediction.why(told) + elsewhere)


def _decision(provider: str, why: str) -> Decision:
    return Decision(provider, f"left to Inductor: {why}" if provider == INDUCTOR else why)


def _of_one_form(
    rows: Iterable[Verdict], table: Mapping[Key, Verdict], key: Key, limits: ReductionLimits
) -> list[Verdict]:
    """Return the rows in which Inductor's code has the form that it has at a key: looped rows, or rows in registers."""
    loop = next((row.looped for row in table.values() if row.key.op == key.op and row.looped), None)
    if loop is None:
        return list(rows)
    elements = key.sizes().get(loop.size)
    is_looped = isinstance(elements, int) and not limits.holds(elements, loop.reads)
    return [row for row in rows if bool(row.looped) == is_looped]


def _nothing_near(machine: Machine, key: Key, rows: Mapping[Key, Verdict]) -> str:
    shapes = [row for row in rows.values() if row.key.op == key.op]
    if not shapes:
        what = f"nothing was measured for {key.op} on {machine.name}"
    elif predict(key, shapes) is not None:
        what = f"{key.op} was measured against another form of Inductor's reduction than it generates for {key.shape}"
    else:
        what = f"no measured shape of {key.op} is near {key.shape}"
    return f"{what}; `tritium tune` measures"


def _pinned(op: Op, pinned: str, arguments: Arguments, config: CompilationConfig) -> Decision:
    why = f"pinned by force_provider={pinned!r}"
    if pinned in (INDUCTOR, REFERENCE):
        return Decision(pinned, why)
    provider = ops.providers(op).get(pinned)
    if provider is None:
        # `check_pins` ensured that some op has this provider; this op has not.
        return Decision(INDUCTOR, f"op {op.name!r} has no provider {pinned!r}")
    reason = provider.decline(arguments)
    if provider.lossy and config.fidelity != "fast":
        reason = f"it is lossy, and fidelity is {config.fidelity!r}"
    if reason is None:
        return Decision(pinned, why)
    if isinstance(config.force_provider, str):
        return Decision(INDUCTOR, f"provider {pinned!r} cannot take it: {reason}")
    raise ProviderError(
        f"provider {pinned!r} of op {op.name!r} cannot be used: {reason}; providers that can: {INDUCTOR}, {REFERENCE}"
    )


def check_pins(config: CompilationConfig) -> None:
    """Raise a `ProviderError` for a pin of an unknown op or provider: it would otherwise have no effect."""
    known = {name: [INDUCTOR, REFERENCE, *ops.providers(op)] for name, op in ops.catalog().items()}
    pins = config.force_provider or ()
    if isinstance(pins, str):
        every = {provider for providers in known.values() for provider in providers}
        if pins not in every:
            raise ProviderError(f"force_provider: no op has {pins!r}; {nearest(pins, every)}")
        return
    for op, provider in dict(pins).items():
        if op not in known:
            raise ProviderError(f"force_provider: there is no op {op!r}; {nearest(op, known)}")
        if provider not in known[op]:
            has = ", ".join(known[op])
            raise ProviderError(f"force_provider: op {op!r} has no provider {provider!r}; it has {has}")


# --- predict the costs of a site ---


@dataclass(frozen=True)
class Prediction:
    """The costs predicted for a site, the number of measured shapes behind them, and the nearest of those."""

    site: Site
    count: int
    nearest: Key

    def why(self, provider: str) -> str:
        """Return the reason that reports give about an owned provider."""
        ours, theirs = self.site.costs[provider], self.site.costs[INDUCTOR]
        plural = "s" if self.count > 1 else ""
        return (
            f"predicted {self.site.ratio(provider):.2f}x from {self.count} measured shape{plural} (nearest "
            f"{self.nearest.shape}; {provider} {ours.device_us:.1f}, inductor {theirs.device_us:.1f} us; "
            f"{self.site.host_text(provider)})"
        )


def predict(key: Key, rows: Iterable[Verdict], *, replayed: bool = False) -> Prediction | None:
    """Return the costs at a key by the rows of its op and forms, or None if none of them is near."""
    near = []
    for row in rows:
        apart = distance(row.key, key) if row.owned else None
        if apart is None:
            continue
        site = row.site()
        # The times of kernels at the floor say nothing about more work: they do not grow with it.
        if min(cost.device_us for cost in site.costs.values()) >= 2 * FLOOR_US or log_work(key) <= log_work(row.key):
            near.append((apart, row.key, site))
    if not near:
        return None
    _, nearest, base = min(near, key=lambda row: row[0])
    costs = {}
    for provider in base.costs:
        total = inverse = 0.0
        for apart, measured, site in near:
            if provider in site.costs:
                us, weight = site.costs[provider].device_us, 1 / (apart + 0.25)
                # No rate is negative: of a kernel that is shorter than the floor, a tenth counts as work.
                inverse += weight * (math.log(max(us - FLOOR_US, us / 10)) - log_work(measured))
                total += weight
        costs[provider] = Cost(FLOOR_US + math.exp(log_work(key) + inverse / total), base.costs[provider].host_us)
    site = Site(costs, 0.0, base.host_noise_us, base.host_source)
    return Prediction(site.replayed() if replayed else site, len(near), nearest)


def log_work(key: Key) -> float:
    """Return the logarithm of the product of the sizes of a key.

    >>> round(math.exp(log_work(Key("cat_linear", "tokens=2 k=3+4 n=5", "bfloat16"))))
    70
    >>> round(math.exp(log_work(Key("attention", "tokens=8 keys=same width=2", "bfloat16"))))
    128
    """
    sizes = {name: sum(numbers) for name, numbers in key.numbers().items() if name not in FORMS and numbers}
    # As many keys as there are queries.
    if key.sizes().get("keys") == SAME:
        sizes["keys"] = sizes.get("tokens", 1)
    return sum(math.log(max(1, size)) for size in sizes.values())


def distance(known: Key, wanted: Key) -> float | None:
    """Return how far two keys are apart: squared octaves, fewer along tokens; None if they are not comparable or too far."""
    dtypes = known.dtype == wanted.dtype or (known.dtype in HALF and wanted.dtype in HALF)
    if known.op != wanted.op or not dtypes or _forms(known) != _forms(wanted):
        return None
    total, theirs = 0.0, wanted.numbers()
    for name, sizes in known.numbers().items():
        if name in FORMS:
            continue
        is_long = name in LONG
        for one, other in zip(sizes, theirs[name], strict=True):
            octaves = abs(math.log2(max(1, one)) - math.log2(max(1, other)))
            if octaves > math.log2(NEAR_LONG if is_long else NEAR):
                return None
            total += (octaves / 2 if is_long else octaves) ** 2
    return total


def _forms(key: Key) -> list[tuple[str, int | str]]:
    """Return what must be equal: named variants, sizes in FORMS, and how many numbers each other size has."""
    numbers = key.numbers()
    return [(name, size if name in FORMS else len(numbers[name]) or size) for name, size in key.sizes().items()]
