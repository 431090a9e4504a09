"""The script that measures everything in few calls: what it continues, skips and reports."""

from __future__ import annotations

import dataclasses
import json
import subprocess

import pytest

from support import scripts
from support.bench import ROW as A_ROW
from tritium.bench.results import Results

pytest.importorskip("diffusers")

ROW = dataclasses.replace(A_ROW, variant="eager", mode=None)


@pytest.fixture(scope="module")
def program():
    return scripts.load("benchmarks/gpu_session.py")


@pytest.fixture
def children(monkeypatch, program):
    """Replaces child processes: each takes its code, or "timeout", and the workload it was at, from this list."""
    planned, started = [], []

    def fake(command, env, check, timeout):
        step, out = command[command.index("--child") + 1], command[command.index("--out") + 1]
        started.append(step)
        code, workload = planned.pop(0) if planned else (program.DONE, "")
        if workload:
            (program.Path(out) / "now.txt").write_text(workload)
        if code == "timeout":
            raise subprocess.TimeoutExpired(command, timeout)
        return subprocess.CompletedProcess(command, code)

    monkeypatch.setattr(program.subprocess, "run", fake)
    return planned, started


def test_all_steps_run_and_the_code_says_that_all_is_done(program, children, tmp_path):
    _, started = children
    assert program.main(["--out", str(tmp_path)]) == program.DONE
    assert started == list(program.STEPS)


def test_what_is_left_over_asks_for_another_call(program, children, tmp_path, capsys):
    planned, started = children
    planned += [(program.DONE, ""), (program.LEFT_OVER, "")]
    assert program.main(["--out", str(tmp_path)]) == program.LEFT_OVER
    assert started == list(program.STEPS)
    assert "families: call again; host: done" in capsys.readouterr().out


def test_a_family_that_ends_its_process_is_skipped(program, children, tmp_path, capsys):
    planned, started = children
    planned += [(-11, "flux"), (program.DONE, "")]
    assert program.main(["--out", str(tmp_path), "--steps", "families"]) == program.FAILED
    assert started == ["families", "families"]
    assert json.loads((tmp_path / "crashed.json").read_text()) == ["flux"]
    assert "FAILED flux: its process ended with -11" in capsys.readouterr().out


def test_a_family_without_end_is_tried_in_one_more_call(program, children, tmp_path):
    planned, _ = children
    planned += [("timeout", "sdxl")]
    assert program.main(["--out", str(tmp_path), "--steps", "families"]) == program.LEFT_OVER
    assert not (tmp_path / "crashed.json").exists()
    planned += [("timeout", "sdxl"), (program.DONE, "")]
    assert program.main(["--out", str(tmp_path), "--steps", "families"]) == program.FAILED
    assert json.loads((tmp_path / "crashed.json").read_text()) == ["sdxl"]


def test_failed_variants_are_reported_until_measured_again(program, children, tmp_path, capsys):
    # A row without a commit would start git, which is replaced here.
    row = dataclasses.replace(ROW, commit="0")
    rows = [
        dataclasses.replace(row, workload=name, remark=remark)
        for name, remark in (("flux", None), ("wan", "tritium failed: X"), ("wan few tokens", None))
    ]
    rows += [dataclasses.replace(row, error_f64=1e-6), dataclasses.replace(row, variant="inductor", error_f64=1.0)]
    Results.now(rows, "cpu").save(tmp_path / "families.json")
    (tmp_path / "crashed.json").write_text(json.dumps(["ltx-512", "sdxl"]))
    assert program.main(["--out", str(tmp_path)]) == program.FAILED
    assert "FAILED wan: tritium failed: X" in capsys.readouterr().out
    assert program.main(["--out", str(tmp_path), "--again", "wan,sdxl,ltx-512"]) == program.DONE
    rows = list(Results.load(tmp_path / "families.json").rows)
    assert {row.workload for row in rows} == {"flux"}
    # torch.compile outside the bound is no failure; Tritium is.
    Results.now([*rows, dataclasses.replace(row, variant="tritium", error_f64=1.0)], "cpu").save(
        tmp_path / "families.json"
    )
    assert program.main(["--out", str(tmp_path)]) == program.FAILED
    assert json.loads((tmp_path / "crashed.json").read_text()) == []


def test_no_step_starts_without_the_time_it_needs(program, children, tmp_path):
    _, started = children
    assert program.main(["--out", str(tmp_path), "--limit", "100"]) == program.LEFT_OVER
    assert started == ["exactness", "families", "host"]


def test_an_unknown_step_is_refused(program, tmp_path, capsys):
    with pytest.raises(SystemExit):
        program.main(["--out", str(tmp_path), "--steps", "familes"])
    assert "there is no step familes; valid: exactness, families" in capsys.readouterr().err


def test_exactness_is_measured_with_few_tokens_and_summed_up(program, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TRITIUM_ENGINE", "eager")
    settings = program.settings
    monkeypatch.setattr(program, "settings", lambda step: dataclasses.replace(settings(step), cold=False))
    program.main(["--out", str(tmp_path), "--child", "exactness", "--only", "wan"])
    rows = Results.load(tmp_path / "exactness.json").rows
    assert {row.workload for row in rows} == {"wan few tokens"}
    assert all(row.error_f64 is not None for row in rows)
    program.print_summary(tmp_path)
    assert f"{len(rows)} variants compared with float64, 0 outside" in capsys.readouterr().out
