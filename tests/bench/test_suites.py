"""The pipeline, compile times and host times: small runs without code generation, and what their variants are."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch

from support.bench import ROW, settings
from tritium.bench import flux_pipeline, suites
from tritium.bench.results import Store
from tritium.bench.settings import silent
from tritium.bench.suite import Clock, Outcome, Suite, Task
from tritium.bench.suites import SUITES
from tritium.errors import TritiumError

pytest.importorskip("diffusers")


def test_optimizing_a_twin_leaves_the_original():
    pipe = flux_pipeline.build(flux_pipeline.SMALL, "cpu", torch.float32)
    other = flux_pipeline.compile_pipeline(pipe, "tritium optimize", settings())
    assert other.pipe.scheduler is pipe.scheduler
    with other.handle:
        calls = [p.transformer._compiled_call_impl for p in (pipe, other.pipe)]
    assert calls[0] is None
    assert calls[1] is not None


def test_the_pipeline_is_measured_size_by_size(tmp_path, monkeypatch):
    monkeypatch.setattr(flux_pipeline, "SMALL", dataclasses.replace(flux_pipeline.SMALL, sizes=(32,)))
    path = tmp_path / "pipeline.json"
    # What an earlier run has measured is not measured again.
    SUITES["pipeline"].run(settings(), Store(path, "cpu"), Clock(600), silent)
    store = Store(path, "cpu")
    before = store.results.rows
    assert SUITES["pipeline"].run(settings(), store, Clock(600), silent) == Outcome()
    assert store.results.rows == before
    assert [(row.workload, row.variant) for row in before] == [
        ("flux pipeline 32", "eager"),
        ("flux pipeline 32", "tritium optimize"),
    ]
    for row in before:
        assert row.shrunk
        # None is equality: clamped pixels of a small image may agree to the bit.
        assert row.psnr is None or (row.variant != "eager" and row.psnr > 80)
        assert row.ssim == pytest.approx(1.0)
    assert before[1].shapes == {"pixels": [1, 3, 32, 32]}
    assert "transformer: compiled" in before[1].remark
    assert before[1].remark.startswith("first image: first size of this process")


@pytest.mark.parametrize(
    ("suite", "only", "left_over"),
    [("pipeline", (), ["flux pipeline 64"]), ("families", ["pixart-512", "flux-512"], ["flux-512", "pixart-512"])],
)
def test_what_no_time_is_left_for_is_named(suite, only, left_over):
    assert SUITES[suite].run(settings(), Store(None, "cpu"), Clock(0), silent, only) == Outcome(left_over)


def test_torch_compile_covers_repeated_blocks_and_decode():
    pipe = flux_pipeline.build(flux_pipeline.SMALL, "cpu", torch.float32)
    compiled = flux_pipeline.compile_pipeline(pipe, "inductor", settings()).pipe
    assert all(block._compiled_call_impl is not None for block in compiled.transformer.transformer_blocks)
    assert hasattr(compiled.vae.decode, "_torchdynamo_orig_callable")
    assert not hasattr(pipe.vae.decode, "_torchdynamo_orig_callable")


def test_the_full_pipeline_is_that_of_flux_dev():
    with torch.device("meta"):
        pipe = flux_pipeline.build(flux_pipeline.FULL, "meta", torch.bfloat16)
    assert len(pipe.transformer.transformer_blocks) == 19
    assert len(pipe.transformer.single_transformer_blocks) == 38
    assert 11.8e9 < sum(p.numel() for p in pipe.transformer.parameters()) < 12e9
    assert pipe.vae_scale_factor == 8
    assert {p.dtype for p in pipe.vae.parameters()} == {torch.bfloat16}


def test_first_calls_of_few_and_many_blocks(monkeypatch):
    monkeypatch.setattr(suites, "SMALL_DEPTHS", ((1, 1), (1, 2)))
    store = Store(None, "cpu")
    assert SUITES["compile-time"].run(settings(), store, Clock(600), silent) == Outcome()
    few, many = store.results.rows
    assert (few.workload, many.workload) == ("flux 2 blocks", "flux 3 blocks")
    assert few.note == "1 double + 1 single block, width 32, 24 + 6 tokens"
    assert {row.variant for row in (few, many)} == {"tritium reuse_blocks"}
    # Engine `eager` generates no code.
    assert few.inductor_s == many.inductor_s == 0.0
    assert many.relative_l2 < 1e-5


def test_the_host_time_is_that_of_sites_which_the_provider_runs():
    store = Store(None, "cpu")
    SUITES["host"].run(settings(), store, Clock(600), silent)
    alone, theirs, ours = store.results.rows
    assert [row.variant for row in (alone, theirs, ours)] == ["products alone", "eager", "tritium"]
    assert alone.host_us > 0
    assert alone.relative_l2 == 0.0
    assert ours.remark == "provider reference"
    assert ours.relative_l2 < 1e-5
    assert ours.host_us is not None


def test_host_times_of_sites_of_other_providers_are_refused():
    with pytest.raises(TritiumError, match="0 of 6 sites of residual_norm_modulate"):
        suites.measure_host(settings(), Clock(600), silent, provider="inductor")


def test_a_task_that_fails_does_not_end_the_others():
    def measure(name, clock, notify):
        if name == "broken":
            raise ValueError("not today\nand more")
        return [dataclasses.replace(ROW, workload=name)]

    tasks = [Task(name, 0.0, functools.partial(measure, name)) for name in ("broken", "flux")]
    store = Store(None, "cpu")
    outcome = Suite(lambda *_: tasks).run(settings(), store, Clock(600), silent)
    assert outcome == Outcome(failed=["broken: ValueError: not today"])
    assert [row.workload for row in store.results.rows] == ["flux"]


def test_an_inner_limit_ends_no_later_than_the_outer_one():
    assert Clock(100.0).within(10.0).seconds == 10.0
    assert Clock(100.0).within(500.0).seconds <= 100.0
    assert Clock(0.0).within(10.0).left <= 0.0


def test_the_pipeline_with_skipped_steps(monkeypatch):
    monkeypatch.setattr(flux_pipeline, "SMALL", dataclasses.replace(flux_pipeline.SMALL, steps=6))
    chosen = dataclasses.replace(settings(), against=("eager",), skip="RRR1R1")
    assert set(dataclasses.replace(chosen, quantize="int8").lossy) == {
        "tritium int8",
        "tritium skip",
        "tritium int8 skip",
    }
    store = Store(None, "cpu")
    assert SUITES["pipeline"].run(chosen, store, Clock(600), silent) == Outcome()
    rows = {row.variant: row for row in store.results.rows}
    assert set(rows) == {"eager", "tritium optimize", "tritium skip"}
    assert "RRR1R1" in rows["tritium skip"].remark
    assert rows["tritium skip"].relative_l2 > rows["tritium optimize"].relative_l2
