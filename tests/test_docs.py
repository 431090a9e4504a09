"""What docs/generate.py makes of the catalogue and of the stored census."""

import inspect

import pytest

import scripts
from tritium import fusions
from tritium.bench.results import Results, Row


@pytest.fixture(scope="module")
def generate():
    return scripts.load("docs/generate.py")


@pytest.mark.parametrize("name", fusions.catalog())
def test_a_fusion_s_page_says_what_before_and_after_spellings_and_when_not(generate, name):
    fusion = fusions.catalog()[name]
    page = generate.fusion_page(fusion)
    assert page.startswith(f"# {name}\n\n{generate.headline(fusion)}\n\n```\nBefore:")
    for part in ("\nAfter:", "\n## Spellings\n", "\n## What is not meant, and when it declines\n"):
        assert page.count(part) == 1
    for spelling in fusion.spellings:
        assert inspect.getsource(spelling).strip() in page
    if fusion.find is not None:
        assert (inspect.getdoc(fusion.find) or "The forms are those above.") in page
    if fusion.replacement is not None:
        assert f"../ops.md#{fusion.replacement.name}" in page
    assert f"[`{name}`]({name}.md)" in generate.fusions()


@pytest.mark.parametrize(
    ("counts", "shown"),
    [
        (None, ""),
        ({"truth": 6, "recognised": 6, "declined": 0}, "6"),
        ({"truth": 6, "recognised": 4, "declined": 2}, "6 (2 declined)"),
        ({"truth": 6, "recognised": 3, "declined": 2}, "5 found of 6"),
    ],
)
def test_a_cell_of_the_matrix_hides_nothing(generate, counts, shown):
    assert generate.cell(counts) == shown


def test_the_matrix_has_every_model_and_every_reason(generate):
    page = generate.support()
    for model, families in generate.census().items():
        assert f"| `{model}` |" in generate.models()
        for family, counts in families.items():
            for reason, number in counts["reasons"].items():
                assert f"| `{model}` | `{family}` | {number} | {reason} |" in page


def test_the_page_of_ops_says_what_each_computes(generate):
    from tritium import ops

    page = generate.ops()
    for name, op in ops.catalog().items():
        assert f"\n## {name}\n\n{generate.meaning(op)}\n" in page
        assert "arguments to try it on" not in generate.meaning(op)


def test_the_pages_have_the_parts_that_are_generated_for_them(generate):
    readme, performance = (path.read_text(encoding="utf-8") for path in generate.PAGES)
    assert "<!-- generated: support -->" in readme
    assert "<!-- generated: measured" in readme
    for name in ("families summary", "families", "pipeline", "dynamic kernels"):
        assert f"<!-- generated: {name} -->" in performance


def test_a_part_is_written_between_its_marks_and_an_unknown_one_is_refused(generate, monkeypatch):
    monkeypatch.setitem(generate.PARTS, "families", lambda: "| a |\n")
    page = "before\n<!-- generated: families -->\nold\n<!-- end -->\nafter"
    assert generate.filled(page) == "before\n<!-- generated: families -->\n\n| a |\n\n<!-- end -->\nafter"
    with pytest.raises(SystemExit, match="no generated part 'familie'"):
        generate.filled("<!-- generated: familie -->\n<!-- end -->")


def test_committed_suites_become_tables_of_their_own_and_no_rows_of_the_readme(generate, monkeypatch, tmp_path):
    results = tmp_path / "benchmarks" / "results"
    monkeypatch.setattr(generate, "ROOT", tmp_path)
    assert generate.families() == generate.pipeline() == generate.measured() == generate.NOTHING
    rows = [
        Row(
            workload="flux-512",
            variant=variant,
            mode=None,
            dtype="bfloat16",
            shrunk=False,
            note="",
            shapes={},
            median_ms=median,
            lower_quartile_ms=1.0,
            upper_quartile_ms=1.0,
            samples=5,
            ratio=8.0 / median,
            first_call_s=1.0,
            first_call_cold=True,
            peak_memory_bytes=None,
            relative_l2=0.0,
            disturbed=False,
        )
        for variant, median in (("eager", 10.0), ("inductor", 8.0), ("tritium", 9.0), ("tritium optimize", 5.0))
    ]
    Results.now(rows, "cpu").save(results / "a-device-families.json")
    assert "worst 1.60 (flux-512), median 1.60, best 1.60 (flux-512) of 1" in generate.families_summary()
    assert "| flux-512 | 10.00 ms | 8.00 ms | 5.00 ms | 1.60 |" in generate.families()
    assert "`a-device-families.json`" in generate.families()
    assert generate.measured() == generate.NOTHING


def test_single_kernels_have_a_table_of_their_own(generate):
    assert "dynamic-kernels.json" not in generate.measured()
    assert "| rope | 2 x 16384 x 24 x 64 |" in generate.dynamic_kernels()
