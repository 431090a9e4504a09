"""Both sides in processes of their own: each measures when it is its turn, and a side that fails is no endless wait."""

import pytest

import scripts
from tritium.bench.results import OURS, YARDSTICK

processes = scripts.load("benchmarks/processes.py")


def test_turns_are_taken(tmp_path):
    assert processes._turn(tmp_path) is None
    processes._give_turn(tmp_path, OURS)
    assert processes._turn(tmp_path) == OURS
    processes._give_turn(tmp_path, YARDSTICK)
    assert processes._turn(tmp_path) == YARDSTICK


def test_a_side_that_fails_ends_both(capfd):
    with pytest.raises(SystemExit, match="one of the sides failed"):
        processes.compare("no-such-workload", "dynamic")
    assert "there is no workload 'no-such-workload'" in capfd.readouterr().err


@pytest.mark.thorough
@pytest.mark.codegen
def test_a_workload_is_measured_on_both_sides():
    theirs, ours = processes.compare("vae-like", "dynamic").rows
    assert (theirs.variant, ours.variant) == (YARDSTICK, OURS)
    assert ours.ratio == pytest.approx(theirs.median_ms / ours.median_ms)
    assert theirs.ratio == 1
    assert ours.samples == processes.ROUNDS * processes.BURST
    assert ours.relative_l2 < 1e-4
