"""Reports: applied and declined optimisations, with reasons.

A `GraphRecord` is written while a graph is compiled and belongs to its compiled code. `LEDGER` keeps the records of
the process. A `Report` is a view of the records of one model.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tritium import compat, device, disk
from tritium.errors import ReportError
from tritium.report import text
from tritium.report.ledger import LEDGER
from tritium.report.observation import merged
from tritium.report.recompiles import Recompile, parse_guard_failure
from tritium.report.records import SEED_FAMILIES, Component, GraphRecord, Measurement, SiteCounts, Violation

# The lists of a report by name, each an attribute.
_LISTS = (
    *("attention", "lowered", "fallbacks", "not_fused", "recompiles"),
    *("captures", "kernels", "passes", "frozen", "failures"),
)


def _by_graph(name: str) -> property:
    """Return a property with one list of all records as data, each entry with its graph."""

    def entries(report: Report) -> list[dict[str, Any]]:
        return [
            {"graph": record.graph, **entry.to_dict()} for record in report.records for entry in getattr(record, name)
        ]

    return property(entries)


class Report:
    """The optimizations of one model: as text (`str(report)`), data (`to_dict()`) or HTML (`to_html`)."""

    def __init__(
        self,
        records: Iterable[GraphRecord],
        limits: Iterable[compat.dynamo.LimitReached] = (),
        *,
        components: Iterable[Component] = (),
        measurement: Measurement | None = None,
        violations: Iterable[Violation] = (),
    ) -> None:
        self.records = list(records)
        self.limits = list(limits)
        # The parts of a pipeline, if the report is about a pipeline.
        self.components = list(components)
        self.measurement = measurement
        # Calls outside of `Plan(shapes=...)`.
        self.violations = list(violations)

    @property
    def device(self) -> dict[str, Any]:
        types = {record.device_type for record in self.records}
        chosen = "cuda" if "cuda" in types else next(iter(types), None)
        return dict(device.describe(chosen).to_dict())

    @property
    def sites(self) -> dict[str, SiteCounts]:
        counts = {family: SiteCounts() for family in SEED_FAMILIES}
        for site in itertools.chain.from_iterable(record.sites for record in self.records):
            for family in site.families:
                counts.setdefault(family, SiteCounts()).add(site)
        return counts

    @property
    def fallbacks(self) -> list[dict[str, Any]]:
        entries = merged(entry for record in self.records for entry in record.fallbacks)
        return [entry.to_dict() for entry in entries]

    @property
    def attention(self) -> list[dict[str, Any]]:
        """Attention implementations by graph, and the densities of sparse ones; see `tritium.layers`."""
        return LEDGER.attention_of(self.records)

    @property
    def lowered(self) -> list[dict[str, Any]]:
        """Operators of Inductor's graphs that became generated code, most frequent first."""
        total: Counter[str] = Counter()
        for entry in itertools.chain.from_iterable(record.lowered for record in self.records):
            total[entry.op] += entry.count
        return [{"op": op, "count": count} for op, count in total.most_common()]

    @property
    def recompiles(self) -> list[dict[str, str | None]]:
        found = [record.recompile for record in self.records if record.recompile is not None]
        for limit in self.limits:
            last = parse_guard_failure("", limit.reason, {})
            found.append(
                Recompile(
                    f"{limit.function} ({limit.file.rsplit('/', 1)[-1]}:{limit.line})",
                    last.argument,
                    last.was,
                    last.now,
                    f"{limit.limit} ({limit.value}) reached, runs eagerly from now on for other arguments; "
                    f"last: {last.reason}",
                )
            )
        return [entry.to_dict() for entry in found]

    captures = _by_graph("captures")
    kernels = _by_graph("kernels")
    # Pairs of generated kernels that share or pass data, with Inductor's reason for not fusing them.
    not_fused = _by_graph("not_fused")
    passes = _by_graph("passes")
    frozen = _by_graph("frozen")
    failures = _by_graph("failures")

    def to_dict(self) -> dict[str, Any]:
        return {
            "versions": compat.versions.versions(),
            "device": self.device,
            "components": [component.to_dict() for component in self.components],
            "measurement": self.measurement.to_dict() if self.measurement is not None else None,
            "graphs": [record.describe() for record in self.records],
            "sites": {family: counts.to_dict() for family, counts in self.sites.items()},
            **{name: getattr(self, name) for name in _LISTS},
            "limits": [dataclasses.asdict(limit) for limit in self.limits],
            "violations": [violation.to_dict() for violation in self.violations],
        }

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2)

    def dump(self, folder: str | os.PathLike[str]) -> list[Path]:
        """Write a folder per generated kernel, in which it can be read, run, edited and measured alone.

        The folders are `<folder>/<function>-<graph>/fused_<operators>_<hash>`, with the files listed in
        `tritium.report.kernel_dump`. After a warm start the kernels come from a store next to Inductor's cache. If the kernels of
        a graph are unknown, a `ReportError` is raised after the others were written.
        """
        written = [path for record in self.records for path in record.write_kernels(Path(folder))]
        lacking = [f"{record.graph} ({reason})" for record in self.records if (reason := record.why_no_kernels())]
        if lacking:
            raise ReportError(
                f"no kernels are known for graph {'; '.join(lacking)}; {len(written)} folders were written"
            )
        return written

    def to_html(self, path: str | os.PathLike[str], *, title: str = "Tritium report") -> None:
        """Write a self-contained HTML page. The file is written completely or not at all."""
        from tritium.report import html

        try:
            disk.write(Path(path), html.render(self, title))
        except OSError as error:
            raise ReportError(f"the report cannot be written to {path}: {error.strerror or error}") from error

    @property
    def bandwidth(self) -> float | None:
        """Bytes per second of a large copy on the device, measured here or earlier; None if unknown."""
        if self.measurement is not None:
            return self.measurement.roofs.bytes_per_s
        return device.copy_bandwidth(device.Device(self.device["type"], self.device["name"]))

    def __str__(self) -> str:
        return text.of_report(self)

    def __repr__(self) -> str:
        recognised = sum(counts.recognised for counts in self.sites.values())
        return f"<Report: {len(self.records)} graphs, {recognised} sites recognised, {len(self.recompiles)} recompiles>"
