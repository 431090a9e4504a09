"""Rows that survive a restart, and limits of time."""

from __future__ import annotations

import dataclasses
import json

import pytest

from support.result_rows import ROW
from tritium.bench.results import Results
from tritium.bench.store import Clock, Store


def test_rows_of_the_same_device_and_versions_stay(tmp_path):
    path = tmp_path / "rows.json"
    Store(path, "cpu").add([ROW, dataclasses.replace(ROW, variant="eager")])
    again = Store(path, "cpu")
    assert again.replaced == ""
    assert again.has("flux-512", "float32")
    assert not again.has("flux-512", "bfloat16")
    again.add([dataclasses.replace(ROW, workload="wan")])
    again.add([dataclasses.replace(ROW, median_ms=2.0)])
    kept = [(row.workload, row.variant, row.median_ms) for row in Results.load(path).rows]
    assert kept == [("flux-512", "tritium", 2.0), ("wan", "tritium", 1.0)]


@pytest.mark.parametrize(("part", "value"), [("device", {"type": "cuda"}), ("versions", {"torch": "2.0"})])
def test_rows_of_another_machine_or_version_are_replaced(tmp_path, part, value):
    path = tmp_path / "rows.json"
    Store(path, "cpu").add([ROW])
    path.write_text(json.dumps(json.loads(path.read_text()) | {part: value}))
    store = Store(path, "cpu")
    assert f"has other {part}" in store.replaced
    assert not store.has("flux-512", "float32")


def test_an_inner_limit_ends_no_later_than_the_outer_one():
    outer = Clock(100.0)
    assert outer.within(10.0).seconds == 10.0
    assert outer.within(500.0).seconds <= 100.0
    assert Clock(0.0).within(10.0).seconds == 0.0
    assert Clock(0.0).left <= 0.0
