"""Models with the layers of a quantized file: right results, steps, and nothing changed by a wrong file."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tritium
from support.checkpoints import STEPS, K, N, dynamic, float8, int8, random, save, scales, static, write
from tritium import compat
from tritium.errors import CheckpointError, ConfigError, PipelineError
from tritium.layers import TimestepManager, TimestepPolicyConfig
from tritium.techniques.quantize.files import QuantizedLinear

pytest.importorskip("safetensors")


class Model(nn.Module):
    def __init__(self, bias=True):
        super().__init__()
        self.a, self.n = nn.Linear(K, N, bias=bias), nn.LayerNorm(N)

    def forward(self, x):
        return self.n(self.a(x))


@pytest.fixture(autouse=True)
def first_step():
    yield
    TimestepManager.set_timestep_idx(0)


def loaded(path, **options):
    model = Model().requires_grad_(requires_grad=False)
    assert tritium.quantize(model, path, **options) is model
    assert type(model.a) is QuantizedLinear
    return model


def x_of(rows=40):
    return torch.from_numpy(random(rows, K, seed=7))


def decibels(found, exact):
    return float(10 * torch.log10(exact.square().sum() / (found - exact).square().sum()))


def exactly(model, x):
    """The product of the weight that the file stands for, in float64."""
    layer = model.a.stored
    bias = None if layer.bias is None else layer.bias.double()
    return F.linear(x.double(), layer.dequantized().double(), bias)


def comfy(folder):
    values, _ = float8()
    return save(folder / "m.safetensors", {"a.weight": values, "a.weight_scale": scales(N), "n.weight": random(N)})


@pytest.mark.parametrize(
    ("kind", "least"), [("W8A8", 30), ("W8A8_DYNAMIC", 36), ("W8A16", 100), ("WFP8AFP8_DYNAMIC", 25)]
)
def test_products_of_each_type_against_float64(kind, least, tmp_path):
    tensors = dynamic()[0]
    if kind == "W8A8":
        # A scale with which the inputs fit into 8 bits.
        tensors, _, _ = static(largest=float(x_of().abs().max()))
    if kind == "WFP8AFP8_DYNAMIC":
        tensors = {"a.weight": float8()[0], "a.weight_scale": scales(N, 1)}
    model = loaded(write(tmp_path, kind, tensors))
    x = x_of()
    assert decibels(model.a(x).double(), exactly(model, x)) > least
    compiled = torch.compile(model, backend=tritium.Backend(tritium.CompilationConfig(engine="eager")))
    with torch.inference_mode():
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-5)


def test_a_rotated_layer_rotates_its_input(tmp_path):
    values = int8(N, 64)
    how = b'{"format": "int8_tensorwise", "convrot": true, "convrot_groupsize": 64}'
    parts = {"a.weight": values, "a.weight_scale": scales(N, 1), "a.comfy_quant": np.frombuffer(how, np.uint8)}
    model = nn.Module()
    model.a = nn.Linear(64, N, bias=False)
    tritium.quantize(model, save(tmp_path / "m.safetensors", parts))
    x = torch.from_numpy(random(40, 64))
    assert decibels(model.a(x).double(), exactly(model, x)) > 34


def test_steps_choose_their_scales_without_recompiling(tmp_path):
    tensors, _, bias = static(steps=STEPS, largest=4.0)
    policy = TimestepPolicyConfig()
    policy.register([1, 2], "static")
    path = write(tmp_path, "W8A8_TIMESTEP", {**tensors, "a.bias": bias})
    model, x = loaded(path, timestep_config=policy), x_of()
    compiled = torch.compile(model.a, backend=tritium.Backend(tritium.CompilationConfig(engine="eager")))
    with torch.inference_mode():
        compiled(x)
        graphs = compat.dynamo.graphs_compiled()
        found = []
        for step in range(STEPS + 2):
            TimestepManager.set_timestep_idx(step)
            found.append(compiled(x).clone())
            torch.testing.assert_close(found[-1], model.a(x), rtol=1e-4, atol=1e-4)
    assert compat.dynamo.graphs_compiled() == graphs
    layer = model.a.stored
    for step, out in enumerate(found):
        rows = x.abs().amax(1, keepdim=True) / 127
        scale = layer.input_scale[step] if step in (1, 2) else rows
        offset = layer.input_offset[step] if step in (1, 2) else 0
        q = ((x / scale).round() + offset).clamp(-128, 127) - offset
        expected = F.linear((q * scale).double(), layer.dequantized().double(), layer.bias.double())
        assert decibels(out.double(), expected) > 90, step
    assert not torch.equal(found[0], found[1])
    assert not torch.equal(found[1], found[2])
    assert torch.equal(found[0], found[5])


def test_the_other_tensors_are_loaded(tmp_path):
    model = loaded(comfy(tmp_path))
    assert torch.equal(model.n.weight, torch.from_numpy(random(N)))
    # A linear whose bias is not in the file keeps its own.
    assert model.a.bias is not None
    assert model.a.weight.dtype == torch.int8


def test_a_prefix_of_the_file_is_dropped(tmp_path):
    values, _ = float8()
    tensors = {"a.weight": values, "a.weight_scale": scales(N), "n.bias": random(N)}
    named = {f"model.diffusion_model.{name}": value for name, value in tensors.items()}
    model = loaded(save(tmp_path / "m.safetensors", {**named, "vae.weight": random(3)}))
    assert torch.equal(model.n.bias, torch.from_numpy(random(N)))


def test_casts_and_state_keep_the_bytes(tmp_path):
    model, x = loaded(comfy(tmp_path)), x_of()
    before = model.a.stored.dequantized()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    model.to(torch.bfloat16)
    assert torch.equal(model.a.stored.dequantized(), before)
    assert model(x.bfloat16()).dtype == torch.bfloat16
    model.float().load_state_dict(state)
    assert torch.equal(model.a.stored.dequantized(), before)
    with pytest.raises(PipelineError, match="holds a quantized checkpoint's bytes"):
        model.load_state_dict(Model().state_dict(), strict=False)


WRONG = [
    ({"b.weight": float8()[0], "b.weight_scale": scales(N)}, "Model has no layer 'b'"),
    ({"n.weight": float8(1, N)[0], "n.weight_scale": scales(1)}, "'n' is a LayerNorm in the model"),
    (
        {"a.weight": float8(N, 7)[0], "a.weight_scale": scales(N)},
        r"weight of shape \(6, 7\), and the model's has \(6, 8\)",
    ),
    ({"a.weight": float8()[0], "a.weight_scale": scales(N), "n.wieght": random(N)}, "did you mean 'n.weight'"),
    ({"a.weight": float8()[0], "a.weight_scale": scales(N), "n.weight": random(7)}, r"'n.weight' has shape \(7,\)"),
]


@pytest.mark.parametrize(("tensors", "words"), WRONG)
def test_a_file_that_does_not_fit_changes_nothing(tensors, words, tmp_path):
    model = Model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(CheckpointError, match=words) as error:
        tritium.quantize(model, save(tmp_path / "m.safetensors", tensors))
    assert "\n" not in str(error.value)
    assert type(model.a) is nn.Linear
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_wrong_arguments(tmp_path):
    path = comfy(tmp_path)
    with pytest.raises(ConfigError, match=r"takes an nn.Module, got str; of a pipeline, pass its transformer"):
        tritium.quantize("model", path)
    with pytest.raises(ConfigError, match="timestep_config is for files with scales by step"):
        tritium.quantize(Model(), path, timestep_config=TimestepPolicyConfig())
    with pytest.raises(ConfigError, match="takes a TimestepPolicyConfig, got dict"):
        tritium.quantize(Model(), path, timestep_config={})
    values = {"a.weight": float8()[0], "a.weight_scale": scales(N), "a.bias": random(N)}
    with pytest.raises(CheckpointError, match="has a bias, and the model's linear has none"):
        tritium.quantize(Model(bias=False), save(tmp_path / "b.safetensors", values))
