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


@pytest.mark.parametrize("linear", [None, "int8"])
def test_a_named_attention_is_used_and_removed(pipe, quantized, chosen, linear):
    before, plain = dict(pipe.transformer.attn_processors), generate(pipe)
    handle = quantized(pipe, Quantize(linear, attention="int8"))
    image = generate(pipe)
    assert set(chosen) == {"int8"}
    assert note(handle)["attention"] == {"by": "int8", "layers": 2}
    assert bool(note(handle)["formats"]) == (linear is not None)
    assert "2 attention layers by int8" in str(handle)
    assert not torch.equal(image, plain)
    assert quality.psnr(image, plain) > 25
    handle.remove()
    assert pipe.transformer.attn_processors == before
    assert torch.equal(generate(pipe), plain)


def test_auto_takes_none_that_is_slower_or_below_25_db(pipe, quantized, chosen):
    """On a CPU, rounding costs time. Scores in float8 are too far from float64."""
    plain = generate(pipe)
    quantized(pipe, Quantize(None, attention="auto"))
    torch.testing.assert_close(generate(pipe), plain, rtol=1e-4, atol=1e-4)
    assert chosen
    assert not {name for name in chosen if name in ("int8", "fp8")}


def test_a_call_that_it_cannot_compute_is_left(chosen):
    q = torch.randn(1, 7, 2, 32)
    mask = torch.ones(1, 1, 7, 7, dtype=torch.bool)
    for given, name in ((None, "int8"), (mask, "sdpa")):
        heads = q.transpose(1, 2)
        found = choose.choose(OP, OP.bind(heads, heads, heads, given, 0.2, False), "lossy:int8")
        assert found == name or (given is not None and found not in ("int8", "fp8"))


def test_an_eager_part_has_it_too(pipe, chosen):
    choice = Choice(how="eager", quantize=Quantize(None, attention="int8"))
    with optimize(pipe, Plan(components={"transformer": choice, "vae": "eager"}, progress=False)):
        generate(pipe)
    assert set(chosen) == {"int8"}
