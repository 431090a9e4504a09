"""Which linears are quantized: each one is, or has a reason why not."""

import functools

import diffusers
import pytest
import torch
from torch import nn

from support import small_pipelines
from support.zoo import ZOO
from tritium import Choice, CompilationConfig, Plan, Quantize, models, optimize
from tritium.errors import PipelineError
from tritium.techniques.quantize.selection import select
from tritium.techniques.quantize.storage import bytes_of

# Built once: a selection changes nothing.
built = functools.cache(lambda name: ZOO[name].build())

ONE_ROW = "its input is one row an image"


@pytest.fixture(scope="module")
def flux():
    return small_pipelines.flux(2, 2).transformer


def formats(selection):
    return {name: how.format for name, how in selection.chosen.items()}


@pytest.mark.parametrize("name", ZOO)
def test_every_linear_is_chosen_or_kept_with_a_reason(name):
    model = built(name)
    found = select(model, Quantize("int8"))
    linears = [path for path, inner in model.named_modules() if isinstance(inner, nn.Linear)]
    assert list(found.modules) == linears
    assert sorted([*found.chosen, *found.kept]) == sorted(linears)
    assert all(found.kept.values())


@pytest.mark.parametrize("name", [name for name in ZOO if name != "wan_decoder"])
def test_projections_of_blocks_are_chosen_in_every_family(name):
    found = select(built(name), Quantize("int8"))
    projections = [path for path in found.chosen if path.endswith(("to_q", "to_k", "to_v", "to_qkv_mlp_proj"))]
    assert projections or name == "kandinsky5"
    assert found.chosen


@pytest.mark.parametrize(
    "name",
    [
        *("flux", "lumina2", "wan"),
        *(pytest.param(name, marks=pytest.mark.thorough) for name in ("qwen_image", "sd3", "kandinsky5", "ltx")),
    ],
)
def test_the_report_names_every_linear_of_a_call(name):
    model = ZOO[name].build()
    config = CompilationConfig(engine="eager")
    with optimize(model, Plan(quantize="int8", config=config, progress=False)) as handle, torch.no_grad():
        model(**ZOO[name].inputs())
        (component,) = handle.components
        layers = component.techniques["quantize"]["layers"]
    linears = [path for path, inner in model.named_modules() if isinstance(inner, nn.Linear)]
    assert list(layers) == linears
    reasons = {layer["reason"] for layer in layers.values() if layer["precision"] is None}
    assert all(reasons)
    assert "no compiled code has called it" not in reasons
    assert any(layer["precision"] == "int8" for layer in layers.values())


def test_layers_of_one_row_are_kept(flux):
    kept = select(flux, Quantize()).kept
    assert kept["transformer_blocks.0.norm1.linear"] == ONE_ROW
    assert kept["single_transformer_blocks.0.norm.linear"] == ONE_ROW
    assert kept["time_text_embed.timestep_embedder.linear_1"] == ONE_ROW
    assert kept["norm_out.linear"] == ONE_ROW
    assert kept["proj_out"] == kept["x_embedder"] == "outside of the repeated blocks"


def test_modulations_may_store_their_weights(flux):
    found = formats(select(flux, Quantize("fp8", one_row="int8-weights")))
    assert found["transformer_blocks.0.norm1.linear"] == "int8-weights"
    assert found["single_transformer_blocks.1.norm.linear"] == "int8-weights"
    assert found["single_transformer_blocks.1.proj_mlp"] == "fp8"
    # Outside of the blocks they stay.
    assert "norm_out.linear" not in found
    assert "time_text_embed.timestep_embedder.linear_1" not in found


def test_what_a_class_keeps_in_high_precision_is_kept():
    kept = select(built("wan"), Quantize()).kept
    assert kept["condition_embedder.text_embedder.linear_1"] == "the model's class keeps it in high precision"


def test_a_family_computes_a_sensitive_layer_in_int8():
    model = built("qwen_image")
    assert models.family_of(type(model).__name__).precise
    found = select(model, Quantize("fp8")).chosen
    assert found["transformer_blocks.0.img_mlp.net.2"].format == "int8"
    assert found["transformer_blocks.0.img_mlp.net.2"].rotate
    assert found["transformer_blocks.0.img_mlp.net.0.proj"].format == "fp8"
    named = select(model, Quantize("fp8", layers={"re:.*img_mlp.*": "fp8"})).chosen
    assert named["transformer_blocks.0.img_mlp.net.2"].format == "fp8"


