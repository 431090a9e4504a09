"""Results of a benchmark as JSON with machine and versions, and the comparison of two results."""

from __future__ import annotations

import dataclasses
import datetime
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tritium import compat, device, disk
from tritium.errors import ConfigError

# The names of variants. Ratios are against plain torch.compile; a regression is one of Tritium, while changes of the
# others show whether the machine itself changed.
EAGER = "eager"
INDUCTOR = "inductor"
TRITIUM = "tritium"
# `tritium.optimize` with its defaults.
OPTIMIZED = f"{TRITIUM} optimize"
EXACT = f"{TRITIUM} exact"
# One compilation for equal blocks.
REUSE_BLOCKS = f"{TRITIUM} reuse_blocks"
# With captured graphs: Tritium's static graphs, and Inductor's CUDA graphs.
GRAPHS = f"{TRITIUM} graphs"
REDUCE_OVERHEAD = f"{INDUCTOR} reduce-overhead"
# Compiled for static sizes, where those of the other variants are dynamic.
STATIC = f"{INDUCTOR} static"
TRITIUM_STATIC = f"{TRITIUM} static"


def without(op: str) -> str:
    """Return the name of the variant that leaves an op to Inductor."""
    return f"{TRITIUM} without {op}"


TOLERANCE = 0.05


@dataclass(frozen=True, kw_only=True)
class Row:
    """One variant of one workload.

    `ratio` is torch.compile's median divided by this one: above 1 is faster than torch.compile. It is None if
    torch.compile was not measured; for layer functions, the note names the variant that ratios are against. `first_call_cold` says whether the first call found the compiler's caches empty.
    """

    workload: str
    variant: str
    mode: str | None
    dtype: str
    shrunk: bool
    note: str
    shapes: dict[str, list[int]]
    median_ms: float
    lower_quartile_ms: float
    upper_quartile_ms: float
    samples: int
    # The mean of the middle half of the samples; None in results of older versions.
    middle_ms: float | None = None
    ratio: float | None
    first_call_s: float
    first_call_cold: bool
    # Allocated on a GPU; resident of the whole process on a CPU.
    peak_memory_bytes: int | None
    relative_l2: float
    # True if other processes took cores during the timing: the milliseconds mean little. None: unknown.
    disturbed: bool | None
    # With --kernels: the kernels of a call.
    kernels: list[dict[str, Any]] | None = None
    # With --profile: the time in operators and kernels, and (this - eager's) / eager's.
    operators_us: float | None = None
    fusion_gain: float | None = None
    # With --errors: the largest difference from a float64 run, divided by the largest value of that run.
    error_f64: float | None = None
    # Of whole images against eager, the worst of several; a PSNR of None with an SSIM of 1 means equality.
    psnr: float | None = None
    ssim: float | None = None
    # With dynamic sizes: this median divided by that of torch.compile with static sizes.
    against_static: float | None = None
    # Graphs compiled after the first call; with `--sizes`, by ten sizes after two others.
    recompiles: int | None = None
    # With --graphs: microseconds until a call returns on the host while the device is idle. Of `host`: of one kernel.
    host_us: float | None = None
    # Seconds to the first image of another process, with empty caches and with compile artifacts of this one.
    cold_start_s: float | None = None
    restart_s: float | None = None
    # Seconds of the first call spent inside Inductor.
    inductor_s: float | None = None
    # How a variant runs, and which variants failed or were cut. Unlike the note it may change between runs.
    remark: str | None = None

    @property
    def key(self) -> tuple[str, ...]:
        """The fields in which two rows must agree to be compared."""
        shapes = json.dumps(self.shapes, sort_keys=True)
        return self.workload, self.variant, self.mode or "", self.dtype, self.note, shapes


