"""Tables of measurements: keys, rows and files."""

import dataclasses
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from tritium import compat, tuning
from tritium.tuning import Key, Machine, Verdict

GPU = Machine("Some GPU", "9.0", 132)

KEY = Key.of("linear_gelu", {"tokens": 4096, "k": 4096, "n": 16384}, "torch.bfloat16")


def verdict(key=KEY, inductor=1.0, aten=0.8, torch=None):
    times = {"inductor": inductor, "aten": aten}
    alone = {"inductor": 700.0, "aten": 500.0}
    row = Verdict(
        key, "inductor", times, alone_us=alone, bytes=123, versions={"torch": torch or compat.versions.version_text()}
    )
    return dataclasses.replace(row, provider=row.site().choose())


def test_a_key_is_its_text():
    assert KEY.shape == "tokens=4096 k=4096 n=16384"
    assert Key.of(KEY.op, KEY.sizes(), KEY.dtype) == KEY


ROW = {"op": "a", "shape": "tokens=1", "dtype": "float32", "provider": "inductor", "ms": {"inductor": 1.0}}

# Texts of files, and the damage of each.
DAMAGED = {
    "": "empty",
    "{": "cut off",
    "\x00{{": "not JSON",
    "null": "null",
    "[]": "a list",
    "3": "a number",
    "[" * 200_000: "deep",
    '{"rows": null}': "no rows",
    '{"rows": {}}': "rows are an object",
    '{"rows": [null]}': "a null row",
    '{"rows": ["a"]}': "a string for a row",
    '{"rows": [{}]}': "an empty row",
    **{
        json.dumps({"rows": [{**ROW, **change}]}): f"{next(iter(change))}: {next(iter(change.values()))}"
        for change in (
            {"op": 3},
            {"shape": None},
            {"shape": "tokens=" + "9" * 5000},
            {"ms": {"inductor": 1e300}},
            {"provider": None},
            {"ms": None},
            {"ms": {}},
            {"ms": {"inductor": "x"}},
            {"ms": {"inductor": True}},
            {"ms": {"inductor": -1.0}},
            {"ms": {"inductor": float("nan")}},
            {"ms": {"inductor": 0, "triton": 0}},
            {"alone_us": [1]},
            {"issue_us": {"inductor": "x"}},
            {"launches": 1},
            {"launches": {"inductor": 1}},
            {"launches": {"inductor": {"kernels": 1}}},
            {"launches": {"inductor": {"owned": -1}}},
            {"looped": 1},
            {"remarks": {"a": 1}},
            {"bytes": "many"},
            {"versions": {"torch": 2}},
        )
    },
}


