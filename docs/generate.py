"""Write docs/reference from the catalogues and docs/census.json, and the generated parts of other pages.

python docs/generate.py            writes the reference and the generated parts
python docs/generate.py --check    exits 1 if a page is not what would be written
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import re
import shutil
import sys
import tomllib
import typing
from collections.abc import Callable
from pathlib import Path

# A program's folder is on the path, but tests load this file by its path.
sys.path.insert(0, str(Path(__file__).parent))

import measured
import picture
from measured import table

ROOT = Path(__file__).parent.parent
REFERENCE = ROOT / "docs" / "reference"
PICTURE = ROOT / "docs" / "assets" / "speed-quality.svg"


def configuration() -> str:
    from tritium.config import CompilationConfig, FusionPatterns, PassConfig, environment_names

    variables = {place: name for name, place in environment_names().items()}
    text = f"# Configuration\n\n{inspect.cleandoc(sys.modules[CompilationConfig.__module__].__doc__)}\n"
    for group in (CompilationConfig, FusionPatterns, PassConfig):
        rows = []
        defaults = group()
        for field in dataclasses.fields(group):
            variable = variables.get((group, field.name))
            shown = "" if variable is None else f"`{variable}`"
            default = getattr(defaults, field.name)
            rows.append([f"`{field.name}`", f"`{default!r}`" if shown else "see below", shown])
        text += f"\n## {group.__name__}\n\n{inspect.getdoc(group).split('>>>')[0].strip()}\n\n"
        text += table(["field", "default", "variable"], rows)
    return text


def fusions() -> str:
    from tritium import fusions as catalogue

    text = "# Fusions\n\nOne file each in `src/tritium/fusions`, one page each here, generated from it. "
    text += "`tritium explain --fusions` prints the same list. Every fusion leaves a site alone, and says so, when a "
    text += "family's switch is off, when the graph needs gradients, or when a write in place, an autocast boundary or "
    text += "another reader of a value inside would change what the model computes.\n\n"
    rows = []
    for fusion in catalogue.catalog().values():
        families = ", ".join(f"`{family}`" for family in fusion.families)
        rows.append(
            [f"[`{fusion.name}`]({fusion.name}.md)", families, op_link(fusion), how_found(fusion), headline(fusion)]
        )
    return text + table(["fusion", "families", "op", "spellings", "what"], rows)


def fusion_page(fusion) -> str:
    """What, before and after, spellings, when it declines: from the docstrings and the source of one file."""
    from tritium.config import switch_of

    _, *paragraphs = paragraphs_of(fusion.doc)
    graphs = [paragraph for paragraph in paragraphs if paragraph.lstrip().startswith("Before:")]
    forms = [paragraph for paragraph in paragraphs if paragraph not in graphs]
    text = f"# {fusion.name}\n\n{headline(fusion)}\n\n" + "".join(f"```\n{graph}\n```\n\n" for graph in graphs)
    switches = map(switch_of, fusion.families)
    text += table(
        ["", ""],
        [
            ["families", ", ".join(f"`{family}`" for family in fusion.families)],
            ["switched off by", ", ".join(f"`FusionPatterns({switch}=False)`" for switch in switches)],
            ["op", op_link(fusion)],
            ["kind", "a region over sites of other fusions" if fusion.region else "a site"],
        ],
    )
    text += "\n## Spellings\n\n"
    if fusion.spellings:
        text += f"Each in any operand order, through casts:\n\n```python\n{spellings(fusion)}\n```\n\n"
    if fusion.find is not None:
        text += f"Found by structure. {inspect.getdoc(fusion.find) or 'The forms are those above.'}\n\n"
    text += "\n\n".join(forms) + "\n\n## What is not meant, and when it declines\n\n"
    text += "".join(judgement(getattr(fusion, name)) for name in ("accept", "decline"))
    return text + "What every fusion declines is on [the first page](index.md).\n"


def spellings(fusion) -> str:
    """The source of a fusion's functions, or of its file's patterns."""
    from tritium.fusions.patterns import Pattern

    functions = [inspect.getsource(spelling) for spelling in fusion.spellings if inspect.isfunction(spelling)]
    module = sys.modules[f"tritium.fusions.{fusion.name}"]
    source = inspect.getsource(module)
    patterns = []
    for statement in ast.parse(source).body:
        if isinstance(statement, ast.Assign):
            made = getattr(
                module, next(part.id for part in ast.walk(statement.targets[0]) if isinstance(part, ast.Name))
            )
            given = [keyword for keyword in getattr(statement.value, "keywords", ()) if keyword.arg == "spellings"]
            shown = [statement] if isinstance(made, Pattern) else given if made is fusion and not functions else []
            patterns += [ast.get_source_segment(source, part) for part in shown]
    return "\n".join((*functions, *patterns)).strip()


def judgement(function) -> str:
    """What `accept` or `decline` says about itself; its source too where it is the fusion's own."""
    if function.__module__ == "tritium.fusions.fusion":
        return ""
    doc = inspect.getdoc(function)
    return (f"{doc}\n\n" if doc else "") + f"```python\n{inspect.getsource(function).strip()}\n```\n\n"


