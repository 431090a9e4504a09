"""Quantize while diffusers loads a model, and folders in torchao's layout that are written and read without torchao."""

import importlib
import json

import pytest
import torch
from typer.testing import CliRunner

import tritium
from tritium.cli.app import app
from tritium.errors import CheckpointError, ConfigError, PipelineError
from tritium.ops.quantize_rows import FP8, INT8, quantize_weight
from tritium.techniques.quantize import files
from tritium.techniques.quantize.files import QuantizedLinear, writing

diffusers = pytest.importorskip("diffusers")
pytest.importorskip("safetensors")
small_pipelines = importlib.import_module("support.small_pipelines")

LAYER = "transformer_blocks.0.attn.to_q"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("pipeline")
    small_pipelines.flux(double=1, single=1).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def original(folder):
    return diffusers.FluxTransformer2DModel.from_pretrained(folder / "transformer")


def invoke(*arguments):
    return CliRunner().invoke(app, ["quantize", *map(str, arguments)])


def model(folder, **config):
    chosen = tritium.QuantizationConfig(**config)
    return diffusers.FluxTransformer2DModel.from_pretrained(folder / "transformer", quantization_config=chosen)


@pytest.mark.parametrize(("format_", "dtype"), [("fp8", FP8), ("int8", INT8), ("int8-weights", INT8)])
def test_linears_are_quantized_while_a_model_is_loaded(format_, dtype, folder, original):
    loaded = model(folder, linear=format_)
    found = {name: linear for name, linear in loaded.named_modules() if isinstance(linear, QuantizedLinear)}
    assert len(found) == 17
    for name, linear in found.items():
        values, scale = quantize_weight(original.get_submodule(name).weight, dtype)
        stored = linear.stored
        assert torch.equal(stored.values.view(torch.uint8), values.view(torch.uint8)), name
        assert torch.equal(stored.scale, scale)
        assert torch.equal(linear.bias, original.get_submodule(name).bias)
        assert stored.format == format_
    assert not any(parameter.is_meta for parameter in loaded.parameters())
    assert type(loaded.proj_out) is torch.nn.Linear
    # No unquantized weight of these layers is left.
    kept = {name for name, value in loaded.named_parameters() if value.is_floating_point() and value.dim() == 2}
    assert not kept & {f"{name}.weight" for name in found}


def test_a_model_that_was_loaded_so_generates(folder):
    pipe = diffusers.FluxPipeline.from_pretrained(folder)
    expected = small_pipelines.generate(pipe)
    pipe.transformer = model(folder, linear="int8")
    found = small_pipelines.generate(pipe)
    assert 0 < float((found - expected).abs().max()) < 0.05
    config = tritium.CompilationConfig(engine="eager")
    with tritium.optimize(pipe, tritium.Plan(config=config, progress=False)):
        torch.testing.assert_close(small_pipelines.generate(pipe), found, rtol=0, atol=5e-3)


def test_linears_that_arrived_quantized_are_not_quantized_again(folder):
    loaded = model(folder, linear="int8", layers={"re:.*to_k": None})
    plan = tritium.Plan(config=tritium.CompilationConfig(engine="eager"), quantize="fp8", progress=False)
    with tritium.optimize(loaded, plan) as handle:
        (part,) = handle.components
        layers = part.techniques["quantize"]["layers"]
        assert layers[LAYER] == {"precision": None, "reason": "its weight is quantized already"}
        assert layers["transformer_blocks.0.attn.to_k"]["reason"] == "no compiled code has called it"


def test_layers_have_formats_of_their_own(folder):
    layers = {"proj_out": "int8-weights", "re:.*to_k": None}
    loaded = model(folder, linear="fp8", layers=layers)
    assert loaded.proj_out.stored.format == "int8-weights"
    assert loaded.get_submodule(LAYER).stored.format == "fp8"
    assert type(loaded.transformer_blocks[0].attn.to_k) is torch.nn.Linear


def test_a_config_is_the_same_after_json():
    config = tritium.QuantizationConfig("int8", layers={"proj_out": None})
    values = json.loads(json.dumps(config.to_dict()))
    assert values["quant_method"] == "tritium"
    assert tritium.QuantizationConfig.from_dict(values | {"layers": dict(values["layers"])}).quantize == config.quantize
    assert tritium.QuantizationConfig(config.quantize).quantize is config.quantize


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("int9",), "did you mean 'int8'"),
        (("int4-weights",), "models are loaded in fp8, int8, int8-weights, not in int4-weights"),
        (("auto",), "not in auto"),
        ((tritium.Quantize("int8", steps=tritium.Steps(first=1)),), "steps and static scales are for Plan"),
    ],
)
def test_wrong_configs(arguments, words):
    with pytest.raises(ConfigError, match=words):
        tritium.QuantizationConfig(*arguments)
    with pytest.raises(ConfigError, match="got both: leave out layers"):
        tritium.QuantizationConfig(tritium.Quantize(), layers={})


def test_an_unknown_layer_is_an_error_before_weights_are_read(folder):
    with pytest.raises(PipelineError, match="is no module of FluxTransformer2DModel"):
        model(folder, layers={"transformer_block.0": "int8"})


