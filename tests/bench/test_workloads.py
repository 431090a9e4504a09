"""Workloads: small ones run and are the same every time, full ones have inputs, committed rows can be compared."""

from __future__ import annotations

import dataclasses
import math
import sys
from pathlib import Path

import pytest
import torch

from support.bench import is_a_share, settings
from tritium import compat
from tritium.bench import workloads
from tritium.bench.comparison import compiled, tensor_of
from tritium.bench.decoders import DECODERS, VAE_LIKE, WAN_DECODE
from tritium.bench.denoisers import DENOISERS, EXAMPLE, FAMILIES, describe
from tritium.bench.dynamic_kernels import DYNAMIC_KERNELS
from tritium.bench.models import diffusers
from tritium.bench.results import Results
from tritium.bench.workload import Normals, shapes_of
from tritium.errors import MissingExtra

WORKLOADS = [workload for found in workloads.WORKLOADS.values() for workload in found]
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


@pytest.fixture(autouse=True)
def _needs_diffusers():
    pytest.importorskip("diffusers")


def by_name(chosen):
    return pytest.mark.parametrize("workload", chosen, ids=[workload.name for workload in chosen])


@by_name([*WORKLOADS, *(family for family in FAMILIES if family.name not in workloads.WORKLOADS)])
def test_small_workloads_run_and_are_the_same_every_time(workload):
    state = torch.random.get_rng_state()
    first = workload.build("cpu", torch.float32, small=True)
    assert torch.equal(torch.random.get_rng_state(), state)
    # The example's transformer is small by nature.
    assert first.shrunk == (workload is not EXAMPLE)
    with torch.inference_mode():
        output = tensor_of(compiled(first, "eager", settings()).call(**first.inputs), workload.name)
    # Neither vanished nor exploded, so that a relative error means something.
    assert 1e-2 < float(output.std()) < 1e2
    torch.manual_seed(1234)
    second = workload.build("cpu", torch.float32, small=True)
    if isinstance(first.model, torch.nn.Module):
        states = first.model.state_dict(), second.model.state_dict()
        for (name, before), after in zip(states[0].items(), states[1].values(), strict=True):
            assert torch.equal(before, after), name
    for name, value in first.inputs.items():
        assert not isinstance(value, torch.Tensor) or torch.equal(value, second.inputs[name])


@by_name(DENOISERS)
def test_norm_weights_are_not_ones(workload):
    model = workload.build("cpu", torch.float32, small=True).model
    weights = [value for name, value in model.named_parameters() if "norm" in name and name.endswith("weight")]
    vectors = [weight for weight in weights if weight.ndim == 1]
    # PixArt has no norm with weights.
    assert vectors or workload.name == "pixart"
    assert not any(torch.equal(weight, torch.ones_like(weight)) for weight in vectors)


def at_size(workload, size):
    """Return a model and its arguments on the meta device."""
    with torch.device("meta"):
        model = getattr(diffusers(), workload.model.class_name)(**size.config)
        return model, workload.model.arguments(model.config, size, Normals("meta", torch.float32))


