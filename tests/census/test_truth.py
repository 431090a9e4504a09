"""The census's own truth: numbers known from reading the models, and three sources that must agree."""

from collections import Counter

import pytest
import torch
from diffusers.models.autoencoders.autoencoder_kl_wan import WanRMS_norm
from diffusers.models.normalization import MochiRMSNorm, RMSNorm
from torch.nn.modules.module import register_module_forward_hook
from torch.utils._pytree import tree_leaves

from census import tags
from census.truth import capture, captured, count_graphs, record, truth
from support.zoo import ZOO

RMS_NORMS = (torch.nn.RMSNorm, RMSNorm, MochiRMSNorm, WanRMS_norm)
DTYPES = (torch.float32, torch.bfloat16)

every_model = pytest.mark.parametrize("model", ZOO.values(), ids=ZOO)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=("float32", "bfloat16"))

# rms_norm, rope, adalayernorm, gelu: all executed, and those that the output depends on
KNOWN = {
    "flux": ((6, 4, 6, 3), (6, 4, 6, 3)),
    "wan": ((8, 4, 5, 3), (8, 4, 5, 3)),
    "qwen_image": ((9, 8, 9, 4), (9, 8, 8, 3)),
}

# What no output depends on: the text stream of a last block.
DEAD = {
    "qwen_image": {"adalayernorm": 1, "gelu": 1, "plain_gelu": 1, "linear_gelu": 1, "layer_norm": 1, "mul_add": 2},
    "cogview4": {"adalayernorm": 1, "gelu": 1, "plain_gelu": 1, "linear_gelu": 1, "layer_norm": 1, "mul_add": 2},
    "cogvideox": {"mul_add": 1},
}


CAPTURED = ("flux", "mochi", "ltx", "kl_decoder")


def run(model, dtype, size=None):
    with torch.no_grad():
        output = model.build(dtype)(**model.inputs(dtype, **({} if size is None else {"size": size})))
    return [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]


@every_dtype
@every_model
def test_a_model_runs_and_says_something(model, dtype):
    for leaf in run(model, dtype):
        assert leaf.dtype == dtype
        assert leaf.isfinite().all()
        assert leaf.float().std() > 0.05


@every_model
def test_a_model_is_the_same_every_time(model):
    for first, second in zip(run(model, torch.float32), run(model, torch.float32), strict=True):
        assert torch.equal(first, second)


@every_model
def test_size_changes_the_output(model):
    small, large = (run(model, torch.float32, size) for size in model.sizes)
    assert [leaf.shape for leaf in run(model, torch.float32)] == [leaf.shape for leaf in small]
    assert [leaf.shape for leaf in small] != [leaf.shape for leaf in large]


@every_model
def test_no_parameter_is_left_at_a_constant(model):
    for name, parameter in model.build().named_parameters():
        assert parameter.numel() == 1 or parameter.unique().numel() > 1, name


@every_dtype
@pytest.mark.parametrize("name", KNOWN)
def test_known_numbers(name, dtype):
    found = truth(ZOO[name], dtype)
    families = ("rms_norm", "rope", "adalayernorm", "gelu")
    assert tuple(found.eager[family] for family in families) == KNOWN[name][0]
    assert tuple(found.live[family] for family in families) == KNOWN[name][1]


@every_model
def test_dead_sites_are_the_known_ones(model):
    found = truth(model)
    dead = {family: found.eager[family] - found.live[family] for family in found.eager}
    assert {family: number for family, number in dead.items() if number} == DEAD.get(model.name, {})


@every_model
def test_both_dtypes_have_the_same_sites(model):
    single, half = (truth(model, dtype).live for dtype in DTYPES)
    single.pop("cat_linear_embedding")
    half.pop("cat_linear_embedding")
    assert single == half


@every_model
def test_norms_agree_with_module_hooks(model):
    calls = Counter()

    def count(module, *_):
        calls["rms_norm"] += isinstance(module, RMS_NORMS)
        calls["layer_norm"] += isinstance(module, torch.nn.LayerNorm)

    handle = register_module_forward_hook(count)
    try:
        run(model, torch.float32)
    finally:
        handle.remove()
    found = truth(model).eager
    assert {name: found[name] for name in ("rms_norm", "layer_norm")} == dict(calls)


@every_model
def test_every_product_was_looked_at(model):
    calls, _ = record(model, torch.float32)
    assert tags.unexplained((call.op, call.statement) for call in calls) == set()


# The census compares the graphs that Tritium gets of every model.
@pytest.mark.parametrize(
    "model",
    [pytest.param(ZOO[name], id=name, marks=[pytest.mark.thorough] * (name not in CAPTURED)) for name in ZOO],
)
def test_dynamo_captures_the_live_sites(model):
    graphs = capture(model)
    assert len(graphs) == model.graphs
    live, found = truth(model).live, count_graphs(graphs)
    if model.name in {"mochi", "hidream"}:
        # Shared frames, and code outside any graph.
        assert all(found[family] <= live[family] for family in live)
    else:
        assert found == live


def test_what_mochi_has_outside_graphs():
    # The blocks' attention breaks: its 8 norms share 2 graphs, its 4 RoPEs one, its SDPA (once a sample) is in none.
    live, found = truth(ZOO["mochi"]).live, captured(ZOO["mochi"])
    missing = {family: live[family] - found[family] for family in live if live[family] != found[family]}
    assert missing == {"rms_norm": 6, "rope": 3, "attention": 4}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(model.name, marks=[pytest.mark.thorough] * (model.name not in CAPTURED))
        for model in ZOO.values()
        if model.repeated_blocks
    ],
)
def test_repeated_blocks_have_their_sites_once(name):
    model = ZOO[name]
    whole, blocks = truth(model).eager, captured(model, repeated_blocks=True)
    assert sum(blocks.values()) > 0
    assert all(blocks[family] <= whole[family] for family in whole)


@pytest.mark.parametrize(
    "name", ["flux", *(pytest.param(name, marks=pytest.mark.thorough) for name in ("qwen_image", "wan", "kl_decoder"))]
)
def test_dynamic_shapes_do_not_move_the_truth(name):
    model = ZOO[name]
    assert captured(model, resize=True) == truth(model).live
    if model.dynamic:
        assert captured(model, mark=True) == truth(model).live


def test_a_tag_without_a_statement_is_an_error(monkeypatch):
    stale = tags.Tag("rope", "models/embeddings.py", r"^apply_rotary_emb$", r"no such line", "mul")
    monkeypatch.setattr(tags, "TAGS", (*tags.TAGS, stale))
    tags._checked_tags.cache_clear()
    with pytest.raises(LookupError, match="no such line"):
        tags._checked_tags()
    tags._checked_tags.cache_clear()
