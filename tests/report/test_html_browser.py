"""The report's page in a real browser: it runs, sorts, filters, fits a phone and follows the system's colours."""

import shutil

import pytest

from support.report_samples import full_report, kernel, measurement

CHROMIUM = shutil.which("chromium")

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium on this machine")

PHONE = {"width": 390, "height": 844}


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with playwright.sync_playwright() as driver:
        # Containers often run as root, where Chromium's sandbox does not start; the only page it opens is our own file.
        launched = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield launched
        launched.close()


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    report = full_report()
    report.records[0].kernels += [
        kernel("attention_" + "with_a_very_long_name_" * 12, kind="owned", measured_us=400.0, ops=["tritium.rope"] * 9),
        kernel("cpp_fused_softmax_2", measured_us=2.5, bytes_read=90_000, source_lines=["softmax.py:1"]),
    ]
    report.measurement = measurement(timed=5, of=6)
    path = tmp_path_factory.mktemp("page") / "report.html"
    report.to_html(path, title="A report in a browser")
    return path.as_uri()


@pytest.fixture
def opened(browser, address):
    """A page that has loaded the report; whatever goes wrong on it fails the test, and so does any request."""
    contexts, wrong = [], []

    def open_page(**options):
        context = browser.new_context(**options)
        contexts.append(context)
        tab = context.new_page()
        tab.on("console", lambda message: wrong.append(message.text))
        tab.on("pageerror", lambda error: wrong.append(str(error)))
        tab.on("request", lambda request: wrong.append(request.url) if request.url not in (address, "data:,") else None)
        tab.goto(address)
        return tab

    yield open_page
    for context in contexts:
        context.close()
    assert wrong == []


def names(tab):
    return tab.eval_on_selector_all(
        "#kernel-table tbody tr", "rows => rows.filter(row => row.offsetParent).map(row => row.cells[0].dataset.value)"
    )


def column(tab, head):
    place = tab.eval_on_selector_all("#kernel-table th", "heads => heads.map(head => head.textContent)").index(head)
    return tab.eval_on_selector_all(
        "#kernel-table tbody tr", f"rows => rows.map(row => row.cells[{place}].dataset.value)"
    )


def test_it_loads_with_its_plots(opened):
    tab = opened()
    assert tab.title() == "A report in a browser"
    for plot, marks in (("#roofline", 1), ("#bandwidth", 3)):
        box = tab.locator(plot).bounding_box()
        assert box["width"] > 200
        assert box["height"] > 100
        assert tab.locator(f"{plot} circle").count() == marks
    # Every mark and label is inside its plot.
    outside = tab.evaluate(
        """() => [...document.querySelectorAll(".plot")].flatMap(plot => {
            const frame = plot.getBoundingClientRect();
            return [...plot.querySelectorAll("circle, text")].filter(thing => {
                const box = thing.getBoundingClientRect();
                return box.left < frame.left - 1 || box.right > frame.right + 1 || box.top < frame.top - 1;
            }).map(thing => thing.textContent);
        })"""
    )
    assert outside == []


def test_rows_sort_by_clicking(opened):
    tab = opened()
    button = tab.get_by_role("button", name="Moves", exact=True)
    button.click()
    falling = [float(value) for value in column(tab, "Moves")]
    assert falling == sorted(falling, reverse=True)
    assert falling[0] != falling[-1]
    assert tab.locator("#kernel-table th[aria-sort=descending]").inner_text().startswith("Moves")
    button.click()
    assert [float(value) for value in column(tab, "Moves")] == sorted(falling)
    tab.get_by_role("button", name="Kernel", exact=True).click()
    assert names(tab)[0] == "addmm (64×64)"
    assert tab.locator("#kernel-table th[aria-sort]").count() == 1
    # Rows without a number come last in both directions.
    for _ in range(2):
        tab.get_by_role("button", name="µs each").click()
        assert [value == "" for value in column(tab, "µs each")] == [False] * 4 + [True]


def test_rows_are_filtered_by_name_operator_and_source_line(opened):
    tab = opened()
    everything = names(tab)
    assert len(everything) == 5
    for text, left in (
        ("softmax", ["cpp_fused_softmax_2"]),
        ("SOFTMAX.py:1", ["cpp_fused_softmax_2"]),
        ("aten.addmm", ["addmm (64×64)"]),
        ("cpp mul", ["cpp_fused_plain_0", "cpp_fused_softmax_2", "cpp_fused_lost_1"]),
        ("nothing like it", []),
        ("", everything),
    ):
        tab.locator("#filter").fill(text)
        assert sorted(names(tab)) == sorted(left), text
        assert tab.locator("#shown").inner_text() == f"{len(left)} of 5 kernels"


def test_marks_lead_to_rows_and_nodes_to_edges(opened):
    tab = opened()
    tab.locator("#roofline circle").click()
    assert names(tab) == ["addmm (64×64)"]
    assert tab.locator("#bandwidth circle:visible").count() == 0
    tab.locator(".side.before li").nth(1).hover()
    assert tab.locator(".side.before .arcs path.lit").count() == 2


@pytest.mark.parametrize("options", [{"viewport": PHONE}, {"viewport": PHONE, "is_mobile": True, "has_touch": True}])
def test_nothing_is_wider_than_a_phone(opened, options):
    tab = opened(**options)
    tab.eval_on_selector_all("details", "all => all.forEach(details => { details.open = true; })")
    wide, shown = tab.evaluate("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
    assert shown == 390
    assert wide <= shown
    assert tab.locator("h1").bounding_box()["width"] <= 390