@by_name([*DENOISERS, *FAMILIES])
def test_full_models_run_at_the_tokens_that_they_name(workload):
    model, inputs = at_size(workload, workload.full)
    # Lumina 2 reads the lengths of its prompts off a mask, and a meta tensor has none.
    if workload.name != "lumina2":
        with torch.device("meta"), torch.inference_mode():
            model(**inputs)
    if workload.model.class_name == "UNet2DConditionModel":
        return
    is_packed = "hidden_states" in inputs and inputs["hidden_states"].ndim == 3
    patch = 1 if is_packed else getattr(model.config, "patch_size", None) or model.config.all_patch_size[0]
    patch = patch if isinstance(patch, (tuple, list)) else (1, patch, patch)[-len(workload.full.grid) :]
    tokens = math.prod(extent // by for extent, by in zip(workload.full.grid, patch, strict=True))
    assert workload.model.tokens(workload.full) == tokens


@pytest.mark.parametrize("path", ["h200.json", "h200-graphs.json", "cpu-2-cores.json"])
def test_committed_rows_can_be_compared(path):
    """The note and the shapes of a workload are part of the key of its rows."""
    results = Results.load(RESULTS / path)
    for workload in DENOISERS:
        size = workload.small if results.device["type"] == "cpu" else workload.full
        model, inputs = at_size(workload, size)
        for row in results.rows:
            if row.workload == workload.name:
                assert row.note == describe(workload.model, model.config, size)
                assert row.shapes == shapes_of(inputs)


def test_dtypes_are_those_of_a_loaded_model():
    model = workloads.find("wan")[0].build("cpu", torch.bfloat16, small=True).model
    assert model.blocks[0].attn1.to_q.weight.dtype == torch.bfloat16
    # diffusers keeps these in float32 when it loads a checkpoint in bfloat16.
    assert model.blocks[0].scale_shift_table.dtype == torch.float32
    assert model.blocks[0].norm2.weight.dtype == torch.float32
    assert model.rope.freqs_cos.dtype != torch.bfloat16


def test_without_diffusers_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "diffusers", None)
    with pytest.raises(MissingExtra, match=r"tritium\[diffusers\]"):
        workloads.find("flux")[0].build("cpu", torch.float32, small=True)


@pytest.mark.parametrize(
    "workload",
    [
        # Wan's decoder is compared in tests/pipelines too, and takes as long as all others together.
        pytest.param(workload, id=workload.name, marks=[pytest.mark.thorough] * (workload is WAN_DECODE))
        for workload in (*DECODERS, *DYNAMIC_KERNELS)
    ],
)
def test_static_and_dynamic_sizes_agree_with_eager(workload):
    built = workload.build("cpu", torch.float32, small=True)
    eager = compiled(built, "eager", settings()).call
    for dynamic in workload.dynamic:
        torch._dynamo.reset()
        ours = compiled(built, "tritium", settings(), dynamic=dynamic)
        assert ours.parts
        with torch.inference_mode():
            inputs = built.marked() if dynamic else built.inputs
            torch.testing.assert_close(ours.call(**inputs), eager(**built.inputs))
            # The marks are on copies.
            assert not any(hasattr(value, "_dynamo_dynamic_indices") for value in built.inputs.values())
            if not dynamic or workload is WAN_DECODE:
                continue
            (name, value), *_ = built.inputs.items()
            dim = (built.dims or {name: [-1]})[name][-1]
            # The first size may have equal height and width, which Dynamo takes for one size.
            for times in (2, 3):
                before = compat.dynamo.graphs_compiled()
                larger = torch.cat([value] * times, dim=dim)
                torch.testing.assert_close(ours.call(**{name: larger}), eager(**{name: larger}))
        assert compat.dynamo.graphs_compiled() == before


def test_ten_sizes_after_two_compile_nothing():
    for workload in DECODERS:
        for small in (True, False):
            assert len({*workload.sizes(small=small), (workload.small if small else workload.full).latents}) == 13
    rows = workloads.decode_sizes(VAE_LIKE, settings(), is_a_share)
    assert {row.recompiles for row in rows} == {0}
    assert len(rows) == 2 * len(workloads.TIMED)
    for ours, own in zip(rows[::2], rows[1::2], strict=True):
        assert ours.workload == own.workload
        assert own.against_static == 1.0
        assert ours.relative_l2 < 1e-5


def test_compilations_of_further_sizes_are_counted():
    """A decoder that looks at its width compiles for both answers."""

    class Branching(torch.nn.Module):
        def forward(self, latents):
            return latents * 2 if latents.shape[-1] > 5 else latents * 3

    workload = dataclasses.replace(VAE_LIKE, make=lambda config: Branching(), dims=None)
    rows = workloads.decode_sizes(workload, settings(), is_a_share)
    assert rows[0].recompiles > 0