def paragraphs_of(doc: str) -> list[str]:
    return [paragraph.rstrip() for paragraph in re.split(r"\n\s*\n", inspect.cleandoc(doc)) if paragraph.strip()]


def headline(fusion) -> str:
    return " ".join(paragraphs_of(fusion.doc)[0].split()) if fusion.doc.strip() else ""


def op_link(fusion) -> str:
    if fusion.replacement is None:
        return "none: counted, and left as it is"
    return f"[`{fusion.replacement.name}`](../ops.md#{fusion.replacement.name})"


def how_found(fusion) -> str:
    return "by structure" if fusion.find is not None else str(len(fusion.spellings))


def meaning(op) -> str:
    """What an op's file says about it; where the op is a folder, the folder itself does."""
    module = sys.modules[op.reference.__module__]
    package = sys.modules[module.__package__]
    return inspect.getdoc(package if getattr(package, "OP", None) is op else module).strip()


def ops() -> str:
    from tritium import ops as catalogue

    text = "# Ops and providers\n\nOne file or folder each in `src/tritium/ops`; this page is generated from them.\n"
    for op in catalogue.catalog().values():
        doc = meaning(op)
        text += f"\n## {op.name}\n\n{doc}\n\n`tritium::{op.name}{op.schema}`\n\n"
        text += f"```python\n{inspect.getsource(op.reference).strip()}\n```\n\n"
        names = ["inductor", "reference", *catalogue.providers(op)]
        text += f"Providers: {', '.join(f'`{name}`' for name in names)}.\n"
    return text


def passes() -> str:
    import tritium

    text = "# Passes\n\nIn the order in which a backend with the default configuration runs them.\n"
    for entry in tritium.Backend().all_passes():
        doc = inspect.getdoc(inspect.getmodule(entry.run)) or inspect.getdoc(entry.run) or ""
        headline, _, rest = doc.partition("\n\n")
        body = f"```\n{rest.strip()}\n```" if rest.strip().startswith("Before:") else rest.strip()
        text += f"\n## {entry.name}\n\n{headline}\n\n{body}\n"
    return text


def techniques() -> str:
    from tritium import techniques as catalogue

    text = "# Techniques\n\nOne file or folder each in `src/tritium/techniques`; this page is generated from them. A technique is set for all parts that can have "
    text += "it by `Plan(<name>=...)`, and for one part by `Choice(<name>=...)`. [A technique](../extending.md#a-technique) says how to add one.\n"
    for technique in catalogue.catalog().values():
        hints = typing.get_type_hints(technique.config)
        fields = [
            [
                f"`{field.name}`",
                values(hints[field.name]),
                "" if field.default is dataclasses.MISSING else f"`{field.default!r}`",
            ]
            for field in dataclasses.fields(technique.config)
        ]
        text += f"\n## {technique.name}\n\n{inspect.getdoc(sys.modules[technique.config.__module__])}\n\n"
        text += f"`{technique.config.__name__}`: {inspect.getdoc(technique.config)}\n\n"
        text += table(["field", "values", "default"], fields) + "\n" if fields else ""
        facts = {
            "without a setting": "not applied" if technique.default is None else f"`{technique.default}`",
            "applied after": ", ".join(f"`{name}`" for name in technique.after) or "no other",
            "needs the scheduler": "yes" if technique.needs_scheduler else "no",
        }
        text += table(["", ""], [[name, value] for name, value in facts.items()])
    return text


