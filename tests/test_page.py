"""The report as a page: whole, escaped, self-contained, and honest about what was measured."""

import math
import os
import re
import stat
from collections import Counter
from html.parser import HTMLParser
from types import SimpleNamespace

import pytest
import torch
from torch import fx, nn
from typer.testing import CliRunner

import tritium
from small_models import Block, Stack, block_inputs
from tritium import measure
from tritium.cli.app import app
from tritium.compiler import draw, time_kernels
from tritium.compiler.count_flops import bytes_of, flops_of
from tritium.errors import ReportError
from tritium.report import (
    LEDGER,
    Capture,
    Component,
    Drawing,
    DrawnNode,
    Failure,
    GraphRecord,
    Measurement,
    PassRecord,
    Recompile,
    Report,
    Site,
    Violation,
    html,
)
from tritium.report.html.kernels import Kernels
from tritium.report.ledger import MOST_DRAWINGS

HOSTILE = "<img src=x onerror=alert(1)>&\"'</script></style></title>"

VOID = {"meta", "link", "input", "br", "img", "hr"}


class Page(HTMLParser):
    """What is on a page: its text, its elements with their attributes, and whether every element is closed."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.open, self.text, self.rows = [], [], [], {}
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag == "tr":
            table = next((attributes.get("id") for name, attributes in reversed(self.open) if name == "table"), None)
            self.rows[table] = self.rows.get(table, 0) + 1
        if tag not in VOID:
            self.open.append((tag, dict(attrs)))

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag

    def handle_data(self, data):
        if not self.open or self.open[-1][0] not in ("style", "script"):
            self.text.append(data)

    @property
    def words(self):
        return " ".join(" ".join(self.text).split())

    def all(self, tag, **attributes):
        wanted = {name.rstrip("_"): value for name, value in attributes.items()}
        return [a for t, a in self.elements if t == tag and all(a.get(name) == value for name, value in wanted.items())]


def kernel(name, **changes):
    return {
        "name": name,
        "kind": "generated",
        "ops": ["aten.mul", "aten.add"],
        "source_lines": ["model.py:7"],
        "bytes_read": 3000,
        "bytes_written": 1000,
        "ideal_bytes": 4000,
        "region": None,
        "flops": None,
        "dtype": None,
        "estimated_us": None,
        "measured_us": None,
        "why_not_fused": [],
        "piece": None,
        "count": 1,
        **changes,
    }


def node(name, *inputs, target="operator.mul"):
    return DrawnNode(name, target, "float32[2, 7]", inputs, "model.py:7 in forward")


def measurement(**changes):
    found = {"calls": 3, "call_ms": 0.5, "timed": 3, "of": 4, "roofs": measure.Roofs(1e9, 1e10, "float32")}
    return Measurement(**{**found, **changes})


def full_report(text="plain", *, measured=True):
    """One of everything."""
    us = (lambda value: value) if measured else (lambda value: None)
    kernels = [
        kernel(f"cpp_fused_{text}_0", measured_us=us(8.0), region=0, ideal_bytes=5000, why_not_fused=[f"buf1: {text}"]),
        kernel(f"cpp_fused_{text}_0", measured_us=us(8.0), region=0, ideal_bytes=5000),
        kernel(
            "addmm (64×64)", kind="library", flops=2 * 64**3, dtype="float32", measured_us=us(80.0), ops=["aten.addmm"]
        ),
        kernel("cpp_fused_lost_1"),
    ]
    record = GraphRecord(
        "0/1",
        f"Model.{text}",
        "inductor",
        "cpu",
        nodes=12,
        break_reason=f"because {text}",
        sites=[
            Site("rms_norm", ("rms_norm",), "fused", f"it is {text}", "norm", "model.py:7 in forward"),
            Site("rms_norm", ("rms_norm",), "fused", f"it is {text}", "norm_1", "model.py:7 in forward"),
            Site("rope", ("rope",), "declined", f"not {text}", "cos", "model.py:9 in forward"),
        ],
        passes=[PassRecord(f"fuse {text}", changed=True, requests=[{"settings": {"a": text}, "because": text}])],
        failures=[Failure(f"pass {text}", f"it broke: {text}", "somewhere")],
        fallbacks=[{"op": f"aten.{text}", "count": 2, "reason": f"no lowering for {text}"}],
        kernels=kernels,
        recompile=Recompile("0/1", f"hidden_{text}", "size 8 at dim 1", "size 16 at dim 1", f"mismatch {text}"),
        captures=[Capture(f"x {text}", hits=3, bytes=64), Capture(f"y {text}", piece=2, declined=f"no {text}")],
        runs=2.0 if measured else None,
        drawing=Drawing(
            f"blocks.{text}",
            (node("x"), node("norm", "x"), node(f"mul_{text}", "norm", "x")),
            (node("x"), node("fused", "x", target=f"tritium.{text}")),
            left_out=5,
        ),
    )
    components = [
        Component(
            name=f"transformer {text}",
            milliseconds=80.0,
            calls=28,
            share=0.8,
            first_call_seconds=9.0,
            what=f"compiled {text}",
        ),
        Component(name="vae", milliseconds=None, calls=0, share=None, first_call_seconds=0.0, what="left"),
    ]
    violations = [Violation(f"vae {text}", f"size of {text}", "compiled", 2)]
    timed = measurement() if measured else None
    return Report([record], components=components, measurement=timed, violations=violations)


@pytest.fixture
def written(tmp_path):
    def write(report, **options):
        path = tmp_path / "report.html"
        report.to_html(path, **options)
        return path.read_text(encoding="utf-8")

    return write


def test_everything_is_on_the_page_and_the_page_is_whole(written):
    found = Page(written(full_report(), title="flux on a laptop"))
    assert "flux on a laptop" in found.words
    assert found.rows["kernel-table"] == 1 + 3
    assert found.rows["site-table"] == 1 + 2
    assert found.rows["pass-table"] == 1 + 1
    assert len(found.all("li", class_="component")) == 2
    assert len(found.all("circle")) == 2
    assert found.all("svg", id="roofline")
    assert found.all("svg", id="bandwidth")
    for said in (
        "1 graph compiled",
        "3 sites recognised: 2 run an owned kernel, 0 left to Inductor, 1 declined",
        "1 recompile, 1 operator without generated code, 1 failure",
        "One call takes 0.5 ms; 3 of 4 launches were timed under the profiler",
        "transformer plain 28 × 80 ms · 80 %",
        "not measured",
        "1 launch could not be found",
        "hidden_plain",
        "size 8 at dim 1",
        "it broke: plain",
        "no lowering for plain",
        "not plain",
        "buf1: plain",
        "block blocks.plain",
        "5 nodes left out",
    ):
        assert said in found.words, said


def test_shares_totals_and_limits(written):
    """2 launches of 8 us and 1 of 80 us, in a graph that ran twice a call: 32 and 160 us of 192."""
    found = Page(written(full_report()))
    table = re.findall(r'<tr data-kernel="[^"]*">(.*?)</tr>', written(full_report()), re.DOTALL)
    cells = [re.findall(r'data-value="([^"]*)"', row) for row in table]
    assert [row[0] for row in cells] == ["addmm (64×64)", "cpp_fused_plain_0", "cpp_fused_lost_1"]
    product, generated, lost = cells
    assert [float(value) for value in product[1:4]] == pytest.approx([160 / 192, 160.0, 1])
    # 2 * 64**3 operations at 1e10 a second take 52 us, 4000 bytes at 1e9 a second take 4.
    assert float(product[5]) == pytest.approx(2 * 64**3 / 1e10 / 80e-6)
    assert [float(value) for value in generated[1:4]] == pytest.approx([32 / 192, 32.0, 2])
    assert float(generated[5]) == pytest.approx(4000 / 1e9 / 8e-6)
    # Two kernels of 4000 bytes in a region that one kernel would do with 5000.
    assert float(generated[7]) == pytest.approx(8000 / 5000)
    assert (lost[1], lost[2], lost[4], lost[5]) == ("", "", "", "")
    assert "Times are measured" in found.words


def test_nothing_escapes_into_the_page(written):
    found = Page(written(full_report(HOSTILE), title=HOSTILE))
    assert not found.all("img")
    assert len(found.all("script")) == len(found.all("style")) == 1
    # One of the page, and one a mark of the plots.
    assert len(found.all("title")) == 1 + len(found.all("circle"))
    assert all(not name.startswith("on") for _, attributes in found.elements for name in attributes)
    plain = Page(written(full_report()))
    assert [tag for tag, _ in found.elements] == [tag for tag, _ in plain.elements]
    assert found.words.count(" ".join(HOSTILE.split())) > 15


def test_the_page_loads_nothing(written):
    text = written(full_report())
    found = Page(text)
    for tag, attributes in found.elements:
        assert "src" not in attributes, tag
        for name in ("href", "xlink:href", "action", "data"):
            if name in attributes:
                assert attributes[name].startswith("#") or attributes[name] == "data:,", attributes
    assert not re.search(r"https?:|//[a-z]|@import|url\(|fetch\(|XMLHttpRequest|import\(", text)
    targets = {attributes["id"] for _, attributes in found.elements if "id" in attributes}
    assert {a["href"][1:] for a in found.all("a")} <= targets
    assert found.all("meta", name="viewport")


def test_without_a_measurement_the_page_says_so(written):
    found = Page(written(full_report(measured=False)))
    assert "Nothing was measured" in found.words
    assert "no times" in found.words
    assert not found.all("circle")
    assert "There is no roofline without measured times" in found.words


def test_estimates_are_called_estimates(written, monkeypatch):
    from tritium import device

    monkeypatch.setattr(device, "copy_bandwidth", lambda which: 1e9)
    report = full_report(measured=False)
    report.records[0].kernels[0]["estimated_us"] = 4.0
    found = Page(written(report))
    assert "estimated, not measured" in found.words
    assert "Times are measured" not in found.words
    assert not found.all("circle")


def test_without_components_the_bars_are_kinds_or_graphs(written):
    report = full_report()
    report.components.clear()
    found = Page(written(report))
    assert len(found.all("li", class_="component")) == 2
    assert "Library calls 0.16 ms · 83 %" in found.words
    assert "Generated kernels 0.032 ms · 17 %" in found.words
    other = full_report().records[0]
    other.graph, other.function = "1/0", "Decoder.forward"
    report.records.append(other)
    found = Page(written(report))
    assert len(found.all("li", class_="component")) == 2
    assert "Decoder.forward 0.192 ms · 50 %" in found.words


def test_a_busy_machine_is_named(written):
    report = full_report()
    report.measurement = measurement(disturbed=True)
    assert "not to be trusted" in Page(written(report)).words


def test_an_empty_report_is_a_page_too(written):
    found = Page(written(Report([])))
    assert "No kernels are recorded" in found.words
    assert "No sites were recognised" in found.words


def test_the_graph_s_sides_are_aligned_and_marked(written):
    found = Page(written(full_report()))
    states = [
        attributes["class"]
        for attributes in found.all("li")
        if attributes.get("class") in ("went", "came", "same", "nothing")
    ]
    # Before: x stays, norm and mul go. After: x, the new node, and nothing beside mul.
    assert states == ["same", "went", "went", "same", "came", "nothing"]
    arcs = [(int(a["data-from"]), int(a["data-to"])) for a in found.all("path")]
    assert arcs == [(0, 1), (1, 2), (0, 2), (0, 1)]


def test_a_graph_that_did_not_change_is_drawn_once(written):
    report = full_report()
    drawing = report.records[0].drawing
    report.records[0].drawing = Drawing(None, drawing.before, drawing.before)
    text = written(report)
    assert text.count('<section class="side') == 1
    assert "The passes changed nothing here" in text


class TestWriting:
    def test_the_file_is_there_whole_or_not_at_all(self, tmp_path, monkeypatch):
        path = tmp_path / "report.html"
        path.write_text("the old one")

        def fail(*given, **named):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(type(path), "replace", fail)
        with pytest.raises(ReportError, match=r"cannot be written to .*report\.html: No space left"):
            full_report().to_html(path)
        assert path.read_text() == "the old one"
        assert list(tmp_path.iterdir()) == [path]

    def test_others_may_read_it(self, tmp_path):
        old = os.umask(0o022)
        try:
            html.write(tmp_path / "report.html", "text")
        finally:
            os.umask(old)
        assert stat.S_IMODE((tmp_path / "report.html").stat().st_mode) == 0o644

    @pytest.mark.parametrize("where", ["missing/report.html", "."])
    def test_where_nothing_can_be_written(self, tmp_path, where):
        for act in (html.check_writable, full_report().to_html):
            with pytest.raises(ReportError, match="cannot be written to"):
                act(tmp_path / where)
        assert list(tmp_path.iterdir()) == []


class TestCommand:
    def test_the_page_of_a_workload(self, tmp_path):
        pytest.importorskip("diffusers")
        path = tmp_path / "report.html"
        result = CliRunner().invoke(
            app, ["explain", "flux", "--engine", "eager", "--device", "cpu", "--html", str(path)]
        )
        assert result.exit_code == 0, result.output
        assert result.stdout.strip().endswith(f"report in {path}")
        assert len(result.stdout.strip().splitlines()) == 1
        found = Page(path.read_text(encoding="utf-8"))
        assert "the engine was eager, which generates no code" in found.words
        assert found.all("section", class_="side after")

    @pytest.mark.parametrize("where", ["missing/report.html", ""])
    def test_a_file_that_cannot_be_written_is_one_line_before_any_work(self, tmp_path, monkeypatch, where):
        from tritium.bench import run

        monkeypatch.setattr(run, "build", lambda *given: pytest.fail("worked first"))
        result = CliRunner().invoke(app, ["explain", "flux", "--device", "cpu", "--html", str(tmp_path / where)])
        assert result.exit_code == 2
        assert result.stderr.startswith("tritium: the report cannot be written to")
        assert len(result.stderr.strip().splitlines()) == 1

    def test_the_list_of_fusions_is_no_page(self):
        result = CliRunner().invoke(app, ["explain", "--fusions", "--html", "x.html"])
        assert result.exit_code == 2
        assert "leave out --html" in result.stderr


def with_value(graph, name, value):
    made = graph.placeholder(name)
    made.meta["val"] = value
    return made


class TestFlops:
    @pytest.mark.parametrize(
        ("target", "shapes", "extra", "flops"),
        [
            (torch.ops.aten.mm.default, [(3, 5), (5, 7)], (), 2 * 3 * 5 * 7),
            (torch.ops.aten.addmm.default, [(7,), (3, 5), (5, 7)], (), 2 * 3 * 5 * 7),
            (torch.ops.aten.bmm.default, [(2, 3, 5), (2, 5, 7)], (), 2 * 2 * 3 * 5 * 7),
            (
                torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
                [(2, 4, 6, 8)] * 3,
                (),
                2 * (2 * 4 * 6 * 6 * 8) * 2,
            ),
            (
                torch.ops.aten.convolution.default,
                [(1, 3, 8, 8), (5, 3, 3, 3)],
                (None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1),
                2 * 8 * 8 * 5 * 3 * 9,
            ),
            (torch.ops.aten.mul.Tensor, [(3, 5), (3, 5)], (), None),
        ],
    )
    def test_from_shapes(self, target, shapes, extra, flops):
        graph = fx.Graph()
        tensors = [torch.empty(shape, device="meta") for shape in shapes]
        inputs = [with_value(graph, f"x{index}", tensor) for index, tensor in enumerate(tensors)]
        made = graph.call_function(target, (*inputs, *extra))
        made.meta["val"] = target(*tensors, *extra)
        assert flops_of(made) == flops

    def test_an_owned_op_counts_what_its_reference_contracts(self):
        from tritium import ops

        graph = fx.Graph()
        op = ops.catalog()["linear_gelu"]
        sample = next(iter(op.samples(torch.float32, "cpu")))
        values = list(sample.arguments.values())
        inputs = [
            with_value(graph, f"x{index}", value) if isinstance(value, torch.Tensor) else value
            for index, value in enumerate(values)
        ]
        made = graph.call_function(op.overload, tuple(inputs), {"provider": "reference"})
        x, weight = (value for value in values[:2])
        assert flops_of(made) == 2 * x.numel() * weight.shape[0]

    def test_arguments_that_no_formula_understands_have_no_count(self):
        graph = fx.Graph()
        inputs = [with_value(graph, name, torch.empty(3, device="meta")) for name in "ab"]
        made = graph.call_function(torch.ops.aten.mm.default, tuple(inputs))
        made.meta["val"] = torch.empty(3, device="meta")
        assert flops_of(made) is None

    def test_bytes_read_once_where_expanded(self):
        assert bytes_of([torch.empty(3, 5), torch.empty(1, 5).expand(9, 5), None, 2]) == 60 + 20


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
        found, runs = time_kernels.attribute(self.events(), "cpu")
        assert runs == {"0/0": 2}
        assert found["0/0", "aten::addmm"] == [5, 9, 6, 10]
        assert found["0/0", "cpp_fused_mul_0"] == [3, 3]
        on_gpu, _ = time_kernels.attribute(self.events(), "cuda")
        assert on_gpu["0/0", "cpp_fused_mul_0"] == [30, 30]

    def test_calls_are_told_apart_by_their_order(self):
        kernels = [
            kernel("cpp_fused_mul_0"),
            kernel("addmm (a)", kind="library", ops=["aten.addmm"]),
            kernel("addmm (b)", kind="library", ops=["aten.addmm"]),
        ]
        record = GraphRecord("0/0", "f", "inductor", "cpu", kernels=kernels)
        timed = time_kernels._timed(record, *time_kernels.attribute(self.events(3), "cpu"))
        assert [entry["measured_us"] for entry in timed.kernels] == [3, 6, 10]
        assert timed.runs == 3 / time_kernels.CALLS
        assert [entry["measured_us"] for entry in record.kernels] == [None] * 3

    def test_calls_of_pieces_that_share_code_are_told_apart(self):
        kernels = [
            kernel("addmm (a)", kind="library", ops=["aten.addmm"], piece=0, count=2),
            kernel("addmm (b)", kind="library", ops=["aten.addmm"], piece=1),
            kernel("cpp_fused_mul_0", piece=0, count=2),
            kernel("cpp_fused_mul_0", piece=1),
        ]
        record = GraphRecord("0/0", "f", "inductor", "cpu", kernels=kernels, order=[0, 1, 0])
        found = {("0/0", "aten::addmm"): [5, 20, 7, 6, 22, 8], ("0/0", "cpp_fused_mul_0"): [1, 9, 2, 3, 11, 4]}
        timed = time_kernels._timed(record, found, Counter({"0/0": 2}))
        assert [entry["measured_us"] for entry in timed.kernels] == [6.5, 21, 2.5, 10]
        rows = {row.name: row for row in Kernels.of({**Report([timed]).to_dict(), "bandwidth": None}).rows}
        assert (rows["addmm (a)"].launches, rows["addmm (b)"].launches) == (2, 1)

    def test_what_does_not_add_up_is_not_attributed(self):
        calls = [kernel(f"addmm ({name})", kind="library", ops=["aten.addmm"]) for name in "abc"]
        record = GraphRecord("0/0", "f", "inductor", "cpu", kernels=[kernel("cpp_fused_mul_0"), *calls])
        timed = time_kernels._timed(record, *time_kernels.attribute(self.events(), "cpu"))
        assert [entry["measured_us"] for entry in timed.kernels] == [3, None, None, None]


def test_roofs_are_rates():
    found = measure.roofs("cpu", torch.float32, runs=1)
    assert 1e8 < found.bytes_per_s < 1e13
    assert 1e8 < found.flops_per_s < 1e15
    assert found.dtype == "float32"


class TestDrawing:
    def drawing(self, model, *inputs, **config):
        config = tritium.CompilationConfig(engine="eager", **config)
        with torch.inference_mode():
            compiled = torch.compile(model, backend=tritium.Backend(config))
            compiled(*inputs)
        return tritium.explain(compiled).records[0].drawing

    def test_one_block_of_a_stack(self):
        drawing = self.drawing(Stack(3), *block_inputs(), force_provider="reference")
        assert drawing.block == "blocks.0"
        assert len(drawing.before) == 6
        assert drawing.before[0].target == "torch.rms_norm"
        assert drawing.before[0].type == "float32[2, 7, 16]"
        assert re.fullmatch(r"small_models\.py:\d+ in forward", drawing.before[1].source_line)
        # The residual at the end goes into one kernel with the next block's norm.
        assert [node.target for node in drawing.after][:4] == [
            "tritium.rms_norm.default",
            "torch._C._nn.linear",
            "operator.getitem",
            "tritium.residual_norm_modulate.default",
        ]
        assert drawing.left_out == 0

    def test_a_model_without_blocks_is_drawn_from_its_beginning(self):
        drawing = self.drawing(Block(), *block_inputs())
        assert drawing.block is None
        assert [node.target for node in drawing.before][:2] == ["input", "input"]
        assert drawing.before[-1].target == "return"
        assert not any("parameters" in node.name for node in drawing.before)

    def test_a_large_one_is_cut_and_says_so(self, monkeypatch):
        whole = self.drawing(Block(), *block_inputs(), force_provider="reference")
        torch._dynamo.reset()
        monkeypatch.setattr(draw, "MOST_NODES", 4)
        cut = self.drawing(Block(), *block_inputs(), force_provider="reference")
        assert (cut.before, cut.after) == (whole.before[:4], whole.after[:4])
        assert cut.left_out == len(whole.before) + len(whole.after) - 8 > 0

    def test_a_drawing_that_fails_is_reported_and_the_model_runs(self, monkeypatch):
        from tritium.compiler import pipeline

        def fail(before, after):
            raise ValueError("no ink")

        monkeypatch.setattr(pipeline, "draw", fail)
        assert self.drawing(Block(), *block_inputs()) is None
        assert [(entry["part"], entry["reason"]) for entry in tritium.explain().failures] == [
            ("drawing", "ValueError: no ink")
        ]

    def test_a_process_keeps_only_so_many(self):
        drawing = Drawing(None, (), ())
        for index in range(MOST_DRAWINGS + 2):
            LEDGER.add(GraphRecord(f"{index}/0", "f", "eager", "cpu", drawing=drawing))
        assert sum(record.drawing is not None for record in LEDGER.records()) == MOST_DRAWINGS


@pytest.mark.codegen
def test_kernels_of_a_real_model_are_measured(tmp_path):
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    x = torch.randn(32, 64)
    with torch.inference_mode():
        compiled = torch.compile(model, backend="tritium")
        report = tritium.explain(compiled, call=lambda: compiled(x))
    found = report.measurement
    assert (found.timed, found.of) == (len(report.kernels), len(report.kernels))
    assert found.calls == time_kernels.CALLS
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
