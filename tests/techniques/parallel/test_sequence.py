"""Tokens split between ranks, in every family of the zoo: numbers, refusals, recompiles, and what remains after remove."""

import unittest.mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import tritium
from support import states
from support.fidelity import assert_no_worse
from support.zoo import ZOO
from tritium import Parallel, compat
from tritium.errors import ConfigError, PipelineError
from tritium.fidelity import in_float64, tensors

# Families whose tokens cannot be split, with words of the reason.
WHOLE = {"sana": "linear attention", "sdxl_unet": "convolutions"}
MODELS = [name for name in ZOO if "decoder" not in name]
DEGREES = [{"ulysses": 2}, {"gather": 2}, {"ring": 2}]
MORE = [{"ulysses": 3}, {"ulysses": 4}, {"gather": 3}, {"ring": 3}, {"ring": 4}, {"ring": 2, "ulysses": 2}]


def plan(how, **degrees):
    return tritium.Plan(
        config=tritium.CompilationConfig(engine="eager"),
        techniques=(Parallel(**degrees, vae=None),),
        components={"model": how},
    )


def call(model, inputs):
    with torch.inference_mode():
        return tensors(model(**inputs))


def expected(name, size, change=None):
    """Return the result of one process in float32, and in float64."""
    model, inputs = ZOO[name].build(), ZOO[name].inputs(torch.float32, size)
    if change is not None:
        inputs = {**inputs, **change(name, inputs)}
    return model, inputs, call(model, inputs), tensors(in_float64(model, (), inputs))


def census(names, all_degrees, how, place=0, change=None):
    """Compare each family with one process; return the families that were refused."""
    refused = set()
    for name in names:
        model, inputs, eager, exact = expected(name, ZOO[name].sizes[place], change)
        for degrees in all_degrees:
            before = state_of(model)
            if name in WHOLE:
                with pytest.raises(PipelineError, match=WHOLE[name]):
                    tritium.optimize(model, plan(how, **degrees))
                refused.add(name)
            else:
                with tritium.optimize(model, plan(how, **degrees)):
                    results = call(model, inputs)
                for found, one, other in zip(results, eager, exact, strict=True):
                    assert_no_worse(found, one, other, f"{name} {degrees}")
            assert state_of(model) == before, name
    return refused


def state_of(model):
    """Return what a removal restores, with the bits of the weights."""
    bits = {name: (id(one), hash(one.detach().numpy().tobytes())) for name, one in model.named_parameters()}
    return states.installed(model), bits


def test_all_families_on_two_ranks(ranks):
    assert ranks(2)(census, MODELS, DEGREES, "eager", timeout=200) == [set(WHOLE)] * 2


# Families whose prompts may have pads, and the masks of their tokens. The zoo has one in every call of Chroma.
MASKED = {
    "qwen_image": ("encoder_hidden_states_mask",),
    "pixart": ("encoder_attention_mask",),
    "lumina2": ("encoder_attention_mask",),
    "hunyuan_video": ("encoder_attention_mask",),
    "ltx": ("encoder_attention_mask",),
    "ltx2": ("encoder_attention_mask", "audio_encoder_attention_mask"),
    "mochi": ("encoder_attention_mask",),
}


def half_and_one(name, _inputs):
    """Mask all but half of the prompt's tokens of one sample, and all but one of the other's."""
    dtype = torch.bool if name in ("lumina2", "mochi") else torch.int64
    found = {}
    for mask in MASKED[name]:
        found[mask] = (torch.arange(6) < torch.tensor([[3], [1]])).to(dtype)
    return found


def one_token(_name, inputs):
    """Shorten the prompt to one token."""
    text = {"encoder_hidden_states": inputs["encoder_hidden_states"][:, :1]}
    return text | ({"txt_ids": inputs["txt_ids"][:1]} if "txt_ids" in inputs else {})


@pytest.mark.parametrize(("names", "change"), [(MASKED, half_and_one), (("flux", "qwen_image", "sd3"), one_token)])
def test_prompts_of_other_lengths(ranks, names, change):
    # Two heads become three, of which one rank has none.
    ranks(3)(census, names, [{"ulysses": 3}, {"ring": 3}], "eager", 0, change)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        # As in `test_values_of_a_controlnet_are_split`.
        pytest.param("flux", None, marks=pytest.mark.thorough),
        *(("wan", None), ("hunyuan_video", half_and_one)),
        pytest.param("qwen_image", half_and_one, marks=pytest.mark.thorough),
    ],
)
def test_families_in_one_graph(ranks, name, change):
    ranks(2)(census, [name], [{"ulysses": 2}], "tritium", 0, change)


@pytest.mark.parametrize("degrees", [{"ulysses": 3}, {"ring": 2, "ulysses": 2}], ids=str)
def test_odd_sizes_on_more_ranks(ranks, degrees):
    # 33 and 17 tokens, and texts of 6, on 3 and 4 ranks.
    ranks(Parallel(**degrees).size)(census, ["flux", "qwen_image", "stable_audio"], [degrees], "eager")


@pytest.mark.thorough
@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("degrees", MORE, ids=str)
def test_all_families_on_more_ranks(ranks, degrees, place):
    ranks(Parallel(**degrees).size)(census, MODELS, [degrees], "eager", place, timeout=500)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "change"),
    [*((name, None) for name in MODELS), *((name, half_and_one) for name in MASKED), ("flux", one_token)],
)
def test_all_families_in_graphs(ranks, name, change):
    ranks(3)(census, [name], [{"ulysses": 3}], "tritium", 0, change, timeout=300)