@pytest.mark.parametrize("format_", writing.FORMATS)
@pytest.mark.parametrize("shard", [10_000, 10**9])
def test_a_folder_is_written_and_read_again(format_, shard, folder, original, tmp_path, monkeypatch):
    monkeypatch.setattr(writing, "SHARD", shard)
    out = tmp_path / "out"
    done = invoke(folder, "-o", out, "--to", format_)
    assert done.exit_code == 0, done.output
    assert "transformer: 17 linears quantized, " in done.stdout
    assert {path.name for path in out.iterdir()} == {path.name for path in folder.iterdir()}
    index = out / "transformer" / "diffusion_pytorch_model.safetensors.index.json"
    assert index.is_file() == (shard < 10**9)
    found = files.read(out / "transformer")
    assert (found.format, len(found.layers)) == ("torchao", 17)
    assert {layer.format for layer in found.layers.values()} == {format_}
    values, scale = quantize_weight(original.get_submodule(LAYER).weight, writing.FORMATS[format_])
    assert torch.equal(found.layers[LAYER].dequantized(), values.float() * scale)
    config = json.loads((out / "transformer" / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == "torchao"
    loaded = diffusers.FluxTransformer2DModel.from_config(original.config)
    tritium.quantize(loaded, out / "transformer")
    assert torch.equal(loaded.proj_out.weight, original.proj_out.weight)
    assert loaded.get_submodule(LAYER).stored.format == format_


def test_the_header_is_that_of_torchao(folder, tmp_path):
    """The texts that torchao 0.18 writes for a weight of 32 columns in float32."""
    safetensors = importlib.import_module("safetensors")
    writing.write_pipeline(folder, tmp_path / "out", tritium.Quantize("int8"))
    path = tmp_path / "out" / "transformer" / "diffusion_pytorch_model.safetensors"
    with safetensors.safe_open(path, "pt") as file:
        header, names = file.metadata(), list(file.keys())
    assert json.loads(header[f"{LAYER}.weight"]) == {
        "_type": "Int8Tensor",
        "_data": {
            "act_quant_kwargs": {
                "_type": "QuantizeTensorToInt8Kwargs",
                "_data": {
                    "granularity": {"_type": "PerRow", "_data": {"dim": -1}},
                    "mapping_type": {"_type": "MappingType", "_data": "SYMMETRIC"},
                    "reduce_range": False,
                },
            },
            "reduce_range": False,
            "block_size": [1, 32],
            "dtype": {"_type": "torch.dtype", "_data": "float32"},
        },
        "_tensor_data_names": ["zero_point", "qdata", "scale"],
    }
    assert header["proj_out.weight"] == '{"_type": "Tensor"}'
    assert set(json.loads(header["tensor_names"])) == set(header) - {"tensor_names", "format"}
    assert {f"{LAYER}._weight_qdata", f"{LAYER}._weight_scale", f"{LAYER}._weight_zero_point"} <= set(names)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere", "--to", "fp8"], "there is no model 'nowhere'"),
        (["FOLDER", "--to", "fp9"], "did you mean 'fp8'"),
        (["FOLDER", "--to", "int4-weights"], "torchao's layout has fp8, int8, int8-weights, not int4-weights"),
        (["example", "--to", "fp8"], "the example is no folder: save it first"),
        (["FOLDER", "--to", '{"linear": "fp8", "layers": {"to_q": null}}'], "is no module of FluxTransformer2DModel"),
    ],
)
def test_a_wrong_request_is_one_line_and_writes_nothing(arguments, message, folder, tmp_path):
    arguments = [str(folder) if argument == "FOLDER" else argument for argument in arguments]
    done = invoke(*arguments, "-o", tmp_path / "out")
    assert done.exit_code == 2
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_what_is_there_is_not_overwritten(folder, tmp_path):
    done = invoke(folder, "-o", tmp_path, "--to", "fp8")
    assert (done.exit_code, "exists already" in done.stderr) == (2, True)
    assert invoke(folder, "-o", tmp_path / "one", "--to", "fp8").exit_code == 0
    done = invoke(tmp_path / "one", "-o", tmp_path / "two", "--to", "fp8")
    assert (done.exit_code, "is quantized already, by torchao" in done.stderr) == (2, True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one"]


def changed_header(path, change):
    """Write a file again with another header."""
    length = int.from_bytes(path.read_bytes()[:8], "little")
    header = json.loads(path.read_bytes()[8 : 8 + length])
    data = path.read_bytes()[8 + length :]
    change(header["__metadata__"])
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


WEIGHT = f"{LAYER}.weight"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda header: header.update(tensor_names="{"), "tensor_names is no JSON"),
        (lambda header: header.update(tensor_names="{}"), "tensor_names is no list of names"),
        (lambda header: header.update({WEIGHT: "null"}), "is a None; readable are weights of Float8Tensor"),
        (lambda header: header.update({WEIGHT: '{"_type": "MXTensor", "_data": {}}'}), "is a MXTensor"),
        (
            lambda header: header.update({WEIGHT: '{"_type": "Int8Tensor", "_data": {}}'}),
            "_qdata' is torch.float8_e4m3fn",
        ),
        (
            lambda header: header.update({WEIGHT: header[WEIGHT].replace("[1, 32]", "[8, 8]")}),
            "a scale for each block of",
        ),
    ],
)
def test_wrong_headers(change, words, folder, tmp_path):
    writing.write_pipeline(folder, tmp_path / "out", tritium.Quantize("fp8"))
    path = tmp_path / "out" / "transformer" / "diffusion_pytorch_model.safetensors"
    changed_header(path, change)
    with pytest.raises(CheckpointError, match=words) as error:
        files.read(path)
    assert "\n" not in str(error.value)
