from __future__ import annotations

import dataclasses
import json

import pytest

from support.bench import ROW
from tritium.bench.results import Results, Store, compare
from tritium.errors import ConfigError


def results(*rows, name="a device"):
    return Results({"type": "cpu", "name": name}, {"torch": "2.13.0"}, "2026-01-01T00:00:00+00:00", rows)


def changed(**fields):
    return dataclasses.replace(ROW, **fields)


def test_round_trip(tmp_path):
    before = results(ROW, changed(variant="eager", mode=None, ratio=None, disturbed=None))
    path = tmp_path / "new folder" / "results.json"
    before.save(path)
    assert Results.load(path) == before
    Results.now([ROW], "cpu").save(path)
    found = json.loads(path.read_text())
    assert set(found) == {"device", "versions", "date", "rows"}
    assert found["device"]["type"] == "cpu"
    assert found["versions"]["torch"]
    assert found["rows"][0]["median_ms"] == 10.0


@pytest.mark.parametrize(("after", "regressions"), [(10.6, 1), (10.4, 0), (5.0, 0)])
def test_six_percent_is_a_regression_and_four_is_not(after, regressions):
    eager = changed(variant="eager")
    found = compare(results(ROW, eager), results(changed(median_ms=after), eager))
    assert len(found.regressions) == regressions
    assert not found.drift


def test_a_slower_eager_is_drift_and_no_regression():
    eager = changed(variant="eager")
    found = compare(results(ROW, eager), results(ROW, dataclasses.replace(eager, median_ms=12.0)))
    assert not found.regressions
    assert [change.variant for change in found.drift] == ["eager"]


@pytest.mark.parametrize(("before", "now"), [(False, False), (True, False), (False, True)])
def test_a_disturbed_timing_is_named(before, now):
    found = compare(results(changed(disturbed=before)), results(changed(disturbed=now)))
    assert found.disturbed == ("flux",) * (before or now)


def test_rows_of_only_one_side_are_named():
    found = compare(results(ROW, changed(workload="wan")), results(ROW, changed(workload="sd3")))
    assert [name.split()[0] for name in found.unmatched] == ["wan", "sd3"]
    assert len(found.rows) == 1


@pytest.mark.parametrize(
    "other", [{"mode": "max-autotune"}, {"dtype": "bfloat16"}, {"shapes": {"hidden_states": [1, 64, 64]}}]
)
def test_different_things_are_not_compared(other):
    with pytest.raises(ConfigError, match="no row in common"):
        compare(results(ROW), results(changed(**other)))
    with pytest.raises(ConfigError, match="the device differs"):
        compare(results(ROW), results(ROW, name="another device"))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"\xff\xfe\x00", "it is no JSON"),
        (b"[]", "its keys or rows"),
        (b'{"device": [], "versions": {}, "date": "", "rows": []}', "its keys or rows"),
        (b'{"device": {}, "versions": {}, "date": "", "rows": [{}]}', "its keys or rows"),
    ],
)
def test_a_file_that_is_no_result_is_refused(tmp_path, content, reason):
    path = tmp_path / "results.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=f"is no result of `tritium bench --json`: {reason}"):
        Results.load(path)


def test_rows_of_the_same_device_and_versions_stay(tmp_path):
    path = tmp_path / "rows.json"
    Store(path, "cpu").add([ROW, changed(variant="eager")])
    again = Store(path, "cpu")
    assert again.replaced == ""
    assert again.has("flux", "float32")
    assert not again.has("flux", "bfloat16")
    again.add([changed(workload="wan")])
    again.add([changed(median_ms=2.0)])
    kept = [(row.workload, row.variant, row.median_ms) for row in Results.load(path).rows]
    assert kept == [("flux", "tritium", 2.0), ("wan", "tritium", 10.0)]


@pytest.mark.parametrize(("part", "value"), [("device", {"type": "cuda"}), ("versions", {"torch": "2.0"})])
def test_rows_of_another_machine_or_version_are_replaced(tmp_path, part, value):
    path = tmp_path / "rows.json"
    Store(path, "cpu").add([ROW])
    path.write_text(json.dumps(json.loads(path.read_text()) | {part: value}))
    store = Store(path, "cpu")
    assert f"has other {part}" in store.replaced
    assert not store.has("flux", "float32")


def test_rows_name_the_commit_they_were_measured_at(monkeypatch):
    first = Results.now([ROW], "cpu").rows[0]
    monkeypatch.setattr("tritium.bench.results.commit", lambda: "another")
    assert first.commit is not None
    assert [row.commit for row in Results.now([first, ROW], "cpu").rows] == [first.commit, "another"]
