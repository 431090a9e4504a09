"""Tables of measurements: keys, rows and files."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from tritium import compat, tuning
from tritium.tuning import Key, Machine, Verdict

GPU = Machine("Some GPU", "9.0", 132)

KEY = Key.of("linear_gelu", {"tokens": 4096, "k": 4096, "n": 16384}, "torch.bfloat16")


def verdict(key=KEY, inductor=1.0, aten=0.8, torch=None):
    times, alone = {"inductor": inductor, "aten": aten}, {"inductor": 700.0, "aten": 500.0}
    versions = {"torch": torch or compat.versions.version_text()}
    return Verdict(key, "aten", times, alone_us=alone, bytes=123, versions=versions)


@pytest.fixture
def path(tmp_path, monkeypatch):
    """The user's table of the GPU."""
    monkeypatch.setattr(tuning.tables, "user_folder", lambda: tmp_path)
    monkeypatch.setattr(tuning.tables, "SHIPPED", tmp_path / "nothing")
    return tmp_path / GPU.file_name


def test_a_key_is_its_text():
    assert KEY.shape == "tokens=4096 k=4096 n=16384"
    assert Key.of(KEY.op, KEY.sizes(), KEY.dtype) == KEY


def test_a_stored_row_is_loaded_for_its_device(path):
    tuning.store(path, GPU, [verdict()])
    assert tuning.known(GPU) == [verdict()]
    assert tuning.known(Machine("Another GPU")) == []
    assert tuning.load(path).machine == GPU


def test_a_row_replaces_the_one_before_and_leaves_the_others(path):
    other = Key("rope", "tokens=1", "float32")
    tuning.store(path, GPU, [verdict(), verdict(other)])
    tuning.store(path, GPU, [verdict(aten=2.0)])
    assert dict(tuning.load(path).rows) == {KEY: verdict(aten=2.0), other: verdict(other)}
    assert json.loads(path.read_text())["device"] == "Some GPU"


def test_rows_of_another_torch_are_ignored(path):
    tuning.store(path, GPU, [verdict(torch="1.0")])
    assert tuning.known(GPU) == []


def test_fields_of_another_version_are_left_out(path):
    path.write_text(json.dumps({"rows": [{**verdict().to_dict(), "of_another_version": 1}]}))
    assert dict(tuning.load(path).rows) == {KEY: verdict()}


def test_writers_at_once_leave_a_whole_file(path):
    keys = [Key("op", f"tokens={size}", "float32") for size in range(20)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda key: tuning.store(path, GPU, [verdict(key)]), keys))
    found = dict(tuning.load(path).rows)
    assert found
    assert set(found) <= set(keys)
    assert list(path.parent.iterdir()) == [path]


ROW = {"op": "a", "shape": "tokens=1", "dtype": "float32", "provider": "inductor", "ms": {"inductor": 1.0}}

DAMAGED_ROWS = [
    {"ms": {}},
    {"ms": {"inductor": -1.0}},
    {"ms": {"inductor": float("nan")}},
    {"ms": {"inductor": 0, "triton": 0}},
    {"launches": {"inductor": {"kernels": 1}}},
    {"looped": 1},
]
DAMAGED = [
    *("", "\x00{{", "null", "[" * 200_000, '{"rows": null}', '{"rows": [null]}', '{"rows": [{}]}'),
    *('{"rows": [], "reductions": 1}', '{"rows": [], "reductions": {"persistent_up_to": [{"reads": 3}]}}'),
]


class TestDamage:
    @pytest.mark.parametrize(
        "text",
        [*DAMAGED, *(json.dumps({"rows": [{**ROW, **change}]}) for change in DAMAGED_ROWS)],
        ids=lambda t: t[:90],
    )
    def test_a_damaged_file_is_ignored_with_one_warning(self, text, path):
        path.write_text(text)
        with pytest.warns(RuntimeWarning) as told:
            assert tuning.known(GPU) == []
            # What a compilation reads.
            assert tuning.decide(GPU, KEY, ["aten"], tuning.ReductionLimits()).provider == "inductor"
        (warning,) = [one for one in told if "damaged" in str(one.message)]
        assert str(path) in str(warning.message)
        assert "\n" not in str(warning.message)
        tuning.store(path, GPU, [verdict()])
        assert tuning.known(GPU) == [verdict()]

    @pytest.mark.parametrize(
        "change",
        [
            {"ms": {"inductor": 1e12, "aten": 1e-300}, "alone_us": {"inductor": 1e-300, "aten": 1e12}},
            {"shape": "tokens=4096 k=4096 n=0"},
            {"shape": "tokens=4096 k=4096+4096 n=16384"},
            {"shape": "tokens=x k= n"},
            {"launches": {"aten": {"owned": 10**15}}},
        ],
        ids=str,
    )
    def test_odd_rows_decide_without_an_error(self, change, path):
        path.write_text(json.dumps({"rows": [{**verdict().to_dict(), **change}]}))
        for key in (KEY, Key.of(KEY.op, {**KEY.sizes(), "tokens": 1024}, KEY.dtype), tuning.known(GPU)[0].key):
            decision = tuning.decide(GPU, key, ["aten"], tuning.ReductionLimits())
            assert decision.provider in ("inductor", "aten")
            assert decision.why
