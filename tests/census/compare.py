"""Print, model by model, how many sites the census counts and how many Tritium finds.

python tests/census/compare.py                        all models, float32
python tests/census/compare.py flux wan -v            two models, with the source line of every site counted and found
python tests/census/compare.py --dtype bfloat16 --dynamic --repeated-blocks
python tests/census/compare.py --write docs/census.json
"""

import argparse
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

# A virtual machine may advertise matrix units that it lacks; oneDNN reads this when torch is imported.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# As a script Python puts this folder first, where `record` and `graph` would be top-level modules.
sys.path[0] = str(Path(__file__).resolve().parent.parent)

import torch  # noqa: E402 - after the environment is right

from census.measure import FAMILIES, Configuration, Measured, measure, stored  # noqa: E402 - after the path is
from support.zoo import ZOO  # noqa: E402


def show(measured: Measured, *, verbose: bool) -> None:
    truth, found = measured.truth, measured.found
    print(f"{measured.model} ({measured.configuration}, {len(measured.graphs)} graphs)   truth found")
    for family in FAMILIES:
        mark = "  <--" if truth[family] != found[family] else ""
        if truth[family] or found[family]:
            print(f"  {family:18s} {truth[family]:5d} {found[family]:5d}{mark}")
        if verbose:
            for place in measured.places_counted(family):
                print(f"      census   {place}")
            for place in measured.places_found(family):
                print(f"      tritium  {place}")
    for site in measured.unanswered:
        print(f"  {site.family}: found nowhere near {site.line}  (node {site.node})  <--")
    for failure in measured.report.failures:
        print(f"  FAILED {failure['part']}: {failure['reason']}")
    sys.stdout.flush()


def as_json(models: dict[str, dict[str, Any]]) -> str:
    """One line a family: a change of one count is a change of one line."""
    blocks = []
    for name, families in models.items():
        lines = [f"    {json.dumps(family)}: {json.dumps(counts)}" for family, counts in families.items()]
        blocks.append(f"  {json.dumps(name)}: {{\n" + ",\n".join(lines) + "\n  }")
    return "{\n" + ",\n".join(blocks) + "\n}\n"


def main() -> int:
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"default: all of {', '.join(ZOO)}")
    parser.add_argument("-k", dest="part", default="", help="only models whose name contains this")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--dynamic", action="store_true", help="mark the size dynamic, or call with a second size")
    parser.add_argument("--repeated-blocks", action="store_true", help="compile the repeated blocks only")
    parser.add_argument("-v", "--verbose", action="store_true", help="list the sites counted and found")
    parser.add_argument("--write", type=Path, metavar="FILE", help="store the counts of all models as JSON")
    given = parser.parse_args()
    unknown = sorted(set(given.models) - set(ZOO))
    if unknown:
        parser.error(f"not in the zoo: {', '.join(unknown)}; it has {', '.join(ZOO)}")
    if given.write and (given.models or given.part or given.dynamic or given.repeated_blocks):
        parser.error("--write stores all models, whole and static")
    configuration = Configuration(getattr(torch, given.dtype), given.dynamic, given.repeated_blocks)
    names = [name for name in given.models or ZOO if given.part in name]
    done, broken = [], []
    for name in names:
        if given.repeated_blocks and not ZOO[name].repeated_blocks:
            print(f"{name}: no repeated blocks")
            continue
        try:
            done.append(measure(ZOO[name], configuration))
        except Exception:
            broken.append(name)
            traceback.print_exc()
            continue
        show(done[-1], verbose=given.verbose)
    differing = {measured.model: measured.differences for measured in done if measured.differences}
    print(f"\n{len(done)} models compared, {len(differing)} differ, {len(broken)} broken: {', '.join(broken) or '-'}")
    for name, differences in differing.items():
        print(f"  {name}: " + ", ".join(f"{family} {a} != {b}" for family, (a, b) in differences.items()))
    if given.write and not broken:
        given.write.write_text(as_json({measured.model: stored(measured) for measured in done}), encoding="utf-8")
    misplaced = any(measured.unanswered for measured in done)
    return 1 if differing or misplaced or broken else 0


if __name__ == "__main__":
    raise SystemExit(main())
