"""Tables of measurements: keys, verdicts, files, and which row is found."""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from tritium import compat, ops, tuned
from tritium.tuned import Key, Verdict

KEY = Key.of("linear_gelu", {"tokens": 4096, "k": 4096, "n": 16384}, "torch.bfloat16")


def verdict(key=KEY, inductor=1.0, aten=0.8, torch=None):
    times = {"inductor": inductor, "aten": aten}
    alone = {"inductor": 700.0, "aten": 500.0}
    version = torch or compat.version_text()
    return Verdict(key, tuned.winner(times, alone), times, alone_us=alone, bytes=123, torch=version)


def test_a_key_is_its_text():
    assert KEY.shape == "tokens=4096 k=4096 n=16384"
    assert Key.of(KEY.op, KEY.sizes(), KEY.dtype) == KEY


@pytest.mark.parametrize(
    ("owned", "alone", "chosen"),
    [
        (0.5, 1000.0, "triton"),
        (0.97, 1000.0, "triton"),
        (0.971, 1000.0, "inductor"),
        # Of a block of 1 ms the op takes a tenth: 3 % of that would be noise, 1 % of the block is not.
        (0.98, 100.0, "triton"),
        (0.9901, 100.0, "inductor"),
        (1.0, 1000.0, "inductor"),
        (1.5, 10.0, "inductor"),
        # Nothing is known about the op alone: the margin is of the block.
        (0.98, None, "inductor"),
        (0.96, None, "triton"),
    ],
)
def test_ties_are_inductor_s(owned, alone, chosen):
    alone_us = {} if alone is None else {"inductor": alone, "triton": 1.0}
    assert tuned.winner({"inductor": 1.0, "triton": owned}, alone_us) == chosen


ROW = {"op": "a", "shape": "tokens=1", "dtype": "float32", "provider": "inductor", "block_ms": {"inductor": 1.0}}

# Texts of files, and what is wrong with each.
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
            {"provider": None},
            {"block_ms": None},
            {"block_ms": {}},
            {"block_ms": {"inductor": "x"}},
            {"block_ms": {"inductor": True}},
            {"block_ms": {"inductor": -1.0}},
            {"block_ms": {"inductor": float("nan")}},
            {"block_ms": {"inductor": 0, "triton": 0}},
            {"alone_us": [1]},
            {"remarks": {"a": 1}},
            {"bytes": "many"},
            {"torch": 2},
        )
    },
}


class TestFiles:
    def test_what_is_written_is_found(self, tmp_path, monkeypatch):
        monkeypatch.setattr(tuned, "user_folder", lambda: tmp_path)
        tuned.write(tmp_path / tuned.file_name("Some GPU"), "Some GPU", [verdict()])
        found, where = tuned.lookup("Some GPU", KEY)
        assert found == verdict()
        assert where == "on this machine"
        assert "1.25x against Inductor" in found.why()
        assert tuned.lookup("Another GPU", KEY) is None

    def test_a_row_replaces_the_one_before_and_leaves_the_others(self, tmp_path):
        path, other = tmp_path / "t.json", Key("rope", "tokens=1", "float32")
        tuned.write(path, "x", [verdict(), verdict(other)])
        tuned.write(path, "x", [verdict(aten=2.0)])
        assert tuned.read(path) == {KEY: verdict(aten=2.0), other: verdict(other)}
        assert json.loads(path.read_text())["device"] == "x"

    def test_rows_of_another_torch_are_not_believed(self, tmp_path, monkeypatch):
        monkeypatch.setattr(tuned, "user_folder", lambda: tmp_path)
        tuned.write(tmp_path / tuned.file_name("g"), "g", [verdict(torch="1.0")])
        assert tuned.lookup("g", KEY) is None

    @pytest.mark.parametrize("text", DAMAGED, ids=DAMAGED.values())
    def test_a_damaged_file_is_ignored_with_one_warning(self, text, tmp_path, monkeypatch):
        monkeypatch.setattr(tuned, "user_folder", lambda: tmp_path)
        path = tmp_path / tuned.file_name("g")
        path.write_text(text)
        with pytest.warns(RuntimeWarning) as told:
            assert tuned.lookup("g", KEY) is None
            assert tuned.known("g") == []
        (warning,) = told
        assert str(path) in str(warning.message)
        assert "\n" not in str(warning.message)
        tuned.write(path, "g", [verdict()])
        assert tuned.lookup("g", KEY) == (verdict(), "on this machine")

    def test_a_damaged_row_leaves_the_others(self, tmp_path, monkeypatch):
        monkeypatch.setattr(tuned, "user_folder", lambda: tmp_path)
        path = tmp_path / tuned.file_name("g")
        path.write_text(json.dumps({"rows": [None, verdict().to_dict(), {**verdict().to_dict(), "block_ms": 3}]}))
        with pytest.warns(RuntimeWarning, match="row 1: None is not an object, and 1 more"):
            assert tuned.lookup("g", KEY) == (verdict(), "on this machine")

    def test_fields_of_another_version_are_left_out(self, tmp_path):
        path = tmp_path / "t.json"
        path.write_text(json.dumps({"rows": [{**verdict().to_dict(), "of_another_version": 1}]}))
        assert tuned.read(path) == {KEY: verdict()}

    def test_writers_at_once_leave_a_whole_file(self, tmp_path):
        path = tmp_path / "t.json"
        keys = [Key("op", f"tokens={size}", "float32") for size in range(20)]
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda key: tuned.write(path, "x", [verdict(key)]), keys))
        found = tuned.read(path)
        assert found
        assert set(found) <= set(keys)
        assert list(tmp_path.iterdir()) == [path]


