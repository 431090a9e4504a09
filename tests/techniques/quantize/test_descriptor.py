"""msModelSlim's descriptors in both variants: static, dynamic, by step, weights alone."""

import json

import numpy as np
import pytest
import torch

from support.checkpoints import STEPS, K, N, dynamic, float8, int8, random, scales, static, write
from tritium.errors import ArgumentError, ArgumentTypeError, CheckpointError
from tritium.layers.steps import TimestepManager, TimestepPolicyConfig
from tritium.techniques.quantize import files

pytest.importorskip("safetensors")


@pytest.mark.parametrize("ascend", [True, False])
@pytest.mark.parametrize("bits", [True, False])
def test_static_scales(ascend, bits, tmp_path):
    tensors, weight, bias = static()
    scale = tensors["a.deq_scale"]
    if bits:
        # float16 models: the bits of the scales in whole numbers.
        tensors["a.deq_scale"] = scale.view(np.int32).astype(np.int64)
    found = files.read(write(tmp_path, "W8A8", tensors, ascend=ascend))
    layer = found.layers["a"]
    assert (found.format, layer.input, layer.format) == ("msModelSlim W8A8", "static", "int8")
    np.testing.assert_allclose(layer.dequantized().numpy(), weight, rtol=1e-6)
    # quant_bias is rounded to whole steps of the product.
    assert np.abs(layer.bias.numpy() - bias).max() <= 0.51 * scale.max()
    assert torch.equal(layer.input_scale, torch.from_numpy(tensors["a.input_scale"]))
    assert torch.equal(layer.input_offset, torch.from_numpy(tensors["a.input_offset"]))


def test_a_bias_in_the_file_precedes_the_rounded_one(tmp_path):
    tensors, _, bias = static()
    layer = files.read(write(tmp_path, "W8A8", {**tensors, "a.bias": bias})).layers["a"]
    assert torch.equal(layer.bias, torch.from_numpy(bias))


def test_dynamic_scales_and_layers_that_stay(tmp_path):
    tensors, weight = dynamic()
    types = {"n.weight": "FLOAT", "n.bias": "FLOAT"}
    plain = {"n.weight": random(N, K), "n.bias": random(N)}
    found = files.read(write(tmp_path, "W8A8_DYNAMIC", {**tensors, **plain}, types))
    assert list(found.layers) == ["a"]
    assert found.layers["a"].input == "row"
    np.testing.assert_allclose(found.layers["a"].dequantized().numpy(), weight, rtol=1e-6)
    assert sorted(found.tensors) == ["n.bias", "n.weight"]


def test_weights_alone_with_offsets(tmp_path):
    offset = random(N, 1).round() * 3
    tensors = {**dynamic()[0], "a.weight_offset": offset}
    layer = files.read(write(tmp_path, "W8A16", tensors)).layers["a"]
    assert layer.input == "none"
    np.testing.assert_allclose(layer.dequantized().numpy(), (int8() - offset) * scales(N, 1), rtol=1e-6)


def test_float8_weights(tmp_path):
    values, numbers = float8()
    layer = files.read(write(tmp_path, "WFP8AFP8_DYNAMIC", {"a.weight": values, "a.weight_scale": scales(N, 1)})).layers
    np.testing.assert_allclose(layer["a"].dequantized().numpy(), numbers * scales(N, 1), rtol=1e-6)
    assert layer["a"].format == "fp8"


def test_scales_by_step(tmp_path):
    tensors, weight, bias = static(steps=STEPS)
    layer = files.read(write(tmp_path, "W8A8_TIMESTEP", {**tensors, "a.bias": bias})).layers["a"]
    assert (layer.input, layer.input_scale.shape, layer.input_offset.shape) == ("step", (STEPS,), (STEPS,))
    np.testing.assert_allclose(layer.dequantized().numpy(), weight, rtol=1e-6)


def test_a_factor_of_the_input_is_a_part_of_the_layer(tmp_path):
    smooth = np.arange(1, K + 1, dtype=np.float32)
    tensors, weight = dynamic("a.linear")
    types = {"a.div.mul_scale": "FLOAT"}
    found = files.read(write(tmp_path, "W8A8_DYNAMIC", {**tensors, "a.div.mul_scale": smooth}, types))
    assert list(found.layers) == ["a"]
    np.testing.assert_allclose(found.layers["a"].dequantized().numpy(), weight * smooth, rtol=1e-6)


