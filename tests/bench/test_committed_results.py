"""The files in benchmarks/results: each names the code that was measured, or the commit that brought it here."""

import dataclasses
import json
import re

import pytest

from support.bench import ROW
from support.scripts import ROOT
from tritium.bench import results
from tritium.bench.results import Results, Store

FILES = sorted((ROOT / "benchmarks" / "results").rglob("*.json"))
COMMIT = re.compile(r"[0-9a-f]{7,12}")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT / "benchmarks" / "results").as_posix())
def test_a_file_names_its_commit(path):
    content = json.loads(path.read_text(encoding="utf-8"))
    rows = content.get("rows", ())
    named = [row["commit"] for row in rows if row.get("commit")]
    named += [content["commit"]] if content.get("commit") else []
    older = content.get("added_in", [])
    # A `-dirty` commit cannot be checked out again.
    assert [commit for commit in (*named, *older) if not COMMIT.fullmatch(commit)] == []
    is_named = bool(content.get("commit")) or (rows and len(named) == len(rows))
    assert is_named != bool(older), "rows name their commit, or `added_in` has the commits that added them"


def test_rows_of_an_earlier_run_keep_their_commit(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "commit", lambda: "new")
    path = tmp_path / "results.json"
    old = [dataclasses.replace(ROW, workload="old"), dataclasses.replace(ROW, workload="named", commit="before")]
    dataclasses.replace(Results.now([], "cpu"), rows=tuple(old), added_in=("added",)).save(path)
    store = Store(path, "cpu")
    store.add([ROW])
    found = Results.load(path)
    assert {row.workload: row.commit for row in found.rows} == {"old": None, "named": "before", ROW.workload: "new"}
    assert found.added_in == ("added",)
    store.add([dataclasses.replace(ROW, workload="old")])
    assert Results.load(path).added_in == ()