def test_names_and_patterns_and_their_order(flux):
    layers = {
        "re:transformer_blocks\\..*\\.to_q": "int8-weights",
        "transformer_blocks.1": "int8",
        "transformer_blocks.1.attn.to_q": None,
        "proj_out": "fp8",
    }
    found = select(flux, Quantize("fp8", layers=layers))
    chosen = formats(found)
    # A pattern matches a whole name: the single blocks' is another.
    assert chosen["transformer_blocks.0.attn.to_q"] == "int8-weights"
    assert chosen["single_transformer_blocks.0.attn.to_q"] == "fp8"
    assert chosen["transformer_blocks.1.attn.to_k"] == "int8"
    assert found.kept["transformer_blocks.1.attn.to_q"] == "layers says None"
    assert chosen["proj_out"] == "fp8"
    # A plain name is a whole one: single blocks have a proj_out as well.
    assert chosen["single_transformer_blocks.0.proj_out"] == "fp8"
    only = select(flux, Quantize(None, layers={"proj_out": "int8"}))
    assert formats(only) == {"proj_out": "int8"}
    assert only.kept["transformer_blocks.0.attn.to_q"] == "linear is None, and layers does not name it"


def test_a_named_module_stands_for_its_modulations_too(flux):
    found = select(flux, Quantize(None, layers={"transformer_blocks.0": "int8"}))
    assert "transformer_blocks.0.norm1.linear" in found.chosen
    assert all(how.few_rows for how in found.chosen.values())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("transformer_blocks.0.attn.to_p", "did you mean 'transformer_blocks.0.attn.to_"),
        ("re:to_q", r"matches no linear of FluxTransformer2DModel; patterns match full names such as"),
        ("transformer_blocks.0.norm1.norm", "has no linear"),
        ("pos_embed", "has no linear"),
    ],
)
def test_a_name_that_matches_nothing_is_an_error(flux, name, message):
    with pytest.raises(PipelineError, match=message) as raised:
        select(flux, Quantize(layers={name: "int8"}))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("by_part", [True, False])
def test_a_wrong_name_stops_optimize(pipe, by_part):
    config = Quantize(layers={"proj_uot": "int8"})
    plan = Plan(components={"transformer": Choice(quantize=config)}) if by_part else Plan(quantize=config)
    with pytest.raises(PipelineError, match=r"layers names 'proj_uot'.*'proj_out'"):
        optimize(pipe, plan)
    # The pipeline is as it was.
    optimize(pipe, Plan(progress=False)).remove()


def test_layers_of_a_denoiser_are_none_of_a_text_encoder(pipe, quantized):
    handle = quantized(pipe, Quantize("int8-weights", layers={"proj_out": "int8-weights"}))
    techniques = {component.name: component.techniques for component in handle.components}
    assert "quantize" in techniques["transformer"]
    assert "quantize" not in techniques["text_encoder_2"]


def test_a_weight_that_arrives_quantized_is_left():
    model = small_pipelines.flux(1, 1).transformer
    linear = model.transformer_blocks[0].attn.to_q
    linear.weight = nn.Parameter(linear.weight.detach().to(torch.float8_e4m3fn), requires_grad=False)
    found = select(model, Quantize(layers={"transformer_blocks.0.attn": "int8"}))
    assert found.kept["transformer_blocks.0.attn.to_q"] == "its weight is quantized already"
    assert "transformer_blocks.0.attn.to_k" in found.chosen


def test_adapters_are_not_linears_of_the_model(flux):
    peft = pytest.importorskip("peft")
    model = small_pipelines.flux(1, 1).transformer
    names = list(select(model, Quantize()).modules)
    model.add_adapter(peft.LoraConfig(r=2, target_modules=["to_q"], init_lora_weights=False))
    found = select(model, Quantize())
    assert list(found.modules) == names
    assert "transformer_blocks.0.attn.to_q" in found.chosen


@pytest.mark.parametrize(("one_row", "most"), [(None, 15.4e9), ("int8-weights", 12.2e9)])
def test_the_bytes_of_flux_with_weights_in_8_bits(one_row, most):
    """FLUX.1-dev in bfloat16, without its values: 11.9 billion parameters, 3.2 of them in layers of one row an image."""
    with torch.device("meta"):
        model = diffusers.FluxTransformer2DModel(guidance_embeds=True).to(torch.bfloat16)
    found = select(model, Quantize("fp8", keep="cpu", one_row=one_row))
    whole = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    weights = {name: found.modules[name].weight for name in found.chosen}
    stored = sum(bytes_of(weight.shape, found.chosen[name]) for name, weight in weights.items())
    original = sum(weight.numel() * weight.element_size() for weight in weights.values())
    assert 23.7e9 < whole < 23.9e9
    assert whole - original + stored <= most
