"""The script that measures quantization: its parts, what it continues, and its table."""

from __future__ import annotations

import dataclasses
import subprocess
import types

import pytest
import torch

from support import scripts
from support.bench import ROW
from tritium.bench.results import Results
from tritium.bench.settings import Settings

pytest.importorskip("diffusers")

import quantized_kernels


@pytest.fixture(scope="module")
def program():
    return scripts.load("benchmarks/quantize_session.py")


@pytest.fixture
def children(monkeypatch, program):
    """Replaces child processes: each writes one row, or fails if its part is in the list."""
    failing, started = [], []

    def fake(command, env, check, timeout, stdout, stderr):
        section, _, part = command[command.index("--child") + 1].partition(":")
        started.append(f"{section}:{part}")
        if f"{section}:{part}" in failing:
            return subprocess.CompletedProcess(command, 1)
        out = program.Path(command[command.index("--out") + 1])
        row = dataclasses.replace(ROW, workload=f"{section} {part}", remark=None, commit="0")
        Results.now([row], "cpu").save(out / f"{section}-{part}.json")
        return subprocess.CompletedProcess(command, 0)

    # Not of the module itself: rows name the commit, which git tells.
    monkeypatch.setattr(program, "subprocess", types.SimpleNamespace(**{**vars(subprocess), "run": fake}))
    return failing, started


def test_all_parts_run_once(program, children, tmp_path, capsys):
    _, started = children
    assert program.main(["--out", str(tmp_path), "--jobs", "1"]) == program.DONE
    assert len(started) == len(set(started)) == 2 + len(program.MODELS) + sum(program.PARTS.values())
    assert "models flux" in capsys.readouterr().out
    started.clear()
    assert program.main(["--out", str(tmp_path)]) == program.DONE
    assert not started


def test_a_failed_part_is_named_and_run_again(program, children, tmp_path, capsys):
    failing, started = children
    failing.append("models:wan")
    assert program.main(["--out", str(tmp_path), "--only", "models", "--jobs", "1"]) == program.FAILED
    assert "models-wan.json: FAILED" in capsys.readouterr().out
    failing.clear()
    started.clear()
    assert program.main(["--out", str(tmp_path), "--only", "models"]) == program.DONE
    assert started == ["models:wan"]


def test_without_time_it_asks_for_another_call(program, children, tmp_path):
    assert program.main(["--out", str(tmp_path), "--limit", "1", "--only", "models"]) == program.LEFT_OVER


def test_an_unknown_section(program, tmp_path):
    with pytest.raises(SystemExit):
        program.main(["--out", str(tmp_path), "--only", "everything"])


def test_every_case_belongs_to_one_part(program):
    for section, parts in program.PARTS.items():
        makers = program.makers_of(section, small=False)
        assert 1 <= parts <= len(makers)


def test_a_case_is_measured_and_compared(monkeypatch):
    """Variants that cannot run here, as Triton kernels, are named in the remark."""
    settings = Settings(seconds=0.01, device_type="cpu")
    monkeypatch.setattr(quantized_kernels, "_compiled", lambda function: function)
    maker = quantized_kernels.producers(small=True)[2]
    rows = quantized_kernels.measure_case(maker(settings), settings, lambda _: None)
    assert {row.variant for row in rows} == {"16 bits", "8 bits Inductor"}
    assert all(row.relative_l2 < 0.05 for row in rows)
    assert "8 bits Triton failed" in rows[0].remark
    (product,) = quantized_kernels.products(small=True)
    rows = quantized_kernels.measure_case(product(settings), settings, lambda _: None)
    assert {"bf16 cuBLAS"} <= {row.variant for row in rows}
    assert torch.isfinite(torch.tensor([row.median_ms for row in rows])).all()


def test_attention_is_judged_by_its_worst_head(program):
    settings = Settings(seconds=0.01, device_type="cpu")
    makers = program.makers_of("attention", small=True)
    rows = {row.variant: row for row in quantized_kernels.measure_case(makers[0](settings), settings, lambda _: None)}
    assert set(rows) == {"bf16 cuDNN", "int8"}
    assert 0.01 < rows["int8"].relative_l2 < 0.06
    assert rows["int8"].remark.startswith("worst head: normal 2")
