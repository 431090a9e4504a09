"""Weights of linears on several ranks: results within the bound, adapters, quantization, and weights gathered again."""

import copy

import diffusers
import peft
import pytest
import torch

import tritium
from support.fidelity import assert_no_worse
from support.zoo import ZOO
from tritium import CompilationConfig, Parallel, Plan, fidelity
from tritium.errors import PipelineError

ENGINE = CompilationConfig(engine="eager")
FAMILIES = (
    *("flux", "flux2", "chroma", "qwen_image", "sd3", "pixart", "dit", "sana", "auraflow", "cogview4", "hidream"),
    *("wan", "hunyuan_video", "cogvideox", "ltx", "mochi", "cosmos", "kandinsky5"),
)


def optimized(model, ranks, how="eager", **fields):
    settings = Plan(parallel=Parallel(tensor=ranks, vae=None), config=ENGINE, progress=False, **fields)
    return tritium.optimize(model, settings.with_(components={"model": how}))


@torch.no_grad()
def outputs(model, inputs):
    return fidelity.tensors(model(**inputs))


def state_of(model):
    """What must be the same objects, or bit-equal, after `remove()`."""
    return (
        {name: tensor.clone() for name, tensor in model.state_dict().items()},
        {name: id(parameter) for name, parameter in model.named_parameters()},
        {
            path: {k: v for k, v in vars(module).items() if not k.startswith("_")}
            for path, module in model.named_modules()
        },
        [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()],
    )


def assert_restored(model, before):
    after = state_of(model)
    assert after[0].keys() == before[0].keys()
    assert all(torch.equal(tensor, after[0][name]) for name, tensor in before[0].items())
    assert after[1:] == before[1:]


def build(name, dtype=torch.float32, **config):
    model = ZOO[name].build(dtype)
    if not config:
        return model
    torch.manual_seed(0)
    return type(model)(**{**model.config, **config}).eval().to(dtype)


def split(name, ranks, how="eager", dtype=torch.float32, config=None):
    """Return this rank's share of the weights that are split."""
    model, inputs = build(name, dtype, **(config or {})), ZOO[name].inputs(dtype)
    eager, exact = outputs(model, inputs), fidelity.tensors(fidelity.in_float64(model, (), inputs))
    before = state_of(model)
    total = sum(parameter.nbytes for parameter in model.parameters())
    with optimized(model, ranks, how) as handle:
        for actual in (outputs(model, inputs), outputs(model, inputs)):
            for one in zip(actual, eager, exact, strict=True):
                assert_no_worse(*one, where=name)
        assert all(type(parameter) is torch.nn.Parameter for parameter in model.parameters())
        left = sum(parameter.nbytes for parameter in model.parameters())
        note = handle.part("model").technique_notes["parallel"].text
    assert_restored(model, before)
    assert all(torch.equal(*pair) for pair in zip(outputs(model, inputs), eager, strict=True))
    return left / total, note


@pytest.mark.parametrize("name", FAMILIES)
def test_results_are_those_of_one_rank(ranks, name):
    size = 3 if name == "sd3" else 2
    for share, note in ranks(size)(split, name, size):
        assert share < 0.95
        assert "MiB of the weights" in note


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("z_image", {"dim": 48, "axes_dims": [8, 8, 8]}),
        ("lumina2", {"hidden_size": 32, "num_attention_heads": 4, "num_kv_heads": 2}),
    ],
)
def test_families_whose_small_models_are_odd(ranks, name, config):
    ranks(2)(split, name, 2, "eager", torch.float32, config)


@pytest.mark.parametrize("name", ["flux", "wan", pytest.param("ltx", marks=pytest.mark.thorough)])
def test_blocks_are_compiled_with_the_sums(ranks, name):
    ranks(2)(split, name, 2, "tritium")


@pytest.mark.parametrize("name", ["flux", "wan"])
def test_weights_of_16_bits(ranks, name):
    ranks(2)(split, name, 2, "eager", torch.bfloat16)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["flux", "flux2", "qwen_image", "wan", "hunyuan_video", "ltx"])
def test_four_ranks(ranks, name):
    config = {"num_attention_heads": 4} | ({"cross_attention_dim": 48} if name == "ltx" else {})
    ranks(4)(split, name, 4, "tritium", torch.float32, config)


def with_others(degrees):
    """Two samples in a batch, as of guidance, or tokens, are split on other ranks than the weights."""
    model, inputs = build("flux", num_attention_heads=4), ZOO["flux"].inputs()
    eager, exact = outputs(model, inputs), fidelity.tensors(fidelity.in_float64(model, (), inputs))
    settings = Plan(
        parallel=Parallel(**degrees, vae=None), config=ENGINE, progress=False, components={"model": "eager"}
    )
    with tritium.optimize(model, settings, scheduler=diffusers.FlowMatchEulerDiscreteScheduler()) as handle:
        handle.scheduler.set_timesteps(4)
        for _ in range(2):
            for one in zip(outputs(model, inputs), eager, exact, strict=True):
                assert_no_worse(*one)
    assert all(torch.equal(*pair) for pair in zip(outputs(model, inputs), eager, strict=True))


@pytest.mark.thorough
@pytest.mark.parametrize("degrees", [{"cfg": 2, "tensor": 2}, {"ulysses": 2, "tensor": 2}])
def test_with_other_axes(ranks, degrees):
    ranks(4)(with_others, degrees)


# --- adapters ---


