"""The benchmark of what static graphs promise, small and emulated."""

import json

import pytest

from support import scripts


@pytest.fixture(scope="module")
def benchmark():
    return scripts.load("benchmarks/static_graphs.py")


@pytest.fixture
def run(benchmark, tmp_path, monkeypatch):
    monkeypatch.setattr(benchmark.shapes, "__kwdefaults__", {**benchmark.shapes.__kwdefaults__, "sizes": SIZES})

    def run(*arguments):
        path = tmp_path / "results.json"
        code = benchmark.main([*arguments, "--device", "cpu", "--json", str(path)])
        return code, json.loads(path.read_text())

    return run


SIZES = [(96, 96), (96, 128)]


def test_the_sizes_are_all_different_to_the_transformer(benchmark):
    assert len(benchmark.SIZES) == 12
    assert len({height * width for height, width in benchmark.SIZES}) == 12


def test_many_shapes(run):
    code, found = run("shapes", "--calls", "20", "--apart")
    assert code == 0, found
    assert (found["shapes"], found["calls"], found["captures"]) == (4, 20, 4)
    assert (found["recompiles"], found["differing_results"], found["changed_inputs"]) == (0, 0, 0)
    assert found["replays"] > 20
    assert found["versions"]["torch"]
    assert "memory flat" not in found["promises"], "torch does not count a CPU's memory"


def test_guidance_in_two_calls(run):
    code, found = run("guidance", "--steps", "3")
    assert code == 0, found
    assert all(found["promises"].values())
    assert found["with_compile"]["captures"] > 0
    assert found["off"]["captures"] == 0


def test_a_broken_promise_is_an_exit_code(run, benchmark, monkeypatch, capsys):
    monkeypatch.setattr(benchmark, "guidance", lambda *given, **options: {"promises": {"fast": True, "right": False}})
    code, found = run("guidance")
    assert code == 1
    assert found["promises"]["right"] is False
    assert "BROKEN  right" in capsys.readouterr().out
