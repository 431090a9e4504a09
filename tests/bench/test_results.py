from __future__ import annotations

import dataclasses
import json

import pytest

from tritium.bench.results import Results, Row, compare
from tritium.errors import ConfigError

ROW = Row(
    workload="flux",
    variant="tritium",
    mode="default",
    dtype="float32",
    shrunk=True,
    note="2 blocks",
    shapes={"hidden_states": [1, 256, 64]},
    median_ms=100.0,
    lower_quartile_ms=99.0,
    upper_quartile_ms=102.0,
    samples=30,
    ratio=1.1,
    first_call_s=12.0,
    first_call_cold=True,
    peak_memory_bytes=None,
    relative_l2=1e-6,
    disturbed=False,
)


def results(*rows, name="a device"):
    return Results({"type": "cpu", "name": name}, {"torch": "2.13.0"}, "2026-01-01T00:00:00+00:00", rows)


def changed(**fields):
    return dataclasses.replace(ROW, **fields)


def test_round_trip(tmp_path):
    before = results(ROW, changed(variant="eager", mode=None, ratio=None, disturbed=None))
    path = tmp_path / "new folder" / "results.json"
    before.save(path)
    assert Results.load(path) == before


def test_json_has_the_machine_the_versions_and_the_date(tmp_path):
    path = tmp_path / "results.json"
    Results.now([ROW], "cpu").save(path)
    found = json.loads(path.read_text())
    assert set(found) == {"device", "versions", "date", "rows"}
    assert found["device"]["type"] == "cpu"
    assert found["versions"]["torch"]
    assert found["rows"][0]["median_ms"] == 100.0


def test_six_percent_is_a_regression_and_four_is_not():
    assert len(compare(results(ROW), results(changed(median_ms=106.0))).regressions) == 1
    assert not compare(results(ROW), results(changed(median_ms=104.0))).regressions
    assert not compare(results(ROW), results(changed(median_ms=50.0))).regressions


def test_a_slower_eager_is_drift_and_no_regression():
    eager = changed(variant="eager")
    comparison = compare(results(ROW, eager), results(ROW, dataclasses.replace(eager, median_ms=120.0)))
    assert not comparison.regressions
    assert [change.variant for change in comparison.drift] == ["eager"]


def test_a_disturbed_timing_is_named():
    assert compare(results(ROW), results(ROW)).disturbed == ()
    assert compare(results(changed(disturbed=True)), results(ROW)).disturbed == ("flux",)
    assert compare(results(ROW), results(changed(disturbed=True))).disturbed == ("flux",)


def test_rows_of_only_one_side_are_named():
    comparison = compare(results(ROW, changed(workload="wan")), results(ROW, changed(workload="sd3")))
    assert [name.split()[0] for name in comparison.unmatched] == ["wan", "sd3"]
    assert len(comparison.changes) == 1


@pytest.mark.parametrize(
    "other", [{"mode": "max-autotune"}, {"dtype": "bfloat16"}, {"shapes": {"hidden_states": [1, 64, 64]}}]
)
def test_different_things_are_not_compared(other):
    with pytest.raises(ConfigError, match="no row in common"):
        compare(results(ROW), results(changed(**other)))


def test_different_devices_are_not_compared():
    with pytest.raises(ConfigError, match="the device differs"):
        compare(results(ROW), results(ROW, name="another device"))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "it is no JSON"),
        (b"\xff\xfe\x00", "it is no JSON"),
        (b"[]", "it holds no mapping"),
        (b"{}", "it has no 'device', 'versions', 'date', 'rows'"),
        (b'{"rows": 3}', "it has no 'device'"),
        (b'{"device": [], "versions": {}, "date": "", "rows": []}', "its 'device' is no mapping"),
        (b'{"device": {}, "versions": {}, "date": "", "rows": 3}', "its 'rows' are no list"),
        (b'{"device": {}, "versions": {}, "date": "", "rows": [{}]}', "its rows do not have the fields"),
        (b'{"device": {}, "versions": {}, "date": "", "rows": [3]}', "its rows do not have the fields"),
    ],
)
def test_a_file_that_is_no_result_is_refused(tmp_path, content, reason):
    path = tmp_path / "results.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=f"is no result of `tritium bench --json`: {reason}"):
        Results.load(path)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        Results.load(tmp_path / "missing.json")
