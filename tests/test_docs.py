"""What docs/generate.py makes of the catalogue and of the stored census."""

import dataclasses
import inspect
import json
import pkgutil
import re
import xml.etree.ElementTree

import pytest

import tritium
from support import scripts
from support.bench import ROW
from support.scripts import ROOT
from tritium import fusions
from tritium.bench.results import Results


@pytest.fixture(scope="module")
def generate():
    return scripts.load("docs/generate.py")


@pytest.mark.parametrize("name", fusions.catalog())
def test_a_fusion_s_page_has_its_parts(generate, name):
    fusion = fusions.catalog()[name]
    page = generate.fusion_page(fusion)
    assert page.startswith(f"# {name}\n\n{generate.headline(fusion)}\n\n```\nBefore:")
    for part in ("\nAfter:", "\n## Spellings\n", "\n## What is not meant, and when it declines\n"):
        assert page.count(part) == 1
    if fusion.spellings:
        assert generate.spellings(fusion) in page
        assert "spellings=(" in generate.spellings(fusion) or inspect.isfunction(fusion.spellings[0])
    if fusion.replacement is not None:
        assert f"../ops.md#{fusion.replacement.name}" in page
    assert f"[`{name}`]({name}.md)" in generate.fusions()


def test_the_matrix_has_every_model_and_every_reason(generate):
    page = generate.support()
    for model, families in generate.census().items():
        assert f"| `{model}` |" in generate.models()
        for family, counts in families.items():
            for reason, number in counts["reasons"].items():
                assert f"| `{model}` | `{family}` | {number} | {reason} |" in page
    assert generate.cell({"truth": 6, "recognised": 6, "declined": 0}) == "6"
    assert generate.cell({"truth": 6, "recognised": 4, "declined": 2}) == "6 (2 declined)"
    assert generate.cell({"truth": 6, "recognised": 3, "declined": 2}) == "5 found of 6"


def test_the_page_of_ops_says_what_each_computes(generate):
    from tritium import ops

    page = generate.ops()
    for name, op in ops.catalog().items():
        assert f"\n## {name}\n\n{generate.meaning(op)}\n" in page


def test_the_page_of_techniques_has_each_with_its_fields(generate):
    from tritium import techniques

    page = generate.techniques()
    for name, technique in techniques.catalog().items():
        _, _, section = page.partition(f"\n## {name}\n")
        section = section.partition("\n## ")[0]
        assert f"`{technique.config.__name__}`: {inspect.getdoc(technique.config)}" in section
        assert all(f"| `{field.name}` |" in section for field in dataclasses.fields(technique.config))
    assert "| `mode` | `'off'`, `'only'`, `'with_compile'`, `'auto'` |" in page


def test_the_pages_have_the_parts_that_are_generated_for_them(generate):
    assert "dynamic-kernels.json" not in generate.measured.measured()
    assert "| rope | 2 x 16384 x 24 x 64 |" in generate.measured.dynamic_kernels()
    parts = {
        "README": ["front", "gains"],
        "NOTES": ["measured models"],
        "architecture": ["folders"],
        "performance": ["families summary", "families", "pipeline", "dynamic kernels"],
        "quantization": ["quantized", "producers", "long pipeline"],
        "skipping": ["long pipeline"],
    }
    assert {page.stem for page in generate.PAGES} == set(parts)
    for page in generate.PAGES:
        text = page.read_text(encoding="utf-8")
        assert all(f"<!-- generated: {name} -->" in text for name in parts[page.stem])


def test_the_quantized_denoisers_have_their_ratios(generate):
    assert "| 27.1 ms (1.00x) | 25.7 ms (1.05x) | 17.9 ms (1.51x) | 18.6 ms (1.45x) |" in generate.measured.quantized()
    assert "| both | 1,262 ms | 3.00 |" in generate.measured.long_pipeline()
    assert "| 27.7 | 40.0 | 40.0 | 26.0 |" in generate.measured.producers()


def test_the_front_page_has_speeds_and_losses(generate):
    table = generate.measured.front()
    assert "| **1.07x** | no loss but the order of sums |" in table
    assert "| both | 1,262 ms | **3.00x** | 36.5 and 23.6 dB |" in table


