"""Attention and sparse attention as techniques of a pipeline's parts."""

import pytest
import torch

import tritium
from support import small_pipelines
from tritium import Choice, CompilationConfig, Plan
from tritium.errors import ConfigError
from tritium.techniques.attention import Attention
from tritium.techniques.sparse import Sparse

# The tokens of a small image: 2 by 2 latent patches of 8 pixels a side are 16 tokens, after 16 of text.
SPARSE = Sparse(latent=(1, 8, 8), text=16, sparsity=0.0)


@pytest.fixture(scope="module")
def pipe():
    return small_pipelines.flux(1, 1)


def plan(**choice):
    choices = {"transformer": Choice(how="eager", **choice), "vae": "eager"}
    return Plan(config=CompilationConfig(engine="eager"), progress=False, components=choices)


def backends(pipe):
    return {
        path: vars(processor).get("_attention_backend") for path, processor in pipe.transformer.attn_processors.items()
    }


@pytest.mark.parametrize(
    ("choice", "note"),
    [
        ({"attention": "chunked"}, "attention by chunked"),
        ({"attention": True}, "attention by the fastest provider"),
        ({"sparse": SPARSE}, "sparse attention by rf_v2"),
    ],
)
def test_it_runs_is_reported_and_removed(pipe, choice, note):
    before, expected = backends(pipe), small_pipelines.generate(pipe)
    with tritium.optimize(pipe, plan(**choice)) as handle:
        assert backends(pipe) != before
        torch.testing.assert_close(small_pipelines.generate(pipe), expected, atol=1e-4, rtol=1e-4)
        assert note in str(handle)
        (part,) = (part for part in handle.report.to_dict()["components"] if part["name"] == "transformer")
        (data,) = part["techniques"].values()
        assert data["layers"] == 2
    assert backends(pipe) == before
    assert torch.equal(small_pipelines.generate(pipe), expected)


def test_compiled_attention_is_the_same(pipe):
    expected = small_pipelines.generate(pipe)
    compiled = plan().with_(components={"vae": "eager"}, attention="math")
    with tritium.optimize(pipe, compiled) as handle:
        torch.testing.assert_close(small_pipelines.generate(pipe), expected, atol=1e-4, rtol=1e-4)
        assert "as one program" in str(handle)
        assert "attention by math" in str(handle)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Attention("flsh"), "there is no attention 'flsh'"),
        (lambda: Plan(attention="flsh"), "Plan.attention: there is no attention 'flsh'"),
        (lambda: Plan(sparse=SPARSE), "cannot be compiled; give it to that part"),
        (lambda: Choice(how="eager", sparse=SPARSE, attention=True), "exclude each other"),
        (lambda: Sparse(latent=(1, 8, 8), sparsity=2), "a share from 0 to 1"),
        (lambda: Sparse(latent=(1, 8, 8), method="rf2"), "there is no method 'rf2'"),
        (lambda: Sparse(latent=(1, 8)), "latent_shape must be"),
        (lambda: Sparse(latent=(1, 8, 8), reuse_steps=0), "reuse_steps is 1 or more"),
    ],
)
def test_wrong_settings_raise_in_one_line(call, message):
    with pytest.raises(ConfigError, match=message) as raised:
        call()
    assert "\n" not in str(raised.value)


def test_parts_without_attention_say_so(pipe):
    with tritium.optimize(pipe, plan().with_(components={}, attention="chunked")) as handle:
        why = {row.name: row.what for row in handle.components}
    assert "without attention: it has no attention layers of diffusers" in why["vae.decode"]
    assert "without attention" not in why["transformer"]


def test_a_lossy_provider_runs_only_where_losses_are_allowed():
    plan = Plan(attention="sage", config=CompilationConfig(engine="eager"))
    assert plan.config.fidelity == "close"
    with pytest.raises(ConfigError, match=r"attention by 'sage' is lossy.*fidelity='close'"):
        Plan(attention="sage", config=CompilationConfig(engine="eager", fidelity="close"))
