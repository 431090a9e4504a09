"""Quantized files of others, each written in a few lines of numpy: their weights, and one clear error for wrong ones."""

import json

import numpy as np
import pytest
import torch

from support.checkpoints import K, N, float8, int8, random, save, scales, text
from tritium.errors import CheckpointError
from tritium.techniques.quantize import files

pytest.importorskip("safetensors")


def assert_weight(layer, expected):
    # A rotation sums 256 products in float32.
    np.testing.assert_allclose(layer.dequantized().numpy(), expected, rtol=1e-6, atol=1e-6 * np.abs(expected).max())


def fp8r():
    values, numbers = float8()
    scale, bias = scales(N), random(N)
    return {"a.weight": values, "a.weight_scale": scale, "a.bias": bias, "n.weight": random(K)}, numbers * scale[
        :, None
    ]


def modelopt():
    values, numbers = float8()
    return {"a.weight": values, "a.weight_scale": scales(), "a.input_scale": scales(seed=2)}, numbers * scales()


def lightx2v():
    return {"a.weight": int8(), "a.weight_scale": scales(N, 1)}, int8() * scales(N, 1)


def comfy_scaled():
    values, numbers = float8()
    tensors = {"a.weight": values, "a.scale_weight": scales(), "a.scale_input": np.float32([1.0])}
    return {"scaled_fp8": ("F8_E4M3", np.zeros(0, np.uint8)), **tensors}, numbers * scales()


def comfy_layers():
    values, numbers = float8()
    how = {"format": "float8_e4m3fn"}
    return {"a.weight": values, "a.weight_scale": scales(), "a.comfy_quant": text(how)}, numbers * scales()