def values(hint) -> str:
    """The values that a field takes."""
    if typing.get_origin(hint) is typing.Literal:
        return ", ".join(f"`{value!r}`" for value in typing.get_args(hint))
    return f"`{getattr(hint, '__name__', hint)}`".replace("|", "or")


def errors() -> str:
    from tritium import errors as module

    text = f"# Errors\n\nEverything Tritium raises on purpose:\n\n```\n{error_tree(module.TritiumError)}```\n"
    return text + "\n::: tritium.errors\n    options:\n      show_root_heading: false\n"


def error_tree(error, indent: str = "") -> str:
    """An error and those derived from it, each with its other bases and its meaning."""
    others = [base.__name__ for base in error.__bases__[1:]]
    name = f"{indent}{error.__name__}" + (f" ({', '.join(others)})" if others else "")
    line = f"{name:44}{inspect.getdoc(error).splitlines()[0]}\n"
    return line + "".join(error_tree(child, indent + "    ") for child in error.__subclasses__())


# Pages of the Python reference: title, introduction, and the folders and modules whose public names it has.
API = {
    "pipelines": (
        "Whole pipelines",
        "`optimize` and its settings. [Whole pipelines](../../optimize.md) is the guide.",
        ("api", "example", "pipelines", "techniques"),
    ),
    "layers": (
        "Layers",
        "Functions and modules for models that are written by hand. [Layers](../../layers.md) is the guide.",
        ("layers",),
    ),
    "plugins": (
        "Plug-ins",
        "The values that extend Tritium from outside. [Your own ops, passes and fusions](../../extending.md) is the guide.",
        (),
    ),
    "models": (
        "Models and reports",
        "Compile a single model, and read what was done. Errors have [a separate page](../errors.md).",
        (),
    ),
}


def public() -> dict[str, str]:
    """Map each public name to the object that mkdocstrings documents, by its full path."""
    import tritium

    found = {}
    for holder in (tritium, tritium.layers, tritium.plugins):
        for name in holder.__all__:
            value = getattr(holder, name)
            path = value.__name__ if inspect.ismodule(value) else f"{value.__module__}.{value.__qualname__}"
            if value not in (tritium.errors, tritium.layers, tritium.plugins):
                found[f"{holder.__name__}.{name}"] = path
    return found


def api() -> dict[str, str]:
    """The pages of the Python reference: every public name once, by the folder that defines it."""
    pages = {page: f"# {title}\n\n{about}\n" for page, (title, about, _) in API.items()}
    for name, path in public().items():
        folder = path.split(".")[1]
        page = next((page for page, (_, _, folders) in API.items() if folder in folders), "models")
        page = "plugins" if name.startswith("tritium.plugins.") else page
        pages[page] += (
            f"\n::: {path}\n    options:\n      heading: {name}\n      toc_label: {name.rpartition('.')[2]}\n"
        )
    return {f"api/{page}.md": text for page, text in pages.items()}


def owned_providers() -> str:
    from tritium import fusions as fusion_catalogue
    from tritium import ops as op_catalogue

    rows = []
    for fusion in fusion_catalogue.catalog().values():
        owned = {} if fusion.replacement is None else op_catalogue.providers(fusion.replacement)
        chosen = fusion.replacement is not None and fusion.replacement.trial is not None
        how = "where measured faster" if chosen else "where pinned"
        on_cpu = [name for name in owned if name == "aten" and fusion.name in ("cat_linear", "rope")]
        on_gpu = list(owned)
        cells = [f"{', '.join(names)}, {how}; else Inductor" if names else "Inductor" for names in (on_cpu, on_gpu)]
        link = f"[`{fusion.name}`](fusions/{fusion.name}.md)"
        rows.append([f"`{fusion.families[0]}`", link, how_found(fusion), *cells])
    return table(["family", "fusion", "spellings", "CPU", "NVIDIA GPU"], rows)


