"""`Quantize(attention=...)`: what it computes, what it leaves as it is, and what it says."""

import pytest
import torch

from support.small_pipelines import generate
from tritium import Choice, Plan, Quantize, optimize, quality
from tritium.layers import choose
from tritium.ops.attention import OP


@pytest.fixture
def chosen(monkeypatch):
    """The providers of the calls."""
    names, original = [], choose.choose

    def choosing(*arguments):
        names.append(original(*arguments))
        return names[-1]

    monkeypatch.setattr(choose, "choose", choosing)
    return names


def note(handle):
    return next(entry for entry in handle.components if entry.name == "transformer").techniques.get("quantize")


def eager(attention):
    """A plan without compiled code."""
    choice = Choice(how="eager", quantize=Quantize(None, attention=attention))
    return Plan(components={"transformer": choice, "vae": "eager"}, progress=False)


def test_a_named_attention_is_used_and_removed(pipe, quantized, chosen):
    before, plain = dict(pipe.transformer.attn_processors), generate(pipe)
    handle = quantized(pipe, Quantize("int8", attention="int8"), components={"vae": "eager"})
    image = generate(pipe)
    assert set(chosen) == {"int8"}
    assert note(handle)["attention"] == {"by": "int8", "layers": 2}
    assert note(handle)["formats"]
    assert "2 attention layers by int8" in str(handle)
    assert not torch.equal(image, plain)
    assert quality.psnr(image, plain) > 25
    handle.remove()
    assert pipe.transformer.attn_processors == before
    assert torch.equal(generate(pipe), plain)


def test_auto_takes_none_that_is_slower(pipe, chosen):
    """On a CPU, rounding costs time."""
    plain = generate(pipe)
    with optimize(pipe, eager("auto")):
        torch.testing.assert_close(generate(pipe), plain, rtol=1e-4, atol=1e-4)
    assert chosen
    assert "int8" not in chosen


def test_a_call_that_it_cannot_compute_is_left(chosen):
    q = torch.randn(1, 7, 2, 32)
    mask = torch.ones(1, 1, 7, 7, dtype=torch.bool)
    for given, name in ((None, "int8"), (mask, "sdpa")):
        heads = q.transpose(1, 2)
        found = choose.choose(OP, OP.bind(heads, heads, heads, given, 0.2, False), "lossy:int8")
        assert found == name or (given is not None and found != "int8")


def test_attention_alone_in_an_eager_part(pipe, chosen):
    with optimize(pipe, eager("int8")) as handle:
        generate(pipe)
        assert not note(handle)["formats"]
    assert set(chosen) == {"int8"}


@pytest.mark.parametrize("dense_steps", [0, 1])
def test_sparse_attention_is_quantized_too(pipe, chosen, dense_steps):
    """Blocks are kept by `sparse`, and computed in 8 bits; dense steps are in 8 bits as well."""
    sparse = {"latent": (1, 8, 8), "text": 16, "sparsity": 0.3, "dense_steps": dense_steps, "calls_per_step": 1}

    def plan(**choice):
        return Plan(
            components={"transformer": Choice(how="eager", sparse=sparse, **choice), "vae": "eager"}, progress=False
        )

    plain = generate(pipe)
    with optimize(pipe, plan()):
        exact = generate(pipe)
    assert "int8" not in chosen
    chosen.clear()
    with optimize(pipe, plan(quantize=Quantize(None, attention="int8"))) as handle:
        image = generate(pipe)
        assert note(handle)["attention"] == {"by": "int8", "layers": 2}
        assert "sparse attention by rf_v2, density" in str(handle)
    assert set(chosen) == {"int8"}
    assert not torch.equal(image, exact)
    assert quality.psnr(image, exact) > 25
    assert torch.equal(generate(pipe), plain)
