"""Times of kernels: every event of the profiler belongs to one kernel, or to none."""

import math
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import tritium
from support.report_samples import Page, kernel
from tritium.report import Report, timing
from tritium.report.html.kernels import Kernels
from tritium.report.records import GraphRecord


def event(name, start, taken, parent=None, kind="CPU"):
    return SimpleNamespace(
        name=name,
        time_range=SimpleNamespace(start=start),
        cpu_time_total=taken,
        device_time_total=taken * 10,
        cpu_parent=parent,
        device_type=SimpleNamespace(name=kind),
    )


class TestAttribution:
    def events(self, runs=2):
        found = []
        for run in range(runs):
            region = event("Torch-Compiled Region: 0/0", 100 * run, 50)
            inner = event("## Call CompiledFxGraph abc ##", 100 * run + 1, 50, region)
            first = event("aten::addmm", 100 * run + 2, 5 + run, inner)
            found += [
                # Out of order, as a profiler may give them.
                event("aten::addmm", 100 * run + 30, 9 + run, inner),
                region,
                inner,
                first,
                event("aten::addmm", 100 * run + 3, 1, first),
                event("cpp_fused_mul_0", 100 * run + 20, 3, inner),
            ]
        return [*found, event("aten::addmm", 999, 77)]

    def test_only_what_a_graph_calls_itself_counts(self):
        found, runs = timing.attribute(self.events(), "cpu")
        assert runs == {"0/0": 2}
        assert found["0/0", "aten::addmm"] == [5, 9, 6, 10]
        assert found["0/0", "cpp_fused_mul_0"] == [3, 3]
        on_gpu, _ = timing.attribute(self.events(), "cuda")
        assert on_gpu["0/0", "cpp_fused_mul_0"] == [30, 30]

    def test_calls_are_told_apart_by_their_order(self):
        calls = [kernel(f"addmm ({name})", kind="library", ops=["aten.addmm"]) for name in "ab"]
        record = GraphRecord("0/0", "f", "inductor", "cpu", kernels=[kernel("cpp_fused_mul_0"), *calls])
        timed = timing.with_times(record, *timing.attribute(self.events(3), "cpu"))
        assert [entry.measured_us for entry in timed.kernels] == [3, 6, 10]
        assert timed.runs == 3 / timing.CALLS
        assert [entry.measured_us for entry in record.kernels] == [None] * 3
        # Three calls do not fit two events.
        record.kernels.append(calls[0])
        timed = timing.with_times(record, *timing.attribute(self.events(), "cpu"))
        assert [entry.measured_us for entry in timed.kernels] == [3, None, None, None]

    def test_calls_of_pieces_that_share_code_are_told_apart(self):
        kernels = [
            kernel("addmm (a)", kind="library", ops=["aten.addmm"], piece=0, count=2),
            kernel("addmm (b)", kind="library", ops=["aten.addmm"], piece=1),
            kernel("cpp_fused_mul_0", piece=0, count=2),
            kernel("cpp_fused_mul_0", piece=1),
        ]
        record = GraphRecord("0/0", "f", "inductor", "cpu", kernels=kernels, order=[0, 1, 0])
        found = {("0/0", "aten::addmm"): [5, 20, 7, 6, 22, 8], ("0/0", "cpp_fused_mul_0"): [1, 9, 2, 3, 11, 4]}
        timed = timing.with_times(record, found, Counter({"0/0": 2}))
        assert [entry.measured_us for entry in timed.kernels] == [6.5, 21, 2.5, 10]
        rows = {row.kernel.name: row for row in Kernels(Report([timed])).rows}
        assert (rows["addmm (a)"].launches, rows["addmm (b)"].launches) == (2, 1)


@pytest.mark.codegen
def test_kernels_of_a_real_model_are_measured(tmp_path):
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    x = torch.randn(32, 64)
    with torch.inference_mode():
        compiled = torch.compile(model, backend="tritium")
        report = tritium.explain(compiled, call=lambda: compiled(x))
    found = report.measurement
    assert (found.timed, found.of) == (len(report.kernels), len(report.kernels))
    assert found.calls == timing.CALLS
    assert report.to_dict()["graphs"][0]["runs"] == 1
    products = [entry for entry in report.kernels if entry["ops"] == ["aten.addmm"]]
    assert [entry["flops"] for entry in products] == [2 * 32 * 64 * 256] * 2
    assert {entry["kind"] for entry in report.kernels} == {"generated", "library"}
    assert all(entry["measured_us"] > 0 for entry in report.kernels)
    assert "us each" in str(report)
    assert all(entry["measured_us"] is None for entry in tritium.explain(compiled).kernels)
    report.to_html(tmp_path / "report.html")
    page_found = Page((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert len(page_found.all("circle")) == len({entry["name"] for entry in report.kernels})
    assert math.isfinite(found.roofs.bytes_per_s)