def add_adapter(model, name, seed):
    """Add LoRA to every kind of linear, split or not, as `load_lora_weights` does; all ranks have equal weights."""
    targets = ["to_q", "to_k", "to_out.0", "add_v_proj", "proj_mlp", "proj_out", "net.0.proj", "net.2", "norm.linear"]
    model.add_adapter(peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False), adapter_name=name)
    generator = torch.Generator().manual_seed(seed)
    for key, parameter in model.named_parameters():
        if f".{name}." in key:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.1


def steps_of_adapters():
    """Changes of adapters that users make between calls."""
    return [
        ("a second one", lambda model: add_adapter(model, "second", 2)),
        ("both", lambda model: model.set_adapters(["first", "second"], [0.7, 0.4])),
        ("merged", lambda model: model.fuse_lora(adapter_names=["first"])),
        ("taken out again", lambda model: model.unfuse_lora()),
        ("switched off", lambda model: model.disable_adapters()),
        ("switched on", lambda model: model.enable_adapters()),
        ("deleted", lambda model: model.delete_adapters("first")),
        ("unloaded", lambda model: model.unload_lora()),
    ]


def with_adapters(how, present):
    """Adapters that are there at the install, or come later, act as on one rank."""
    alone, model, inputs = ZOO["flux"].build(), ZOO["flux"].build(), ZOO["flux"].inputs()
    first = [("the first", lambda model: add_adapter(model, "first", 1))]
    if present:
        for one in (alone, model):
            first[0][1](one)
    with optimized(model, 2, how):
        for what, change in ([] if present else first) + steps_of_adapters():
            change(alone)
            change(model)
            for actual, eager, exact in zip(
                outputs(model, inputs),
                outputs(alone, inputs),
                fidelity.tensors(fidelity.in_float64(alone, (), inputs)),
                strict=True,
            ):
                assert_no_worse(actual, eager, exact, what)
    expected = alone.state_dict()
    # Merging and taking out again rounds, with adapters in parts and whole alike.
    assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("present", [True, False], ids=["present", "loaded later"])
def test_adapters(ranks, present):
    ranks(2)(with_adapters, "eager", present)


def removed_with_adapters():
    model = ZOO["flux"].build()
    add_adapter(model, "first", 1)
    before = state_of(model)
    with optimized(model, 2):
        outputs(model, ZOO["flux"].inputs())
    assert_restored(model, before)


def test_adapters_are_gathered(ranks):
    ranks(2)(removed_with_adapters)


# --- quantized weights ---


def quantized(format_):
    model, inputs = ZOO["flux"].build(torch.bfloat16), ZOO["flux"].inputs(torch.bfloat16)
    before = state_of(model)
    alone = copy.deepcopy(model)
    config = ENGINE.with_(fidelity="fast")
    settings = Plan(quantize=format_, config=config, progress=False)
    with tritium.optimize(alone, settings):
        expected = outputs(alone, inputs)
    with tritium.optimize(model, settings.with_(parallel=Parallel(tensor=2, vae=None))) as handle:
        actual = outputs(model, inputs)
        assert handle.part("model").technique_notes.keys() >= {"quantize", "parallel"}
    assert_restored(model, before)
    exact = fidelity.tensors(fidelity.in_float64(model, (), inputs))
    return [float(fidelity.error(one[0], exact[0])) for one in (actual, expected)]


@pytest.mark.parametrize("format_", ["int8", pytest.param("fp8", marks=pytest.mark.thorough)])
def test_shares_are_quantized(ranks, format_):
    for split_, alone in ranks(2)(quantized, format_):
        # The scales are those of parts of the rows, so the error is about the same and not zero.
        assert 0 < split_ < 1.5 * alone


# --- what cannot be split ---


def refusals():
    """Return the message of each refusal; nothing changes."""
    found = {}
    for what, spoil in SPOILED.items():
        model = spoil()
        before = state_of(model)
        with pytest.raises(PipelineError) as caught:
            optimized(model, 2)
        assert_restored(model, before)
        found[what] = str(caught.value)
    return found


def spoiled(change, name="flux"):
    model = ZOO[name].build()
    change(model)
    return model


SPOILED = {
    "heads": lambda: ZOO["sd3"].build(),
    "family": lambda: ZOO["sdxl_unet"].build(),
    "fused": lambda: spoiled(lambda model: model.fuse_qkv_projections()),
    "float8": lambda: spoiled(lambda model: model.transformer_blocks[0].attn.to_q.to(torch.float8_e4m3fn)),
    "hook": lambda: spoiled(
        lambda model: diffusers.hooks.apply_layerwise_casting(model, torch.float8_e4m3fn, torch.float32)
    ),
    "dora": lambda: spoiled(
        lambda model: model.add_adapter(peft.LoraConfig(r=2, target_modules=["to_q"], use_dora=True))
    ),
    "tied": lambda: spoiled(
        lambda model: setattr(
            model.transformer_blocks[0].attn.to_q, "weight", model.transformer_blocks[0].attn.to_k.weight
        )
    ),
}


def test_what_cannot_be_split_is_refused(ranks):
    found = ranks(2)(refusals)[0]
    assert "3 features" in found["heads"] or "heads=3" in found["heads"]
    assert "UNet2DConditionModel has no plan for its weights" in found["family"]
    assert "unfuse_qkv_projections()" in found["fused"]
    assert "is quantized already" in found["float8"]
    assert "has a hook that handles its weights" in found["hook"]
    assert "DoRA" in found["dora"]
    assert "share one weight" in found["tied"]
