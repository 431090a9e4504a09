"""The pipeline, compile times and host times: small runs without code generation, and what their variants are."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import tritium
from tritium.bench import compile_time, flux_pipeline, host
from tritium.bench.settings import Settings, silent
from tritium.bench.store import Clock, Store
from tritium.bench.suite import Outcome
from tritium.bench.variants import optimized, twin, twin_pipeline
from tritium.errors import TritiumError

pytest.importorskip("diffusers")

EAGER_ENGINE = tritium.CompilationConfig(engine="eager")


def settings(**fields):
    return Settings(**{"seconds": 0.0, "against": ("eager",), "cold": False, "config": EAGER_ENGINE, **fields})


def test_twins_share_weights_and_nothing_else():
    block = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3)).eval()
    copied = twin(block)
    assert copied[0] is not block[0]
    assert copied[0].weight is block[0].weight
    assert copied[1].running_mean is block[1].running_mean
    copied[0].forward = lambda x: x
    assert not torch.equal(block[0](torch.ones(1, 3)), torch.ones(1, 3))


def test_what_optimize_does_to_a_twin_is_not_seen_by_the_original():
    pipe = flux_pipeline.build(flux_pipeline.SMALL, "cpu", torch.float32)
    other = twin_pipeline(pipe, "transformer", "vae")
    assert other.scheduler is pipe.scheduler
    with optimized(other, settings()):
        calls = [p.transformer._compiled_call_impl for p in (pipe, other)]
    assert calls[0] is None
    assert calls[1] is not None


def test_the_pipeline_is_measured_size_by_size(tmp_path, monkeypatch):
    monkeypatch.setattr(flux_pipeline, "SMALL", dataclasses.replace(flux_pipeline.SMALL, sizes=(32,)))
    path = tmp_path / "pipeline.json"
    # What an earlier run has measured is not measured again.
    flux_pipeline.run((), settings(), Store(path, "cpu"), Clock(600), silent)
    store = Store(path, "cpu")
    before = store.results.rows
    assert flux_pipeline.run((), settings(), store, Clock(600), silent) == Outcome()
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


def test_sizes_without_time_are_left_to_the_next_run():
    assert flux_pipeline.run((), settings(), Store(None, "cpu"), Clock(0), silent) == Outcome(["flux pipeline 64"])


def test_torch_compile_of_the_pipeline_compiles_repeated_blocks_and_decode():
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
    monkeypatch.setattr(compile_time, "_SMALL", ((1, 1), (1, 2)))
    store = Store(None, "cpu")
    assert compile_time.run((), settings(), store, Clock(600), silent) == Outcome()
    few, many = store.results.rows
    assert (few.workload, many.workload) == ("flux 2 blocks", "flux 3 blocks")
    assert few.note == "1 double + 1 single block, width 32, 24 + 6 tokens"
    assert {row.variant for row in (few, many)} == {"tritium reuse_blocks"}
    # Engine `eager` generates no code.
    assert few.inductor_s == many.inductor_s == 0.0
    assert many.relative_l2 < 1e-5


def test_the_host_time_is_that_of_sites_which_the_provider_runs():
    store = Store(None, "cpu")
    host.run((), settings(), store, Clock(600), silent)
    alone, theirs, ours = store.results.rows
    assert [row.variant for row in (alone, theirs, ours)] == ["products alone", "eager", "tritium"]
    assert alone.host_us > 0
    assert alone.relative_l2 == 0.0
    assert ours.remark == "provider reference"
    assert ours.relative_l2 < 1e-5
    assert ours.host_us is not None


def test_a_host_time_of_sites_that_the_provider_does_not_run_is_refused():
    with pytest.raises(TritiumError, match="0 of 6 sites of residual_norm_modulate"):
        host.measure_host(settings(), silent, provider="inductor")
