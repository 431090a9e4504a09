"""Summarise a report in sentences."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from tritium.report.html.kernels import Kernels
from tritium.report.units import count, number

if TYPE_CHECKING:
    from tritium.report import Report


def summary(report: Report, kernels: Kernels) -> list[str]:
    """Summarise the report in sentences."""
    seconds = sum(record.seconds for record in report.records)
    engines = " and ".join(sorted({record.engine for record in report.records})) or "none"
    outcomes = Counter(site.outcome for record in report.records for site in record.sites)
    compiled = f"{count(len(report.records), 'graph')} compiled in {number(seconds)} s for engine {engines}"
    sites = (
        f"{count(outcomes.total(), 'site')} recognised: {outcomes['fused']} run an owned kernel, "
        f"{outcomes['inductor']} left to Inductor, {outcomes['declined']} declined"
    )
    trouble = ", ".join(
        [
            count(len(report.recompiles), "recompile"),
            count(len(report.fallbacks), "operator without generated code", "operators without generated code"),
            count(len(report.failures), "failure"),
        ]
    )
    return [f"{compiled}.", f"{sites}.", f"{trouble[0].upper()}{trouble[1:]}.", *_about_times(report, kernels)]


def _about_times(report: Report, kernels: Kernels) -> list[str]:
    measurement = report.measurement
    if measurement is None:
        if not kernels.rows:
            return ["No kernels are recorded, so there are no times."]
        how = (
            "times are estimated from the bytes that memory-bound kernels move"
            if kernels.total_us
            else "this device's bandwidth is not known, so there are no estimates either"
        )
        return [f"Nothing was measured: {how}."]
    sentence = (
        f"One call takes {number(measurement.call_ms)} ms; {measurement.timed} of "
        f"{count(measurement.of, 'launch', 'launches')} were timed under the profiler, mean of {measurement.calls} calls, "
        f"and take {number(kernels.total_us / 1e3)} ms together"
    )
    sentences = [f"{sentence}."]
    if measurement.disturbed:
        sentences.append("Other programs used this machine during the measurement: the times are not to be trusted.")
    return sentences