class TestFiles:
    def test_a_stored_row_is_loaded(self, tmp_path, monkeypatch):
        monkeypatch.setattr(tuning.tables, "user_folder", lambda: tmp_path)
        tuning.store(tmp_path / tuning.Machine("Some GPU").file_name, GPU, [verdict()])
        assert tuning.known(GPU) == [verdict()]
        assert tuning.known(Machine("Another GPU")) == []
        table = tuning.load(tmp_path / tuning.Machine("Some GPU").file_name)
        assert table.machine == GPU

    def test_a_row_replaces_the_one_before_and_leaves_the_others(self, tmp_path):
        path, other = tmp_path / "t.json", Key("rope", "tokens=1", "float32")
        tuning.store(path, GPU, [verdict(), verdict(other)])
        tuning.store(path, GPU, [verdict(aten=2.0)])
        assert dict(tuning.load(path).rows) == {KEY: verdict(aten=2.0), other: verdict(other)}
        assert json.loads(path.read_text())["device"] == "Some GPU"

    def test_rows_of_another_torch_are_ignored(self, tmp_path, monkeypatch):
        monkeypatch.setattr(tuning.tables, "user_folder", lambda: tmp_path)
        tuning.store(tmp_path / tuning.Machine("g").file_name, GPU, [verdict(torch="1.0")])
        assert tuning.known(Machine("g")) == []

    @pytest.mark.parametrize("text", DAMAGED, ids=DAMAGED.values())
    def test_a_damaged_file_is_ignored_with_one_warning(self, text, tmp_path, monkeypatch):
        monkeypatch.setattr(tuning.tables, "user_folder", lambda: tmp_path)
        monkeypatch.setattr(tuning.tables, "SHIPPED", tmp_path / "nothing")
        path = tmp_path / tuning.Machine(GPU.name).file_name
        path.write_text(text)
        with pytest.warns(RuntimeWarning) as told:
            assert tuning.known(GPU) == []
            assert tuning.known(GPU) == []
            # What a compilation reads.
            assert tuning.decide(GPU, KEY, ["aten"], tuning.ReductionLimits()).provider == "inductor"
        (warning,) = [one for one in told if "damaged" in str(one.message)]
        assert str(path) in str(warning.message)
        assert "\n" not in str(warning.message)
        tuning.store(path, GPU, [verdict()])
        assert tuning.known(GPU) == [verdict()]

    def test_a_damaged_row_leaves_the_others(self, tmp_path, monkeypatch):
        monkeypatch.setattr(tuning.tables, "user_folder", lambda: tmp_path)
        path = tmp_path / tuning.Machine("g").file_name
        path.write_text(json.dumps({"rows": [None, verdict().to_dict(), {**verdict().to_dict(), "ms": 3}]}))
        with pytest.warns(RuntimeWarning, match="row 1: None is not an object, and 1 more"):
            assert tuning.known(Machine("g")) == [verdict()]

    @pytest.mark.parametrize(
        "change",
        [
            {"ms": {"inductor": 1e12, "aten": 1e-300}, "alone_us": {"inductor": 1e-300, "aten": 1e12}},
            {"ms": {"inductor": 1e-300, "aten": 1e12}, "issue_us": {"inductor": 1e12, "aten": 1e-300}},
            {"shape": "tokens=4096 k=4096 n=0"},
            {"shape": f"tokens={10**400} k=4096 n=16384"},
            {"shape": "tokens=4096 k=4096+4096 n=16384"},
            {"shape": "tokens=x k= n"},
            {"looped": {"size": "k", "reads": -1}},
            {"looped": {"size": "width", "reads": 1}},
            {"launches": {"aten": {"owned": 10**15}}},
        ],
        ids=str,
    )
    def test_odd_rows_that_are_well_formed_decide_without_an_error(self, change, tmp_path, monkeypatch):
        monkeypatch.setattr(tuning.tables, "user_folder", lambda: tmp_path)
        path = tmp_path / tuning.Machine(GPU.name).file_name
        path.write_text(json.dumps({"rows": [{**verdict().to_dict(), **change}]}))
        tuning.forget()
        assert tuning.known(GPU)
        for tokens in (1024, 4096):
            for key in (Key.of(KEY.op, {**KEY.sizes(), "tokens": tokens}, KEY.dtype), tuning.known(GPU)[0].key):
                decision = tuning.decide(GPU, key, ["aten"], tuning.ReductionLimits())
                assert decision.provider in ("inductor", "aten")
                assert decision.why

    def test_fields_of_another_version_are_left_out(self, tmp_path):
        path = tmp_path / "t.json"
        path.write_text(json.dumps({"rows": [{**verdict().to_dict(), "of_another_version": 1}]}))
        assert dict(tuning.load(path).rows) == {KEY: verdict()}

    def test_writers_at_once_leave_a_whole_file(self, tmp_path):
        path = tmp_path / "t.json"
        keys = [Key("op", f"tokens={size}", "float32") for size in range(20)]
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda key: tuning.store(path, GPU, [verdict(key)]), keys))
        found = dict(tuning.load(path).rows)
        assert found
        assert set(found) <= set(keys)
        assert list(tmp_path.iterdir()) == [path]


def test_nothing_is_measured_or_read_on_import():
    program = "import sys, tritium; tritium.Backend; print('triton' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False"]