class TestLookup:
    @pytest.fixture(autouse=True)
    def _shipped(self, tmp_path, monkeypatch):
        monkeypatch.setattr(tuned, "SHIPPED", tmp_path / "shipped")
        rows = [verdict(self.key(tokens), aten=ms) for tokens, ms in ((512, 0.9), (4096, 0.8))]
        tuned.write(tmp_path / "shipped" / tuned.file_name("g"), "g", rows)
        tuned.forget()

    def key(self, tokens, k=64, op="linear_gelu"):
        return Key.of(op, {"tokens": tokens, "k": k}, "float32")

    def test_a_shipped_row_needs_no_measurement(self):
        found, where = tuned.lookup("g", self.key(4096))
        assert (found.block_ms["aten"], where) == (0.8, "shipped")

    @pytest.mark.parametrize(("tokens", "ms"), [(1024, 0.9), (2048, 0.8), (65536, 0.8), (32, 0.9)])
    def test_more_or_fewer_tokens_are_more_of_the_same(self, tokens, ms):
        assert tuned.lookup("g", self.key(tokens))[0].block_ms["aten"] == ms

    @pytest.mark.parametrize(
        "key", [{"tokens": 131072}, {"tokens": 16}, {"tokens": 4096, "k": 128}, {"tokens": 512, "op": "rope"}]
    )
    def test_anything_else_is_unknown(self, key):
        assert tuned.lookup("g", self.key(**key)) is None

    def test_what_this_machine_measured_comes_first(self, tmp_path, monkeypatch):
        monkeypatch.setattr(tuned, "user_folder", lambda: tmp_path)
        tuned.write(tmp_path / tuned.file_name("g"), "g", [verdict(self.key(4096), aten=3.0)])
        found, where = tuned.lookup("g", self.key(4096))
        assert (found.provider, where) == ("inductor", "on this machine")


SHIPPED = sorted(
    path for path in tuned.SHIPPED.glob("*.json") if not path.stem.startswith(("attention-", "reductions"))
)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_tables_say_what_their_numbers_say(path):
    rows = tuned.read(path)
    assert len(rows) == len(json.loads(path.read_text())["rows"]) > 0
    for key, row in rows.items():
        assert key.op in ops.catalog()
        assert row.provider == tuned.winner(row.block_ms, row.alone_us), key
        assert set(row.block_ms) <= {"inductor", *ops.providers(ops.catalog()[key.op])}
        assert row.bytes > 0
        assert row.torch


def test_nothing_is_measured_or_read_on_import():
    program = "import sys, tritium; tritium.Backend; print('tritium.compiler.tune' in sys.modules and 'triton' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False"]