def comfy_rotated():
    """The matrix of theirs: Kronecker powers of one with -1 across."""
    step = 1 - 2 * np.fliplr(np.eye(4))
    matrix = np.kron(np.kron(step, step), np.kron(step, step)) / 16
    values, scale = int8(N, 512), scales(N, 1)
    how = {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": 256}
    expected = ((values * scale).reshape(N, 2, 256) @ matrix).reshape(N, 512)
    return {"a.weight": values, "a.weight_scale": scale, "a.comfy_quant": text(how)}, expected


def plain():
    values, numbers = float8()
    return {"a.weight": values, "a.bias": ("F8_E4M3", np.uint8([56] * N))}, numbers


# The format, how inputs are quantized, and the format in the words of `Quantize`.
FILES = {
    fp8r: ("BFL fp8r or ModelOpt FP8", "row", "fp8"),
    modelopt: ("BFL fp8r or ModelOpt FP8", "static", "fp8"),
    lightx2v: ("BFL fp8r or ModelOpt FP8", "row", "int8"),
    comfy_scaled: ("ComfyUI scaled_fp8", "row", "fp8"),
    comfy_layers: ("ComfyUI comfy_quant", "row", "fp8"),
    comfy_rotated: ("ComfyUI comfy_quant", "row", "int8-rotated"),
    plain: ("plain float8", "none", "fp8-weights"),
}


@pytest.mark.parametrize("make", FILES, ids=lambda make: make.__name__)
def test_a_file_of_each_format(make, tmp_path):
    tensors, expected = make()
    found = files.read(save(tmp_path / "model.safetensors", tensors))
    name, inputs, format_ = FILES[make]
    layer = found.layers["a"]
    assert (found.format, list(found.layers), layer.input, layer.format) == (name, ["a"], inputs, format_)
    assert_weight(layer, expected)
    assert layer.rotate == (256 if make is comfy_rotated else 0)
    if make is fp8r:
        assert torch.equal(layer.bias, torch.from_numpy(random(N)))
        assert list(found.tensors) == ["n.weight"]
    if make is modelopt:
        assert float(layer.input_scale) == scales(seed=2)
    if make is plain:
        assert layer.bias.tolist() == [1.0] * N


def test_a_header_describes_the_layers_too(tmp_path):
    tensors, expected = comfy_layers()
    del tensors["a.comfy_quant"]
    tensors["a.pre_quant_scale"] = np.arange(1, K + 1, dtype=np.float32)
    header = {"format_version": "1.0", "layers": {"a": {"format": "float8_e4m3fn", "full_precision_matrix_mult": True}}}
    path = save(tmp_path / "m.safetensors", tensors, {"_quantization_metadata": json.dumps(header)})
    layer = files.read(path).layers["a"]
    assert layer.input == "none"
    assert_weight(layer, expected * np.arange(1, K + 1))


def test_two_elements_ask_for_products_in_full_precision(tmp_path):
    tensors, expected = comfy_scaled()
    tensors["scaled_fp8"] = ("F8_E4M3", np.zeros(2, np.uint8))
    layer = files.read(save(tmp_path / "m.safetensors", tensors)).layers["a"]
    assert layer.input == "none"
    assert_weight(layer, expected)
    tensors["scaled_fp8"], tensors["a.scale_input"] = ("F8_E4M3", np.zeros(0, np.uint8)), np.float32([0.5])
    layer = files.read(save(tmp_path / "m.safetensors", tensors)).layers["a"]
    assert (layer.input, float(layer.input_scale)) == ("static", 0.5)


def test_shards_are_one_checkpoint(tmp_path):
    tensors, expected = fp8r()
    save(tmp_path / "a.safetensors", {"a.weight": tensors["a.weight"]})
    save(tmp_path / "b.safetensors", {name: value for name, value in tensors.items() if name != "a.weight"})
    places = {name: f"{'a' if name == 'a.weight' else 'b'}.safetensors" for name in tensors}
    (tmp_path / "x.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    for path in (tmp_path, tmp_path / "x.safetensors.index.json"):
        assert_weight(files.read(path).layers["a"], expected)


def changed(make, **changes):
    """Return a file with other tensors; None removes one."""
    tensors = {**make()[0], **{name.replace("__", "."): value for name, value in changes.items()}}
    return {name: value for name, value in tensors.items() if value is not None}


WRONG = [
    (lambda: changed(fp8r, a__weight=None), "'a.weight' is missing"),
    (
        lambda: changed(fp8r, a__weight=random(N, K)),
        "'a.weight' is torch.float32, not torch.float8_e4m3fn or torch.int8",
    ),
    (lambda: changed(fp8r, a__weight=int8(1, N * K)[0]), "and the weight of a linear is"),
    (lambda: changed(fp8r, a__weight_scale=scales(N + 1)), r"'a.weight_scale' has shape \(7,\), not \(6,\)"),
    (lambda: changed(fp8r, a__weight_scale=int8(1, N)[0]), "'a.weight_scale' is torch.int8, not torch.float32"),
    (lambda: changed(fp8r, a__weight_scale=-scales(N)), "scales that are not positive numbers"),
    (lambda: changed(fp8r, a__weight_scale=scales(N) * np.float32("nan")), "scales that are not positive numbers"),
    (lambda: changed(fp8r, a__bias=random(N + 1)), r"'a.bias' has shape \(7,\)"),
    (lambda: changed(fp8r, a__weight_scale_2=scales()), "NVFP4"),
    (lambda: changed(modelopt, a__input_scale=scales(3)), r"'a.input_scale' has shape \(3,\)"),
    (lambda: changed(modelopt, a__input_scale=np.float32([0.0])), "'a.input_scale' is not positive"),
    (lambda: changed(comfy_scaled, a__scale_weight=None), "has no quantized layer"),
    (lambda: changed(comfy_scaled, scaled_fp8=("F8_E5M2", np.zeros(0, np.uint8))), "says torch.float8_e5m2"),
    (lambda: changed(comfy_layers, a__comfy_quant=text({"format": "nvfp4"})), "has the format 'nvfp4'"),
    (lambda: changed(comfy_layers, a__comfy_quant=text([1])), "has the format"),
    (lambda: changed(comfy_layers, a__comfy_quant=text("x")[:1]), "is no JSON"),
    (lambda: changed(comfy_layers, a__weight=int8()), "'a.weight' is torch.int8, and its format is float8_e4m3fn"),
    (lambda: changed(comfy_rotated, a__weight=int8(N, 100)), "in groups of 256 columns, of 100"),
    (lambda: {"a.weight": random(N, K)}, "no quantized checkpoint of a known format; these are: ComfyUI comfy_quant"),
]


@pytest.mark.parametrize(("make", "words"), WRONG)
def test_a_wrong_field_is_one_clear_error(make, words, tmp_path):
    path = save(tmp_path / "model.safetensors", make())
    with pytest.raises(CheckpointError, match=words) as error:
        files.read(path)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("make", FILES, ids=lambda make: make.__name__)
@pytest.mark.parametrize("length", [0, 4, 60, -1])
def test_a_truncated_file_is_one_clear_error(make, length, tmp_path):
    path = save(tmp_path / "model.safetensors", make()[0])
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: ") as error:
        files.read(path)
    assert "\n" not in str(error.value)


def test_files_that_are_not_there(tmp_path):
    with pytest.raises(CheckpointError, match="there is no quantized checkpoint"):
        files.read(tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="one safetensors file or index was expected, it has 0"):
        files.read(tmp_path)
    index = tmp_path / "x.safetensors.index.json"
    for content, words in (("{", "JSONDecodeError"), ("[]", "an object was expected"), ("{}", "no 'weight_map'")):
        index.write_text(content)
        with pytest.raises(CheckpointError, match=words):
            files.read(tmp_path)
    index.write_text(json.dumps({"weight_map": {"a.weight": "gone.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"gone\.safetensors"):
        files.read(tmp_path)