# Ops that are matrix products: bytes say little about their floor.
PRODUCTS = ("cat_linear", "linear_gelu", "wide_attention")


def kernels() -> str:
    """Every measured choice, from the shipped tables alone."""
    from tritium import device
    from tritium.tuning import tables

    text = "# Kernels and choices\n\nWhat was measured, and what follows from it, from the tables that ship with the package; "
    text += "[choosing by measuring](../performance.md#how-a-provider-is-chosen) says how. A *block* is what the op stands between "
    text += "in a model, compiled with each provider; *alone* is the op without neighbours. Bytes are the fewest that must move, "
    text += "inputs once and results once, and the share is what copying that much would take at the device's copy bandwidth. "
    text += "*In context* is the site's time on the device inside the block, and the host column is what its launches cost more "
    text += "than those of Inductor's code. Rows marked *loop* compare with a kernel of Inductor that loops over the row; they are "
    text += "left out where Inductor holds rows of that length in registers, as it does on the H200.\n"
    for path in sorted(tables.SHIPPED.glob("*.json")):
        name = tables.load(path).machine.name
        bandwidth = device.copy_bandwidth(device.Device("", name))
        about = f", {bandwidth / 1e12:.1f} TB/s copy" if bandwidth else ""
        text += f"\n## {name}{about}\n\n"
        rows = [kernel_row(verdict, bandwidth) for verdict in tables.load(path).rows.values() if verdict.in_block]
        text += table(
            [
                "op",
                "shape",
                "dtype",
                "chosen",
                "block, ms: Inductor's / owned",
                "ratio",
                "in context, us",
                "host, us",
                "MB",
                "alone, us",
                "of copy",
            ],
            rows,
        )
    text += "\n## Reductions\n\nRows that generated kernels hold in registers although Inductor would walk over them, and rows that they leave "
    text += "whole although Inductor would cut them; [tiling](../tiling.md) says more.\n\n"
    rows = []
    for content in map(tables.load, sorted(tables.SHIPPED.glob("*.json"))):
        limits = content.reductions
        if limits is None:
            continue
        held = "; ".join(
            f"up to {limit.elements:,} elements with {limit.reads} loads" for limit in limits.persistent_up_to
        )
        rows.append([content.machine.name, held, f"up to {limits.whole_up_to:,} elements", limits.versions["torch"]])
    return text + table(["device", "held in registers", "left whole", "measured with torch"], rows)


def kernel_row(verdict, bandwidth: float | None) -> list[str]:
    order = ["inductor", *(name for name in verdict.ms if name != "inductor")]
    alone = [verdict.alone_us[name] for name in order if name in verdict.alone_us]
    share = ""
    costs = verdict.site().costs
    if bandwidth and verdict.key.op not in PRODUCTS:
        share = " / ".join(f"{verdict.bytes / bandwidth / us * 1e6:.0%}" for us in alone)
    return [
        f"`{verdict.key.op}`",
        verdict.key.shape,
        verdict.key.dtype,
        f"`{verdict.provider}`" + (", loop" if verdict.looped else ""),
        " / ".join(f"{verdict.ms[name]:.3f}" for name in order),
        f"{verdict.ratio:.2f}" if len(order) > 1 else "",
        " / ".join(f"{costs[name].device_us:.1f}" for name in order),
        " / ".join(f"{costs[name].host_us - costs['inductor'].host_us:+.1f}" for name in order[1:]),
        f"{verdict.bytes / 1e6:.1f}",
        " / ".join(f"{us:.1f}" for us in alone),
        share,
    ]


def census() -> dict[str, dict[str, dict]]:
    """Model by family: sites that are there, recognised, declined and why. Written by `tests/census/compare.py`."""
    return json.loads((ROOT / "docs" / "census.json").read_text(encoding="utf-8"))


def models() -> str:
    """The models and their sites, from the stored census."""
    found = census()
    families = list(dict.fromkeys(family for counts in found.values() for family in counts))
    rows = [[f"`{name}`", *(cell(counts.get(family)) for family in families)] for name, counts in found.items()]
    return table(["model", *(f"`{family}`" for family in families)], rows)


