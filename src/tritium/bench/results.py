"""Measured rows: JSON with machine and versions, kept over interrupted runs, and compared with an earlier file."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import json
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tritium import compat, device, disk, envs
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


TOLERANCE = 0.05


@dataclass(frozen=True, kw_only=True)
class Row:
    """One variant of one workload.

    `ratio` is torch.compile's median divided by this one: above 1 is faster than torch.compile. It is None if
    torch.compile was not measured; for layer functions, the note names the variant that ratios are against.
    `first_call_cold` says whether the first call found the compiler's caches empty.
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
    # The commit of the code that was measured; None in results of older versions, and where there is no checkout.
    commit: str | None = None

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
    # The commits that added rows which name none: older results, measured at or shortly before these commits.
    added_in: tuple[str, ...] = ()

    @classmethod
    def now(cls, rows: Sequence[Row], device_type: str) -> Results:
        date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        return cls(dict(device.describe(device_type).to_dict()), compat.versions.versions(), date, named(rows))

    def save(self, path: Path) -> None:
        content = dataclasses.asdict(self)
        if not self.added_in:
            del content["added_in"]
        disk.write(path, json.dumps(content, indent=2) + "\n", make_folder=True)

    @classmethod
    def load(cls, path: Path) -> Results:
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            rows = tuple(Row(**row) for row in content["rows"])
            added_in = tuple(content.get("added_in", ()))
            return cls({**content["device"]}, content["versions"], content["date"], rows, added_in)
        except OSError as error:
            raise ConfigError(f"results {path} cannot be read: {error.strerror}") from error
        except ValueError as error:
            # Includes bytes that are not UTF-8.
            raise ConfigError(f"{path} is no result of `tritium bench --json`: it is no JSON ({error})") from error
        except (KeyError, TypeError) as error:
            raise ConfigError(
                f"{path} is no result of `tritium bench --json`: its keys or rows are not those of this version"
            ) from error


def named(rows: Sequence[Row]) -> tuple[Row, ...]:
    """Return rows that were just measured, with the commit of this checkout where they name none."""
    return tuple(row if row.commit else dataclasses.replace(row, commit=commit()) for row in rows)


@functools.cache
def commit() -> str | None:
    """Return the commit of this checkout, with `-dirty` after changes; `GIT_COMMIT` names it where git does not."""
    if given := envs.get("GIT_COMMIT"):
        return given
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],  # noqa: S607
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=True,
            timeout=10,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


class Store:
    """The rows of a run, written to a file after every workload.

    To `resume`, rows already in the file stay if they were measured on the same device with the same versions; otherwise
    the file is replaced, and `replaced` says why.
    """

    def __init__(self, path: Path | None, device_type: str, *, resume: bool = True) -> None:
        self.path = path
        self.device_type = device_type
        self.replaced = ""
        self._rows: dict[tuple[str, str], list[Row]] = {}
        self._added_in: tuple[str, ...] = ()
        if path is None or not resume or not path.exists() or not path.stat().st_size:
            return
        stored, now = Results.load(path), Results.now([], device_type)
        for part in ("device", "versions"):
            # Through JSON, where a tuple is a list.
            was, wanted = getattr(stored, part), json.loads(json.dumps(getattr(now, part)))
            if was != wanted:
                self.replaced = f"{path} has other {part} ({was}), so all of it is measured again"
                return
        self._added_in = stored.added_in
        for row in stored.rows:
            self._rows.setdefault((row.workload, row.dtype), []).append(row)

    def has(self, workload: str, dtype: str) -> bool:
        return (workload, dtype) in self._rows

    def add(self, rows: Sequence[Row]) -> None:
        """Replace the rows of some workloads and write the file."""
        for key in dict.fromkeys((row.workload, row.dtype) for row in rows):
            self._rows[key] = list(named([row for row in rows if (row.workload, row.dtype) == key]))
        if self.path is not None and rows:
            self.results.save(self.path)

    @property
    def results(self) -> Results:
        # Rows that were kept are of another commit.
        kept = tuple(row for rows in self._rows.values() for row in rows)
        added_in = self._added_in if any(row.commit is None for row in kept) else ()
        return dataclasses.replace(Results.now([], self.device_type), rows=kept, added_in=added_in)


@dataclass(frozen=True)
class Change:
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
class Changes:
    rows: tuple[Change, ...]
    # Rows that only one of the two has.
    unmatched: tuple[str, ...]
    # Workloads that other processes disturbed, before or now: their changes may come from the machine.
    disturbed: tuple[str, ...]

    @property
    def regressions(self) -> list[Change]:
        return [change for change in self.rows if change.variant == TRITIUM and change.slower_by > TOLERANCE]

    @property
    def drift(self) -> list[Change]:
        """Changes of the other variants: the machine or torch has changed."""
        return [change for change in self.rows if change.variant != TRITIUM and abs(change.slower_by) > TOLERANCE]


def compare(old: Results, new: Results) -> Changes:
    """Compare medians row by row; a `ConfigError` when the two cannot be compared at all."""
    for part in ("type", "name"):
        was, now = old.device.get(part), new.device.get(part)
        if was != now:
            raise ConfigError(f"results of {was!r} and {now!r} cannot be compared: the device differs")
    before, after = ({row.key: row for row in results.rows} for results in (old, new))
    pairs = [(before[key], row) for key, row in after.items() if key in before]
    if not pairs:
        raise ConfigError("the two results have no row in common: workload, variant, mode, dtype or shapes differ")
    lone = [(row, "only before") for key, row in before.items() if key not in after]
    lone += [(row, "only now") for key, row in after.items() if key not in before]
    return Changes(
        tuple(Change(now.workload, now.variant, was.median_ms, now.median_ms) for was, now in pairs),
        tuple(f"{row.workload} {row.variant} ({row.mode or 'no mode'}, {row.dtype}): {when}" for row, when in lone),
        tuple(sorted({now.workload for was, now in pairs if was.disturbed or now.disturbed})),
    )
