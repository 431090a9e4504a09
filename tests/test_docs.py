"""What docs/generate.py makes of the catalogue and of the stored census."""

import inspect

import pytest

import scripts
from tritium import fusions


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
