"""The contract on weights and state: what users do to a quantized model has its effect, and `remove` undoes quantizing."""

import copy

import diffusers
import pytest
import torch

from support import small_pipelines
from support.promised import Compiles, lora_weights
from support.small_pipelines import generate
from support.states import addresses, equal, snapshot
from tritium import Quantize
from tritium.techniques.quantize.storage import StoredLinear

FORMATS = ("fp8", "int8", "int8-rotated", "int8-weights", "int4-weights")
PLACES = ("device", "cpu")
# Always: each format in one of the places.
ALWAYS = {
    ("fp8", "device"),
    ("int8", "cpu"),
    ("int8-rotated", "device"),
    ("int8-weights", "cpu"),
    ("int4-weights", "cpu"),
}
# The layers of the tiny model have 32 columns or more.
WAYS = {(format_, keep): Quantize(format_, keep=keep, group=32) for keep in PLACES for format_ in FORMATS}

every_way = pytest.mark.parametrize(
    "config",
    [
        pytest.param(config, id=", ".join(way), marks=() if way in ALWAYS else pytest.mark.thorough)
        for way, config in WAYS.items()
    ],
)
some_ways = pytest.mark.parametrize(
    "config",
    [
        pytest.param(WAYS[way], id=", ".join(way), marks=[pytest.mark.thorough] * (way == ("int8-rotated", "cpu")))
        for way in (("fp8", "device"), ("int8-rotated", "cpu"), ("int4-weights", "cpu"))
    ],
)
one_of_each = pytest.mark.parametrize(
    "config", [Quantize("int8", keep="device"), Quantize("int8", keep="cpu")], ids=["device", "cpu"]
)


@every_way
def test_the_original_is_in_the_state_dict_and_comes_back(pipe, quantized, config):
    before, where, image = snapshot(pipe.transformer), addresses(pipe.transformer), generate(pipe)
    handle = quantized(pipe, config)
    assert not torch.equal(generate(pipe), image)
    assert equal(snapshot(pipe.transformer), before)
    assert all(type(parameter) is torch.nn.Parameter for parameter in pipe.transformer.parameters())
    handle.remove()
    assert equal(snapshot(pipe.transformer), before)
    assert addresses(pipe.transformer) == where
    assert not any(isinstance(inner, StoredLinear) for inner in pipe.transformer.modules())
    assert torch.equal(generate(pipe), image)


@some_ways
def test_a_loaded_state_is_quantized(pipe, quantized, config):
    other = {name: value * 1.5 for name, value in snapshot(pipe.transformer).items()}
    quantized(pipe, config)
    before = generate(pipe)
    pipe.transformer.load_state_dict(other)
    loaded = generate(pipe)
    assert not torch.equal(loaded, before)
    assert equal(snapshot(pipe.transformer), other)
    fresh = small_pipelines.flux(1, 1)
    fresh.transformer.load_state_dict(other)
    quantized(fresh, config)
    assert torch.equal(loaded, generate(fresh))


@one_of_each
def test_it_is_saved_as_it_was_and_copies_are_independent(pipe, quantized, config, tmp_path):
    before = snapshot(pipe.transformer)
    handle = quantized(pipe, config)
    generate(pipe)
    pipe.transformer.save_pretrained(tmp_path)
    assert equal(snapshot(diffusers.FluxTransformer2DModel.from_pretrained(tmp_path)), before)
    twin = copy.deepcopy(pipe.transformer.transformer_blocks[0])
    with torch.no_grad():
        twin.attn.to_q.bias += 1
    handle.remove()
    assert equal(snapshot(pipe.transformer), before)


def test_a_shape_that_differs_is_refused(pipe, quantized):
    quantized(pipe, Quantize("int8", keep="cpu"))
    state = snapshot(pipe.transformer)
    name = "transformer_blocks.0.attn.to_q.weight"
    state[name] = state[name][:, :8]
    with pytest.raises(RuntimeError, match=f"size mismatch for {name}"):
        pipe.transformer.load_state_dict(state)


# Bytes as a weight, and bytes beside a placeholder.
@pytest.mark.parametrize(
    "format_",
    [pytest.param(name, marks=[pytest.mark.thorough] * (name not in ("int8", "int4-weights"))) for name in FORMATS],
)
def test_a_cast_keeps_the_bytes_right(pipe, quantized, format_):
    config = Quantize(format_, keep="cpu", group=32)
    quantized(pipe, config)
    pipe.transformer.to(torch.float64)
    cast = generate_in(pipe, torch.float64)
    fresh = small_pipelines.flux(1, 1)
    fresh.transformer.to(torch.float64)
    quantized(fresh, config)
    torch.testing.assert_close(cast, generate_in(fresh, torch.float64), rtol=1e-6, atol=1e-6)


