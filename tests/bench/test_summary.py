"""Tables and sentences from rows."""

from __future__ import annotations

import dataclasses

from support import bench
from tritium.bench import summary

ROW = dataclasses.replace(bench.ROW, variant="eager", mode=None, dtype="bfloat16", shrunk=False, ratio=0.5)


def row(**fields):
    return dataclasses.replace(ROW, **fields)


def variants(workload, eager, inductor, optimized):
    return [
        row(workload=workload, median_ms=eager),
        row(workload=workload, variant="inductor", median_ms=inductor, ratio=1.0),
        row(workload=workload, variant="tritium optimize", median_ms=optimized, ratio=inductor / optimized),
    ]


ROWS = [*variants("flux", 10.0, 8.0, 5.0), *variants("wan", 10.0, 8.0, 10.0), *variants("sdxl", 10.0, 8.0, 8.0)]


def test_the_summary_names_the_worst_the_median_and_the_best():
    ((name, against, eager),) = summary.families_summary(ROWS)
    assert name == "`tritium.optimize`"
    assert against == "worst 0.80 (wan), median 1.00, best 1.60 (flux) of 3"
    assert eager == "worst 1.00 (wan), median 1.25, best 2.00 (flux) of 3"


def test_a_family_without_a_variant_is_not_counted_for_it():
    assert summary.families_summary(ROWS[:2]) == []
    ((_, against, _),) = summary.families_summary([*ROWS[:3], *variants("ltx", 1.0, 1.0, 1.0)[:2]])
    assert against.endswith("of 1")


def test_every_family_has_a_line_as_wide_as_the_header():
    lines = summary.families_table([*ROWS, row(workload="lone", shrunk=True)])
    assert {len(line) for line in lines} == {len(summary.FAMILIES_HEADER)}
    assert lines[0][:5] == ["flux", "10.00 ms", "8.00 ms", "5.00 ms", "1.60"]
    assert lines[-1][:5] == ["lone (shrunk)", "10.00 ms", "-", "-", "-"]


def test_a_pipeline_s_table():
    rows = [row(), row(variant="inductor", psnr=41.26, ratio=1.0), row(variant="tritium optimize", psnr=None, ssim=1.0)]
    lines = summary.pipeline_table(rows)
    assert {len(line) for line in lines} == {len(summary.PIPELINE_HEADER)}
    assert lines[0] == ["768 x 512", "eager", "10", "0.50", "1.0", "1.0", ""]
    assert lines[1][-1] == "41.3"
    assert lines[2][-1] == "equal"


def test_only_errors_past_the_contract_are_named():
    eps = 2.0**-7
    rows = [
        row(error_f64=1e-2),
        row(variant="tritium", error_f64=2e-2 + 16 * eps),
        row(variant="tritium optimize", error_f64=2.01e-2 + 16 * eps),
    ]
    assert [line.partition(":")[0] for line in summary.outside_contract(rows)] == ["flux, tritium optimize"]
    assert summary.outside_contract([row(), row(variant="tritium", error_f64=1.0)]) == []
    assert len(summary.outside_contract([row(error_f64=1e-2), row(variant="tritium", error_f64=float("nan"))])) == 1


def test_compile_times_say_how_they_grow():
    rows = [row(workload="few", inductor_s=2.0), row(workload="many", inductor_s=3.0, first_call_s=9.0)]
    assert summary.compile_time_summary(rows) == [
        "eager: 3.0 s in Inductor for many, 1.50 times that for few; first calls 9.0 and 1.0 s"
    ]
    assert summary.compile_time_summary(rows[:1]) == []