@dataclass(frozen=True)
class Results:
    """All rows of one run of the benchmark."""

    device: dict[str, Any]
    versions: dict[str, str | None]
    date: str
    rows: tuple[Row, ...]

    @classmethod
    def now(cls, rows: Sequence[Row], device_type: str) -> Results:
        date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        return cls(dict(device.describe(device_type).to_dict()), compat.versions.versions(), date, tuple(rows))

    def to_dict(self) -> dict[str, Any]:
        rows = [dataclasses.asdict(row) for row in self.rows]
        return {"device": self.device, "versions": self.versions, "date": self.date, "rows": rows}

    def save(self, path: Path) -> None:
        disk.write(path, json.dumps(self.to_dict(), indent=2) + "\n", make_folder=True)

    @classmethod
    def load(cls, path: Path) -> Results:
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"results {path} cannot be read: {error.strerror}") from error
        except ValueError as error:
            # Includes bytes that are not UTF-8.
            raise ConfigError(f"{path} is no result of `tritium bench --json`: it is no JSON ({error})") from error
        wrong = _wrong_with(found)
        if wrong:
            raise ConfigError(f"{path} is no result of `tritium bench --json`: {wrong}")
        try:
            rows = tuple(Row(**row) for row in found["rows"])
        except TypeError as error:
            raise ConfigError(
                f"{path} is no result of `tritium bench --json`: its rows do not have the fields of this version"
            ) from error
        return cls(found["device"], found["versions"], found["date"], rows)


def _wrong_with(found: Any) -> str:
    """Say why parsed JSON cannot be results; empty if it can."""
    if not isinstance(found, dict):
        return "it holds no mapping"
    absent = [name for name in ("device", "versions", "date", "rows") if name not in found]
    if absent:
        return f"it has no {', '.join(map(repr, absent))}"
    if not isinstance(found["device"], dict):
        return "its 'device' is no mapping"
    return "" if isinstance(found["rows"], list) else "its 'rows' are no list"


@dataclass(frozen=True)
class Change:
    """One row before and now."""

    workload: str
    variant: str
    was_ms: float
    now_ms: float

    @property
    def slower_by(self) -> float:
        return self.now_ms / self.was_ms - 1

    def __str__(self) -> str:
        return f"{self.workload} {self.variant}: {self.was_ms:.3f} ms -> {self.now_ms:.3f} ms ({self.slower_by:+.1%})"


@dataclass(frozen=True)
class Comparison:
    """The changes between two results. Rows that only one of them has are named."""

    changes: tuple[Change, ...]
    unmatched: tuple[str, ...]
    tolerance: float
    # Workloads that other processes disturbed, before or now: their changes may come from the machine.
    disturbed: tuple[str, ...] = ()

    @property
    def regressions(self) -> tuple[Change, ...]:
        return tuple(
            change for change in self.changes if change.variant == TRITIUM and change.slower_by > self.tolerance
        )

    @property
    def drift(self) -> tuple[Change, ...]:
        """Changes of the other variants: the machine or torch has changed."""
        return tuple(
            change for change in self.changes if change.variant != TRITIUM and abs(change.slower_by) > self.tolerance
        )


def compare(old: Results, new: Results, tolerance: float = TOLERANCE) -> Comparison:
    """Compare medians row by row; a `ConfigError` when the two cannot be compared at all."""
    for part in ("type", "name"):
        was, now = old.device.get(part), new.device.get(part)
        if was != now:
            raise ConfigError(f"results of {was!r} and {now!r} cannot be compared: the device differs")
    before = {row.key: row for row in old.rows}
    after = {row.key: row for row in new.rows}
    shared = [key for key in after if key in before]
    if not shared:
        raise ConfigError("the two results have no row in common: workload, variant, mode, dtype or shapes differ")
    changes = tuple(
        Change(after[key].workload, after[key].variant, before[key].median_ms, after[key].median_ms) for key in shared
    )
    lone = [(row, "only before") for key, row in before.items() if key not in after]
    lone += [(row, "only now") for key, row in after.items() if key not in before]
    names = tuple(f"{row.workload} {row.variant} ({row.mode or 'no mode'}, {row.dtype}): {when}" for row, when in lone)
    disturbed = sorted({after[key].workload for key in shared if before[key].disturbed or after[key].disturbed})
    return Comparison(changes, names, tolerance, tuple(disturbed))
