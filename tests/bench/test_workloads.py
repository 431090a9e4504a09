from __future__ import annotations

import sys

import pytest
import torch

from tritium.bench import workloads
from tritium.errors import ConfigError, MissingExtra

every_workload = pytest.mark.parametrize("workload", workloads.WORKLOADS.values(), ids=workloads.WORKLOADS)


@every_workload
def test_small_workloads_run_and_say_that_they_are_small(workload):
    pytest.importorskip("diffusers")
    built = workload.build("cpu", torch.float32, small=True)
    assert built.shrunk
    with torch.inference_mode():
        output = built.model(**built.inputs)[0]
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
    for (name, before), after in zip(first.model.state_dict().items(), second.model.state_dict().values(), strict=True):
        assert torch.equal(before, after), name
    assert torch.equal(first.inputs["hidden_states"], second.inputs["hidden_states"])


@every_workload
def test_norm_weights_are_not_ones(workload):
    pytest.importorskip("diffusers")
    model = workload.build("cpu", torch.float32, small=True).model
    weights = [value for name, value in model.named_parameters() if "norm" in name and name.endswith("weight")]
    vectors = [weight for weight in weights if weight.ndim == 1]
    # PixArt has no norm with weights.
    assert vectors or workload.name == "pixart"
    assert not any(torch.equal(weight, torch.ones_like(weight)) for weight in vectors)


@every_workload
def test_the_note_names_the_tokens_of_the_full_size(workload):
    pytest.importorskip("diffusers")
    with torch.device("meta"):
        config = getattr(workloads._diffusers(), workload.class_name)(**workload.full.config).config
    patch = config.patch_size if workload.name in ("wan", "sd3", "pixart") else 1
    tokens = 1
    for place, extent in enumerate(workload.full.grid):
        tokens *= extent // (patch[place] if isinstance(patch, (tuple, list)) else patch)
    width = config.num_attention_heads * config.attention_head_dim
    assert f"width {width}" in workload.full.note
    assert f"{tokens} + {workload.full.text} tokens" in workload.full.note


def test_dtypes_are_those_of_a_loaded_model():
    pytest.importorskip("diffusers")
    model = workloads.WAN.build("cpu", torch.bfloat16, small=True).model
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
        workloads.FLUX.build("cpu", torch.float32, small=True)