def test_the_chart_has_every_way_with_a_loss(generate):
    found = generate.picture.points()
    path = generate.measured.results() / "cpu-2-cores-skip.json"
    rows = [row for row in json.loads(path.read_text())["rows"] if row["psnr_median"] and row["psnr_median"] < 100]
    shown = {median for points in found.values() for _, median, _ in points}
    assert shown == {row["psnr_median"] for row in rows if not row["variant"].startswith("tritium")}
    assert len(found) == len(generate.picture.SERIES)
    drawn = xml.etree.ElementTree.fromstring(generate.PICTURE.read_text(encoding="utf-8"))
    assert generate.PICTURE.read_text(encoding="utf-8") == generate.picture.speed_against_quality()
    marks = [node for node in drawn if node.tag.endswith("circle") or node.get("width") == "9"]
    assert len(marks) == sum(map(len, found.values())) + len(found)


def test_the_map_of_folders_has_every_module_of_the_package(generate):
    package = ROOT / "src" / "tritium"
    inside = {f"{path.name}/" for path in package.iterdir() if (path / "__init__.py").is_file()}
    inside |= {path.name for path in package.glob("*.py") if not path.name.startswith("__")}
    lines = generate.folders().splitlines()[1:-1]
    assert {line.split()[0] for line in lines} == inside
    assert all(len(line.split()) > 2 for line in lines)


def test_the_architecture_page_has_every_stage_in_its_order():
    from tritium.compiler.pipeline import PIPELINE

    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    assert re.findall(r"^### `(\w+)`$", text, re.MULTILINE) == [stage.name for stage in PIPELINE]


def test_a_generated_part_replaces_what_is_between_its_marks(generate, monkeypatch):
    monkeypatch.setitem(generate.PARTS, "families", lambda: "| a |\n")
    page = "before\n<!-- generated: families -->\nold\n<!-- end -->\nafter"
    assert generate.filled(page) == "before\n<!-- generated: families -->\n\n| a |\n\n<!-- end -->\nafter"
    with pytest.raises(SystemExit, match="no generated part 'familie'"):
        generate.filled("<!-- generated: familie -->\n<!-- end -->")


def row(workload, variant, median, **fields):
    sides = {"workload": workload, "variant": variant, "median_ms": median, "ratio": 8.0 / median}
    return dataclasses.replace(ROW, shrunk=False, **sides, **fields)


def save(rows, path, date="2026-12-01T00:00:00+00:00"):
    dataclasses.replace(Results.now(rows, "cpu"), date=date).save(path)


@pytest.fixture
def results(generate, monkeypatch, tmp_path):
    monkeypatch.setattr(generate.measured, "ROOT", tmp_path)
    return tmp_path / "benchmarks" / "results"


def test_a_committed_suite_becomes_a_table_of_its_own(generate, results):
    measured = generate.measured
    assert measured.families() == measured.pipeline() == measured.measured() == measured.gains() == measured.NOTHING
    assert measured.front() == measured.NOTHING
    assert generate.picture.speed_against_quality() == ""
    sides = (("eager", 10.0), ("inductor", 8.0), ("tritium", 9.0), ("tritium optimize", 5.0))
    rows = [row("flux-512", variant, median) for variant, median in sides]
    save(rows, results / "a-device-families.json")
    assert "worst 1.60 (flux-512), median 1.60, best 1.60 (flux-512) of 1" in measured.families_summary()
    assert "| flux-512 | 10.00 ms | 8.00 ms | 5.00 ms | 1.60 |" in measured.families()
    assert "`a-device-families.json`" in measured.families()
    assert measured.measured() == measured.NOTHING