def cell(counts: dict | None) -> str:
    if counts is None:
        return ""
    truth, recognised, declined = counts["truth"], counts["recognised"], counts["declined"]
    if recognised + declined != truth:
        return f"{recognised + declined} found of {truth}"
    return f"{truth} ({declined} declined)" if declined else str(truth)


def support() -> str:
    text = "# Support matrix\n\nPython 3.11 to 3.13, torch 2.11 to 2.15 "
    text += "(newer versions are used too; hooks they lack are declined).\n\n## Models\n\n"
    text += (
        "Sites of tiny configurations of the stock models, each counted twice: on the graphs by operators and source "
    )
    text += "lines, and by the report. A number alone: all were recognised.\n\n" + models()
    reasons = [
        [f"`{name}`", f"`{family}`", str(number), reason]
        for name, families in census().items()
        for family, counts in families.items()
        for reason, number in counts["reasons"].items()
    ]
    if reasons:
        text += "\n## Declined\n\n" + table(["model", "family", "sites", "why"], reasons)
    return text + "\n## Fusions\n\n" + owned_providers()


def folders() -> str:
    """The folders and modules of the package in the order in which they may import, each with its docstring's first line."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"][
        "contracts"
    ]
    layers = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    lines = []
    for module in (name for layer in reversed(layers) for name in layer.split(" | ")):
        path = ROOT / "src" / module.replace(".", "/")
        name, file = (
            (f"{path.name}/", path / "__init__.py") if path.is_dir() else (f"{path.name}.py", path.with_suffix(".py"))
        )
        doc = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
        lines.append(f"{name:14}{doc.partition(chr(10))[0]}")
    return "```\n" + "\n".join(lines) + "\n```\n"


# The text that stands for `<!-- generated: NAME -->` in a page.
PARTS: dict[str, Callable[[], str]] = {
    "folders": folders,
    "front": measured.front,
    "gains": measured.gains,
    "measured models": measured.measured,
    "dynamic kernels": measured.dynamic_kernels,
    "families": measured.families,
    "families summary": measured.families_summary,
    "pipeline": measured.pipeline,
    "quantized": measured.quantized,
    "producers": measured.producers,
    "long pipeline": measured.long_pipeline,
}
PAGES = tuple(
    ROOT / name
    for name in (
        "README.md",
        "docs/performance.md",
        "docs/quantization.md",
        "docs/skipping.md",
        "benchmarks/NOTES.md",
        "docs/architecture.md",
    )
)


def filled(text: str) -> str:
    """A page with its generated parts as they should be."""

    def fill(match: re.Match[str]) -> str:
        if match["name"] not in PARTS:
            raise SystemExit(f"there is no generated part {match['name']!r}; valid: {', '.join(PARTS)}")
        return f"{match['begin']}\n{PARTS[match['name']]()}\n{match['end']}"

    pattern = r"(?P<begin><!-- generated: (?P<name>[^>]*?) -->\n).*?(?P<end><!-- end -->)"
    return re.sub(pattern, fill, text, flags=re.DOTALL)


def main() -> int:
    from tritium.fusions import catalog

    current = {path: path.read_text(encoding="utf-8") if path.is_file() else "" for path in (*PAGES, PICTURE)}
    wanted = {path: filled(text) for path, text in current.items()} | {PICTURE: picture.speed_against_quality()}
    if "--check" in sys.argv:
        stale = [path.name for path, text in wanted.items() if text != current[path]]
        if stale:
            print(f"{', '.join(stale)}: not current, run python docs/generate.py")
        return 1 if stale else 0
    for path, text in wanted.items():
        path.write_text(text, encoding="utf-8")
    pages = {
        f"{page.__name__}.md": page() for page in (configuration, ops, kernels, passes, techniques, errors, support)
    }
    pages["fusions/index.md"] = fusions()
    pages |= {f"fusions/{fusion.name}.md": fusion_page(fusion) for fusion in catalog().values()}
    pages |= api()
    # What a fusion that is gone left behind would still be built.
    shutil.rmtree(REFERENCE, ignore_errors=True)
    for name, text in pages.items():
        (REFERENCE / name).parent.mkdir(parents=True, exist_ok=True)
        (REFERENCE / name).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
