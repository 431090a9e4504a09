"""Write docs/reference/*.md from the catalogues, and check that the README's generated parts are current.

python docs/generate.py            writes the reference, and the README's generated parts
python docs/generate.py --check    exits 1 if the README is not what would be written
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
REFERENCE = ROOT / "docs" / "reference"


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows]) + "\n"


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

    text = "# Fusions\n\nOne file each in `src/tritium/fusions`; this page is generated from them.\n"
    for fusion in catalogue.catalog().values():
        headline, _, rest = fusion.doc.strip().partition("\n")
        text += f"\n## {fusion.name}\n\n{headline}\n\n```\n{rest.strip()}\n```\n\n"
        text += f"Families: {', '.join(f'`{family}`' for family in fusion.families)}. "
        text += f"Replaced by the op [`{fusion.replacement.name}`](ops.md#{fusion.replacement.name}).\n\nSpellings, each in any operand order:\n\n"
        for spelling in fusion.spellings:
            text += f"```python\n{inspect.getsource(spelling).strip()}\n```\n\n"
        for name in ("accept", "decline"):
            doc = inspect.getdoc(getattr(fusion, name))
            if doc:
                text += f"{name.capitalize()}: {doc}\n\n"
    return text


def ops() -> str:
    from tritium import ops as catalogue

    text = "# Ops and providers\n\nOne file each in `src/tritium/ops`; this page is generated from them.\n"
    for op in catalogue.catalog().values():
        doc = inspect.getdoc(sys.modules[op.reference.__module__]).strip()
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


def errors() -> str:
    from tritium import errors as module

    tree = inspect.getdoc(module).partition("\n\n")[2]
    return f"# Errors\n\nEverything Tritium raises on purpose:\n\n```\n{tree.strip()}\n```\n"


def support_rows() -> tuple[list[str], list[list[str]]]:
    from tritium import fusions as fusion_catalogue
    from tritium import ops as op_catalogue

    rows = []
    for fusion in fusion_catalogue.catalog().values():
        owned = op_catalogue.providers(fusion.replacement)
        rows.append(
            [
                f"`{fusion.families[0]}`",
                f"`{fusion.name}`",
                str(len(fusion.spellings)),
                "recognised, left to Inductor",
                "recognised, left to Inductor" + (f"; owned, by pin: {', '.join(owned)}" if owned else ""),
            ]
        )
    return ["family", "fusion", "canonical spellings", "CPU", "NVIDIA GPU"], rows


def support() -> str:
    header, rows = support_rows()
    versions = "Python 3.11 to 3.13, torch 2.11 to 2.13 (newer versions are used too; hooks they lack are declined)."
    return f"# Support matrix\n\n{versions}\n\n" + table(header, rows)


def measured() -> str:
    """The README's table of ratios, from committed results alone."""
    rows = []
    for file in sorted((ROOT / "benchmarks" / "results").glob("*.json")):
        found = json.loads(file.read_text(encoding="utf-8"))
        for row in found["rows"]:
            if row["variant"] != "tritium":
                continue
            rows.append(
                [
                    found["device"]["name"],
                    row["workload"],
                    row["dtype"],
                    f"{row['median_ms']:.2f} ms",
                    f"{row['ratio']:.3f}",
                    f"{row['first_call_s']:.1f} s",
                    f"`{file.name}`",
                ]
            )
    if not rows:
        return "No results have been committed yet.\n"
    return table(["device", "workload", "dtype", "median", "speed against torch.compile", "first call", "file"], rows)


def readme(text: str) -> str:
    header, rows = support_rows()
    for name, body in {"support": table(header, rows), "measured": measured()}.items():
        pattern = rf"(<!-- generated: {name} -->\n).*?(<!-- end -->)"
        if not re.search(pattern, text, re.DOTALL):
            raise SystemExit(f"README.md has no generated part {name!r}")
        text = re.sub(pattern, lambda match, body=body: f"{match[1]}\n{body}\n{match[2]}", text, flags=re.DOTALL)
    return text


def main() -> int:
    path = ROOT / "README.md"
    current = path.read_text(encoding="utf-8")
    wanted = readme(current)
    if "--check" in sys.argv:
        if wanted != current:
            print("README.md is not current: run python docs/generate.py")
            return 1
        return 0
    path.write_text(wanted, encoding="utf-8")
    REFERENCE.mkdir(parents=True, exist_ok=True)
    for page in (configuration, fusions, ops, passes, errors, support):
        (REFERENCE / f"{page.__name__}.md").write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
