from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest
import torch

import tritium
from support.bench import settings
from tritium import compat
from tritium.bench import workloads
from tritium.bench.comparison import compiled
from tritium.bench.decoders import DECODERS, VAE_LIKE, WAN_DECODE
from tritium.bench.denoisers import DENOISERS, EXAMPLE, describe
from tritium.bench.dynamic_kernels import DYNAMIC_KERNELS
from tritium.bench.models import diffusers
from tritium.bench.results import Results
from tritium.bench.settings import silent
from tritium.bench.workload import Normals, shapes_of
from tritium.errors import ConfigError, MissingExtra


def by_name(*chosen):
    return pytest.mark.parametrize("workload", chosen, ids=[workload.name for workload in chosen])


every_denoiser = by_name(*DENOISERS)
every_workload = by_name(*(workload for found in workloads.WORKLOADS.values() for workload in found))


@every_workload
def test_small_workloads_run_and_say_that_they_are_small(workload):
    pytest.importorskip("diffusers")
    built = workload.build("cpu", torch.float32, small=True)
    # The example's transformer is small by nature.
    assert built.shrunk == (workload is not EXAMPLE)
    with torch.inference_mode():
        output = compiled(built, "eager", settings()).call(**built.inputs)
    output = output[0] if isinstance(output, tuple) else output
    assert output.isfinite().all()
    # Neither vanished nor exploded, so that a relative error means something.
    assert 1e-2 < float(output.std()) < 1e2


@every_workload
def test_a_workload_is_the_same_every_time_and_leaves_the_random_state(workload):
    pytest.importorskip("diffusers")
    state = torch.random.get_rng_state()
    first = workload.build("cpu", torch.float32, small=True)
    assert torch.equal(torch.random.get_rng_state(), state)
    torch.manual_seed(1234)
    second = workload.build("cpu", torch.float32, small=True)
    if isinstance(first.model, torch.nn.Module):
        states = first.model.state_dict(), second.model.state_dict()
        for (name, before), after in zip(states[0].items(), states[1].values(), strict=True):
            assert torch.equal(before, after), name
    for name, value in first.inputs.items():
        assert not isinstance(value, torch.Tensor) or torch.equal(value, second.inputs[name])


def test_what_dynamo_gave_up_for_one_variant_is_tried_for_the_next():
    # As plain torch.compile does with Wan's decoder before torch 2.13.
    pytest.importorskip("diffusers")
    built = WAN_DECODE.build("cpu", torch.float32, small=True)
    given_up = torch._dynamo.eval_frame.skip_code
    with torch.inference_mode():
        first, second = (compiled(built, "tritium", settings()) for _ in range(2))
        given_up(type(first.parts[0]._orig_mod).forward.__code__)
        results = [side.call(**built.inputs) for side in (first, second)]
    assert torch.equal(*results)
    assert {record.function for record in tritium.explain(second.parts[0]).records} == {"WanDecoder3d.forward"}
    assert second.parts[0]._orig_mod.conv_in.weight is built.model.decoder.conv_in.weight


@every_denoiser
def test_the_full_size_has_inputs(workload):
    pytest.importorskip("diffusers")
    with torch.device("meta"):
        config = getattr(diffusers(), workload.model.class_name)(**workload.full.config).config
        inputs = workload.model.arguments(config, workload.full, Normals("meta", torch.float32))
    assert all(value.is_meta for value in inputs.values() if isinstance(value, torch.Tensor))


@every_denoiser
def test_norm_weights_are_not_ones(workload):
    pytest.importorskip("diffusers")
    model = workload.build("cpu", torch.float32, small=True).model
    weights = [value for name, value in model.named_parameters() if "norm" in name and name.endswith("weight")]
    vectors = [weight for weight in weights if weight.ndim == 1]
    # PixArt has no norm with weights.
    assert vectors or workload.name == "pixart"
    assert not any(torch.equal(weight, torch.ones_like(weight)) for weight in vectors)


@every_denoiser
@pytest.mark.parametrize("path", ["h200.json", "h200-graphs.json", "cpu-2-cores.json"])
def test_committed_rows_can_be_compared(workload, path):
    """The note and the shapes of a workload are part of the key of its rows."""
    pytest.importorskip("diffusers")
    results = Results.load(Path(__file__).parents[2] / "benchmarks" / "results" / path)
    is_small = results.device["type"] == "cpu"
    size = workload.small if is_small else workload.full
    with torch.device("meta"):
        config = getattr(diffusers(), workload.model.class_name)(**size.config).config
        inputs = workload.model.arguments(config, size, Normals("meta", torch.float32))
    for row in results.rows:
        if row.workload == workload.name:
            assert row.note == describe(workload.model, config, size)
            assert row.shapes == shapes_of(inputs)


def test_dtypes_are_those_of_a_loaded_model():
    pytest.importorskip("diffusers")
    model = workloads.find("wan")[0].build("cpu", torch.bfloat16, small=True).model
    assert model.blocks[0].attn1.to_q.weight.dtype == torch.bfloat16
    # diffusers keeps these in float32 when it loads a checkpoint in bfloat16.
    assert model.blocks[0].scale_shift_table.dtype == torch.float32
    assert model.blocks[0].norm2.weight.dtype == torch.float32
    assert model.rope.freqs_cos.dtype != torch.bfloat16


def test_an_unknown_workload_names_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'qwen-image'"):
        workloads.find("qwen_image")


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
def test_static_and_dynamic_sizes_agree_with_eager_and_dynamic_ones_are_dynamic(workload):
    pytest.importorskip("diffusers")
    built = workload.build("cpu", torch.float32, small=True)
    eager = compiled(built, "eager", settings()).call
    for dynamic in workload.dynamic:
        torch._dynamo.reset()
        ours = compiled(built, "tritium", settings(), dynamic=dynamic)
        assert ours.parts
        with torch.inference_mode():
            inputs = built.marked() if dynamic else built.inputs
            torch.testing.assert_close(ours.call(**inputs), eager(**built.inputs))
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


def test_the_marks_are_on_tensors_of_their_own():
    built = DYNAMIC_KERNELS[0].build("cpu", torch.float32, small=True)
    assert not hasattr(built.inputs["x"], "_dynamo_dynamic_indices")
    assert built.marked()["x"]._dynamo_dynamic_indices == {3, 4}


def test_a_decoder_is_compiled_inside_of_its_autoencoder():
    pytest.importorskip("diffusers")
    built = WAN_DECODE.build("cpu", torch.float32, small=True)
    compiled = []
    built.install(built.model, lambda module: compiled.append(module) or module)
    (decoder,) = compiled
    assert isinstance(decoder, type(built.model.decoder))
    assert list(decoder.parameters()) == list(built.model.decoder.parameters())


@by_name(*DECODERS)
def test_other_sizes_are_twelve_and_differ(workload):
    for small in (True, False):
        sizes = workload.sizes(small=small)
        assert len(set(sizes)) == len(sizes) == 12
        assert (workload.small if small else workload.full).latents not in sizes


def test_ten_sizes_after_two_compile_nothing():
    rows = workloads.decode_sizes(VAE_LIKE, settings(), silent)
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
    rows = workloads.decode_sizes(workload, settings(), silent)
    assert rows[0].recompiles > 0
