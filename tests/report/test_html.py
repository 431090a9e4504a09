"""The report as a page: whole, escaped, self-contained, and honest about what was measured."""

import os
import re
import stat

import pytest
from typer.testing import CliRunner

from support.report_samples import Page, full_report, measurement
from tritium import device, disk
from tritium.bench.settings import Settings
from tritium.cli.app import app
from tritium.errors import ReportError
from tritium.report import Report
from tritium.report.records import Diagram

HOSTILE = "<img src=x onerror=alert(1)>&\"'</script></style></title>"


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
    assert len(found.all("title")) == 1 + len(found.all("circle")) + len(found.all("rect"))
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


def busy():
    report = full_report()
    report.measurement = measurement(disturbed=True)
    return report


@pytest.mark.parametrize(
    ("report", "copies_per_s", "said"),
    [
        (full_report(measured=False), None, ["Nothing was measured", "no times", "There is no roofline"]),
        (full_report(measured=False, estimated_us=4.0), 1e9, ["estimated, not measured"]),
        (busy(), None, ["Times are measured", "not to be trusted"]),
        (Report([]), None, ["No kernels are recorded", "No sites were recognised"]),
    ],
    ids=["unmeasured", "estimated", "busy", "empty"],
)
def test_the_page_says_where_times_come_from(written, monkeypatch, report, copies_per_s, said):
    monkeypatch.setattr(device, "copy_bandwidth", lambda which: copies_per_s)
    found = Page(written(report))
    assert [text for text in said if text not in found.words] == []
    assert ("Times are measured" in found.words) == bool(found.all("circle")) == (report.measurement is not None)


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


def test_the_graph_s_sides_are_aligned_and_marked(written):
    found = Page(written(full_report()))
    states = [
        attributes["class"]
        for attributes in found.all("li")
        if attributes.get("class") in ("went", "came", "same", "nothing")
    ]
    # Before: x stays, norm and mul go. After: x, the new node, and an empty line for mul.
    assert states == ["same", "went", "went", "same", "came", "nothing"]
    arcs = [(int(a["data-from"]), int(a["data-to"])) for a in found.all("path")]
    assert arcs == [(0, 1), (1, 2), (0, 2), (0, 1)]


def test_a_graph_that_did_not_change_is_shown_once(written):
    report = full_report()
    before = report.records[0].diagram.before
    report.records[0].diagram = Diagram(None, before, before)
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
            disk.write(tmp_path / "report.html", "text")
        finally:
            os.umask(old)
        assert stat.S_IMODE((tmp_path / "report.html").stat().st_mode) == 0o644


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
    def test_an_unwritable_file_is_an_error_before_any_work(self, tmp_path, monkeypatch, where):
        monkeypatch.setattr(Settings, "build", lambda *given: pytest.fail("worked first"))
        result = CliRunner().invoke(app, ["explain", "flux", "--device", "cpu", "--html", str(tmp_path / where)])
        assert result.exit_code == 2
        assert "cannot be written" in result.stderr
        assert len(result.stderr.strip().splitlines()) == 1

    def test_the_list_of_fusions_is_no_page(self):
        result = CliRunner().invoke(app, ["explain", "--fusions", "--html", "x.html"])
        assert result.exit_code == 2
        assert "leave out --html" in result.stderr