def test_a_gain_says_if_the_defaults_are_newer(generate, results):
    measured = generate.measured
    sides = [row("wan-decode", "inductor", 500.0), row("wan-decode", "tritium", 250.0)]
    save(sides, results / "h200-wan-decode.json", "2026-11-16T00:00:00+00:00")
    (line,) = [line for line in measured.gains().splitlines() if line.startswith("| video VAE")]
    assert line.endswith("| 500 ms | 250 ms | **2.00x** |")
    assert "All rows were measured before the current defaults" in measured.gains()
    sides = {"inductor": 3000.0, "tritium optimize": 1500.0}
    images = [row(f"flux pipeline {size}", *side) for size in (512, 1024) for side in sides.items()]
    save(images, results / "h200-pipeline.json")
    gains = measured.gains()
    assert gains.count("| FLUX-shaped pipeline") == 2
    assert "| 3.0 s | 1.5 s | **2.00x** |" in gains
    (said,) = [line for line in gains.splitlines() if "measured before" in line]
    assert said.startswith("These rows were measured before")
    assert "video VAE" in said
    assert "FLUX" not in said


def test_a_gain_that_lacks_a_side_or_a_figure_is_left_out(generate, results):
    measured = generate.measured
    rows = [row("example", "tritium", 1.0, cold_start_s=8.0), row("pixart", "inductor", 3.0)]
    for name in ("h200-example-float32.json", "h200-graphs.json"):
        save(rows, results / name)
    assert measured.gains() == measured.NOTHING


def test_every_committed_gain_is_in_the_readme(generate):
    readme = generate.PAGES[0].read_text(encoding="utf-8")
    committed = [gain for gain in generate.measured.GAINS if gain.seconds() is not None]
    assert len(committed) >= 5
    for gain in committed:
        assert f"| {gain.label} |" in readme


def test_every_public_name_is_once_in_the_python_reference(generate):
    pages = "\n".join(generate.api().values())
    names = {f"tritium.{name}" for name in tritium.__all__} - {"tritium.errors", "tritium.layers", "tritium.plugins"}
    names |= {f"tritium.layers.{name}" for name in tritium.layers.__all__}
    for name in names | {f"tritium.plugins.{name}" for name in tritium.plugins.__all__}:
        assert pages.count(f"heading: {name}\n") == 1
    for path in generate.public().values():
        assert pages.count(f"\n::: {path}\n") == 1
    assert "::: tritium.errors\n" in generate.errors()


SYMPTOM = re.compile(r"^\| (?P<symptom>.*?) \| ", re.MULTILINE)
# Words of the operating system, and names of settings and results.
NOT_MESSAGES = {"Illegal instruction", "inductor", "compiled", "torch.compile", "tritium doctor", "triton", "optimize"}


def test_the_messages_of_the_troubleshooting_page_exist():
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    source = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py"))
    # A message may be split over two lines of a call.
    source = re.sub(r'"\s*\n\s*f?"', "", source)
    messages = [
        part
        for row in SYMPTOM.finditer(page)
        for code in re.findall(r"`([^`]+)`", row["symptom"])
        if code not in NOT_MESSAGES and not code.startswith("ConfigError")
        for part in re.split(r"\.\.\.|: ", code)
        if part.strip()
    ]
    assert len(messages) > 15
    assert [message for message in messages if message.strip(" ,;") not in source] == []


PAGES = sorted(path for path in ROOT.rglob("*.md") if not {"reference", ".venv", "weights"} & set(path.parts))
# Entry point groups that are no modules.
GROUPS = {"tritium.providers", "tritium.attention"}


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_the_names_and_files_of_a_page_exist(page):
    text = page.read_text(encoding="utf-8")
    names = {name for name in re.findall(r"\btritium(?:\.[A-Za-z_]\w*)+", text) if name not in GROUPS}
    assert [name for name in sorted(names) if not exists(name)] == []
    folders = "|".join(path.name for path in (*ROOT.iterdir(), *(ROOT / "src" / "tritium").iterdir()) if path.is_dir())
    files = re.findall(rf"`((?:{folders})/[\w./-]*)`", text)
    roots = (ROOT, ROOT / "src" / "tritium", ROOT / "benchmarks")
    assert [file for file in files if not any((root / file).exists() for root in roots)] == []


def exists(name):
    try:
        pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return False
    return True


def test_the_readme_takes_a_minute_to_its_table():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(readme.partition("<!-- generated: gains -->")[0].split()) < 500