WRONG = [
    ({"a.deq_scale": None}, {}, "'a.deq_scale' is missing"),
    ({"a.deq_scale": scales(N + 1)}, {}, r"'a.deq_scale' has shape \(7,\)"),
    ({"a.quant_bias": random(N)}, {}, "'a.quant_bias' is torch.float32, not torch.int32"),
    ({"a.input_offset": scales(2)}, {}, "are not positive scales with an offset each"),
    ({"a.input_scale": np.float32([0.0])}, {}, "are not positive scales"),
    ({"a.weight": random(N, K)}, {}, "'a.weight' is torch.float32, not torch.int8"),
    ({}, {"a.weight": "W4A4_MXFP4_SVD"}, "'a.weight' has the type 'W4A4_MXFP4_SVD'"),
    ({}, {"a.weight": "FLOAT"}, "no weight is quantized"),
    ({}, {"b.weight": "W8A8"}, "'b.weight' is missing"),
    ({}, {"model_quant_type": ""}, "it has no 'model_quant_type'"),
    ({"a.div.mul_scale": scales(K + 1)}, {"a.div.mul_scale": "FLOAT"}, "has 9 numbers for 8 columns"),
]


@pytest.mark.parametrize(("changes", "types", "words"), WRONG)
def test_a_wrong_field_is_one_clear_error(changes, types, words, tmp_path):
    tensors = {name: value for name, value in {**static()[0], **changes}.items() if value is not None}
    path = write(tmp_path, "W8A8", tensors, types)
    with pytest.raises(CheckpointError, match=words) as error:
        files.read(path)
    assert "\n" not in str(error.value)


def test_wrong_descriptors(tmp_path):
    path = write(tmp_path, "W8A8", static()[0])
    for content, words in (("{", "JSONDecodeError"), ("[]", "an object was expected"), ("{}", "no 'model_quant_type'")):
        path.write_text(content)
        with pytest.raises(CheckpointError, match=words):
            files.read(path)
    path.write_text(json.dumps({"model_quant_type": "W8A16", "a.weight": "W8A16"}))
    with pytest.raises(CheckpointError, match=r"neither quant_model_weight_w8a16\.safetensors nor"):
        files.read(path)


def test_offsets_of_weights_in_products_are_refused(tmp_path):
    tensors = {**dynamic()[0], "a.weight_offset": np.ones((N, 1), np.float32)}
    with pytest.raises(CheckpointError, match="products need symmetric weights"):
        files.read(write(tmp_path, "W8A8_DYNAMIC", tensors))


class TestSteps:
    def test_strategies(self):
        policy = TimestepPolicyConfig()
        policy.register(1, "static")
        policy.register([2, 3], "static")
        policy.register(range(3, 5), "dynamic")
        assert [policy.get_strategy(step) for step in range(5)] == ["dynamic", "static", "static", "dynamic", "dynamic"]
        assert policy.static_steps(3).tolist() == [False, True, True]
        with pytest.raises(ArgumentError, match="step 2 is registered as static, and the file has scales for 2 steps"):
            policy.static_steps(2)

    @pytest.mark.parametrize(
        ("steps", "strategy", "error", "words"),
        [
            (0, 1, ArgumentTypeError, "strategy must be a string"),
            (0, "statik", ArgumentError, "did you mean 'static'"),
            (0, "float", ArgumentError, "need the original weights"),
            ("0", "static", ArgumentTypeError, "steps are integers"),
            ([0, 1.5], "static", ArgumentTypeError, "steps are integers"),
            (-1, "static", ArgumentTypeError, "steps are integers"),
            (True, "static", ArgumentTypeError, "steps are integers"),
        ],
    )
    def test_wrong_ones(self, steps, strategy, error, words):
        with pytest.raises(error, match=words):
            TimestepPolicyConfig().register(steps, strategy)

    def test_the_number_of_the_step(self):
        TimestepManager.set_timestep_idx(3)
        assert TimestepManager.get_timestep_idx() == 3
        for wrong in (None, "1", -1, 1.0):
            with pytest.raises(ArgumentTypeError, match="a step is an integer"):
                TimestepManager.set_timestep_idx(wrong)
        assert TimestepManager.get_timestep_idx() == 3
        TimestepManager.set_timestep_idx(0)