def test_a_cast_to_bfloat16_reads_the_original(pipe, quantized):
    handle = quantized(pipe, Quantize("fp8", keep="cpu"))
    wanted = {name: value.to(torch.bfloat16) for name, value in snapshot(pipe.transformer).items()}
    linear = pipe.transformer.transformer_blocks[0].attn.to_q
    pipe.transformer.to(torch.bfloat16)
    assert linear.weight.dtype == torch.int8
    x = torch.randn(20, 32, dtype=torch.bfloat16)
    plain = torch.nn.functional.linear(x, wanted["transformer_blocks.0.attn.to_q.weight"], linear.bias)
    assert (linear(x) - plain).norm() < 0.08 * plain.norm()
    assert equal(snapshot(pipe.transformer), wanted)
    handle.remove()
    assert equal(snapshot(pipe.transformer), wanted)


def generate_in(pipe, dtype):
    """One call of the denoiser: the rest of the pipeline has another dtype."""
    torch.manual_seed(0)
    tokens, text = 16, 4
    with torch.no_grad():
        return pipe.transformer(
            hidden_states=torch.randn(1, tokens, 16, dtype=dtype),
            encoder_hidden_states=torch.randn(1, text, 16, dtype=dtype),
            pooled_projections=torch.randn(1, 16, dtype=dtype),
            timestep=torch.tensor([0.5], dtype=dtype),
            img_ids=torch.zeros(tokens, 3),
            txt_ids=torch.zeros(text, 3),
            return_dict=False,
        )[0]


def test_the_bytes_are_not_in_the_state_dict(pipe, quantized):
    quantized(pipe, Quantize("fp8", keep="cpu"))
    linear = pipe.transformer.transformer_blocks[0].attn.to_q
    assert linear.weight.dtype == torch.int8
    assert "weight_scale" not in "".join(pipe.transformer.state_dict())
    assert linear.weight.numel() == linear.stored.original.numel()


class TestLora:
    @pytest.fixture(autouse=True)
    def peft(self):
        pytest.importorskip("peft")

    @staticmethod
    def load(pipe):
        torch.manual_seed(1)
        pipe.load_lora_weights(lora_weights(pipe), adapter_name="one")

    @some_ways
    def test_a_fused_one_is_merged_then_quantized(self, pipe, quantized, config):
        pipe.transformer.requires_grad_(requires_grad=False)
        before = snapshot(pipe.transformer)
        quantized(pipe, config)
        plain = generate(pipe)
        self.load(pipe)
        pipe.fuse_lora()
        fused = generate(pipe)
        assert not torch.equal(fused, plain)
        fresh = small_pipelines.flux(1, 1)
        self.load(fresh)
        fresh.fuse_lora()
        quantized(fresh, config)
        assert torch.equal(fused, generate(fresh))
        pipe.unfuse_lora()
        pipe.unload_lora_weights()
        # Merging and unmerging rounds: PEFT's own difference, not quantization's.
        for name, value in snapshot(pipe.transformer).items():
            torch.testing.assert_close(value, before[name], rtol=1e-5, atol=1e-6)

    @pytest.mark.parametrize(
        "config",
        [
            pytest.param(WAYS["fp8", "device"], id="fp8, device"),
            pytest.param(WAYS["int8-rotated", "cpu"], id="int8-rotated, cpu", marks=pytest.mark.thorough),
            pytest.param(WAYS["int4-weights", "cpu"], id="int4-weights, cpu", marks=pytest.mark.thorough),
        ],
    )
    def test_one_that_is_not_fused_is_computed_beside(self, pipe, quantized, config):
        quantized(pipe, config)
        plain = generate(pipe)
        self.load(pipe)
        beside = generate(pipe)
        assert not torch.equal(beside, plain)
        fresh = small_pipelines.flux(1, 1)
        self.load(fresh)
        quantized(fresh, config)
        assert torch.equal(beside, generate(fresh))
        pipe.set_adapters("one", 0.0)
        torch.testing.assert_close(generate(pipe), plain, rtol=1e-4, atol=1e-4)

    @one_of_each
    def test_unloading_and_removing_with_one_loaded(self, pipe, quantized, config):
        before = snapshot(pipe.transformer)
        handle = quantized(pipe, config)
        plain = generate(pipe)
        self.load(pipe)
        generate(pipe)
        pipe.unload_lora_weights()
        with Compiles() as compiles:
            assert torch.equal(generate(pipe), plain)
        assert compiles.count == 0
        self.load(pipe)
        handle.remove()
        pipe.unload_lora_weights()
        assert equal(snapshot(pipe.transformer), before)