def again():
    """Call a split model twice, with another size between; return the graphs compiled by each call."""
    model = ZOO["flux"].build()
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    counts = []
    with tritium.optimize(model, plan("tritium", ulysses=2)):
        for size in (ZOO["flux"].sizes[0], ZOO["flux"].sizes[0], 3, ZOO["flux"].sizes[0]):
            before = compat.dynamo.graphs_compiled()
            call(model, ZOO["flux"].inputs(torch.float32, size))
            counts.append(compat.dynamo.graphs_compiled() - before)
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    return counts


def notes(how):
    model = ZOO["stable_audio"].build()
    with tritium.optimize(model, plan(how, ulysses=3)) as handle:
        call(model, ZOO["stable_audio"].inputs())
        return handle.part("model").technique_notes["parallel"].text


def test_pads_are_reported(ranks):
    assert "padded hidden_states from 17 to 18 tokens, 2 heads to 3" in ranks(3)(notes, "eager")[0]


def together(how, settings):
    """Compare other techniques with split tokens to those alone."""
    model, inputs = ZOO["flux"].build(), ZOO["flux"].inputs()
    config = tritium.CompilationConfig(engine="eager", fidelity="fast")
    alone = tritium.Plan(config=config, components={"model": how}, **settings)
    with tritium.optimize(model, alone):
        expected = call(model, inputs)[0].clone()
    with tritium.optimize(model, alone.with_(parallel=Parallel(ulysses=2, vae=None))) as handle:
        assert {"parallel", *settings} <= set(handle.part("model").technique_notes)
        torch.testing.assert_close(call(model, inputs)[0], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("how", [pytest.param("eager", marks=pytest.mark.thorough), "tritium"])
@pytest.mark.parametrize("settings", [{"quantize": "int8-weights"}, {"attention": "auto"}], ids=str)
def test_other_techniques_see_split_tokens(ranks, settings, how):
    ranks(2)(together, how, settings)


def test_calls_of_a_size_compile_once(ranks):
    for first, second, other, third in ranks(2)(again):
        assert first > 0
        assert other > 0
        assert second == third == 0


class NoSync(TorchDispatchMode):
    """Raise where values are read on the host."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name()
        if any(word in name for word in ("_local_scalar_dense", "item", "nonzero", "_to_cpu", "is_nonzero")):
            raise AssertionError(f"{name} reads values on the host")
        return func(*args, **(kwargs or {}))


def without_syncs(name, degrees):
    model, inputs = ZOO[name].build(), ZOO[name].inputs()
    with tritium.optimize(model, plan("eager", **degrees)), NoSync():
        call(model, inputs)


@pytest.mark.parametrize("degrees", DEGREES, ids=str)
def test_nothing_is_read_on_the_host(ranks, degrees):
    ranks(2)(without_syncs, "flux", degrees)
    ranks(2)(without_syncs, "hunyuan_video", degrees)


def raised_in_a_block():
    """A call that raises leaves the next one as it was."""
    model, inputs, eager, exact = expected("flux", ZOO["flux"].sizes[0])
    with tritium.optimize(model, plan("eager", ulysses=2)):
        with pytest.raises(PipelineError, match="image_rotary_emb has 26 in dim 0 where its streams have 30"):
            call(model, {**inputs, "txt_ids": inputs["txt_ids"][:2]})
        wrong = unittest.mock.patch.object(model.single_transformer_blocks[0], "proj_mlp", torch.nn.Linear(1, 1))
        with pytest.raises(RuntimeError), wrong:
            call(model, inputs)
        assert_no_worse(call(model, inputs)[0], eager[0], exact[0])


def test_an_exception_changes_nothing(ranks):
    ranks(2)(raised_in_a_block)


def controlled(name, argument, count):
    """Values of a ControlNet are added between blocks."""
    model, inputs = ZOO[name].build(), ZOO[name].inputs()
    tokens = inputs["hidden_states"].shape[1]
    width = model.config.num_attention_heads * model.config.attention_head_dim
    generator = torch.Generator().manual_seed(2)
    inputs[argument] = [torch.randn(2, tokens, width, generator=generator) for _ in range(count)]
    eager, exact = call(model, inputs), tensors(in_float64(model, (), inputs))
    for how in ("eager", "tritium"):
        with tritium.optimize(model, plan(how, ulysses=2)):
            assert_no_worse(call(model, inputs)[0], eager[0], exact[0])


def test_values_of_a_controlnet_are_split(ranks):
    ranks(2)(controlled, "flux", "controlnet_block_samples", 1)


class Unknown(torch.nn.Linear):
    pass


def refused():
    with pytest.raises(PipelineError, match="no facts about the streams of Unknown"):
        tritium.optimize(Unknown(2, 2), plan("eager", ulysses=2))
    with pytest.raises(PipelineError, match="plain Inductor exchanges no tokens"):
        tritium.optimize(ZOO["wan"].build(), plan("inductor", ulysses=2))


def test_what_cannot_be_split_is_refused(ranks):
    ranks(2)(refused)


def test_exchanges_are_checked():
    with pytest.raises(ConfigError, match="no exchange 'halves'"):
        Parallel(exchange="halves")
