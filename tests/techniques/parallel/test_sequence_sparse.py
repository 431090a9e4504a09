"""Sparse attention over tokens that are split between ranks: the blocks and results of one process."""

import copy

import pytest
import torch
from diffusers import FluxTransformer2DModel, WanTransformer3DModel

import tritium
from support.denoising import euler
from support.fidelity import assert_no_worse
from tritium import Choice, Parallel, Plan, SparseLayout
from tritium.errors import ConfigError, PipelineError
from tritium.techniques.sparse import Sparse

STEPS = (900.0, 700.0, 500.0)


def flux():
    """FLUX with 3 heads over a text of 7 tokens and 15 x 21 of a latent, which have odd lengths."""
    torch.manual_seed(0)
    model = FluxTransformer2DModel(
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=3,
        joint_attention_dim=16,
        pooled_projection_dim=8,
        axes_dims_rope=(4, 4, 8),
    )
    rows, columns = torch.meshgrid(torch.arange(15.0), torch.arange(21.0), indexing="ij")
    inputs = {
        "hidden_states": torch.randn(1, 315, 4),
        "encoder_hidden_states": torch.randn(1, 7, 16),
        "pooled_projections": torch.randn(1, 8),
        "img_ids": torch.stack([torch.zeros_like(rows), rows, columns], -1).flatten(0, 1),
        "txt_ids": torch.zeros(7, 3),
    }
    return model.eval(), inputs


def wan():
    """Wan with 3 heads over 7 x 9 x 9 tokens, and cross-attention to a text."""
    torch.manual_seed(0)
    model = WanTransformer3DModel(
        num_attention_heads=3,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        text_dim=16,
        freq_dim=16,
        ffn_dim=32,
        num_layers=2,
        rope_max_seq_len=32,
    )
    return model.eval(), {"hidden_states": torch.randn(1, 4, 7, 18, 18), "encoder_hidden_states": torch.randn(1, 6, 16)}


# Each method with its settings for reuse, and the attentions of a forward that are sparse.
CASES = {
    "flux": (flux, Sparse(latent=(1, 15, 21), text=7, sparsity=0.6, dense_steps=1, reuse_steps=2), (0, 1)),
    "wan": (wan, Sparse(latent=(7, 9, 9), method="ada_bsa", sparsity=0.9), (0, 2)),
    "wan radial": (wan, Sparse(latent=(7, 9, 9), method="radial", sparsity=0.7), (0, 2)),
}


def plan(sparse, **degrees):
    choice = Choice(how="eager", sparse=sparse)
    parallel = {"parallel": Parallel(**degrees, vae=None)} if degrees else {}
    config = tritium.CompilationConfig(fidelity="fast")
    return Plan(config=config, components={"model": choice}, progress=False, **parallel)


def run(model, inputs, plan, layers):
    """Return the results of all steps, the lists of kept blocks by step and layer, and the note on sparse attention."""
    results, lists = [], []
    with torch.inference_mode(), tritium.optimize(model, plan) as handle:
        for time in STEPS:
            results.append(model(**inputs, timestep=torch.tensor([time]), return_dict=False)[0])
            attention = handle.part("model")._techniques.state_of("sparse").attention
            lists.append([copy.copy(attention._kept[layer, 0].lists) for layer in layers if attention._kept])
        return results, lists, handle.part("model").technique_notes["sparse"].data


def as_alone(name, degrees):
    """Compare with one process: results, and the blocks of this rank's heads."""
    build, sparse, layers = CASES[name]
    model, inputs = build()
    wide = {key: value.double() for key, value in inputs.items()}
    exact, _, _ = run(copy.deepcopy(model).double(), wide, plan(sparse), layers)
    alone, blocks, note = run(model, inputs, plan(sparse), layers)
    found, own, _ = run(model, inputs, plan(sparse, **degrees), layers)
    for one, other, reference in zip(found, alone, exact, strict=True):
        assert_no_worse(one, other, reference, f"{name} {degrees}")
    ranks = degrees["ulysses"]
    share = -(-3 // ranks)
    rank = torch.distributed.get_rank() % ranks
    heads = range(rank * share, min(3, (rank + 1) * share))
    for step, (mine, theirs) in enumerate(zip(own, blocks, strict=True)):
        assert len(mine) == (0 if step < sparse.dense_steps else len(layers))
        for kept, expected in zip(mine, theirs, strict=True):
            for part, whole in zip(kept, expected, strict=True):
                # `radial` keeps the same blocks for all heads.
                one_for_all = whole.shape[1] == 1
                assert torch.equal(part[:, : len(heads)], whole if one_for_all else whole[:, list(heads)])
    assert note["density"] < 0.9


@pytest.mark.parametrize(
    ("name", "degrees"),
    [
        ("flux", {"ulysses": 2}),
        ("flux", {"ulysses": 3}),
        ("wan", {"ulysses": 2}),
        ("wan radial", {"ulysses": 2}),
        ("flux", {"ulysses": 2, "exchange": "packed"}),
    ],
    ids=str,
)
def test_the_blocks_and_results_of_one_process(ranks, name, degrees):
    ranks(degrees["ulysses"])(as_alone, name, degrees)


def guided():
    """Two calls a step on two ranks: steps are those of one process, also where a rank computes one of the calls."""
    model, inputs = wan()
    scheduler = euler()
    sparse = Sparse(latent=(7, 9, 9), sparsity=0.6, dense_steps=1, reuse_steps=2, calls_per_step=2)

    def image(plan):
        latents = inputs["hidden_states"]
        scheduler.set_timesteps(4)
        with torch.inference_mode(), tritium.optimize(model, plan, scheduler=scheduler) as handle:
            for time in scheduler.timesteps:
                texts = [inputs["encoder_hidden_states"] * scale for scale in (1.0, 0.3)]
                one, other = (model(latents, time[None], text, return_dict=False)[0] for text in texts)
                latents = scheduler.step(other + 3.0 * (one - other), time, latents, return_dict=False)[0]
            return latents, handle.part("model").technique_notes["sparse"].data["density"]

    (expected, density), (found, own) = image(plan(sparse)), image(plan(sparse, cfg=2))
    assert torch.equal(found, expected)
    assert density < 0.9
    return own


def test_the_steps_of_guidance(ranks):
    ranks(2)(guided)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"gather": 2}, "name ulysses in place of ring and gather"),
        ({"ring": 2, "ulysses": 2}, "name ulysses in place of ring and gather"),
        ({}, "name degrees, such as ulysses=2"),
        ({"ulysses": 2, "exchange": "chunks 2"}, "use exchange='auto'"),
    ],
    ids=str,
)
def test_what_cannot_be_sparse_is_refused(fields, words):
    with pytest.raises(ConfigError, match=words):
        Choice(how="eager", techniques=(Parallel(**fields), Sparse(latent=(1, 4, 4))))


def refused_by_a_plan():
    """A plan for all parts is not left out of the sparse one in silence, nor split attention in a handle of layers."""
    model, inputs = flux()
    sparse = CASES["flux"][1]
    with pytest.raises(PipelineError, match="name ulysses in place of ring and gather"):
        tritium.optimize(model, plan(sparse, gather=2))
    with tritium.set_sparse_attention(model, SparseLayout((1, 15, 21), 7)):
        only_split = plan(sparse, gather=2).with_(components={"model": "eager"})
        with tritium.optimize(model, only_split), pytest.raises(PipelineError, match="so ulysses alone"):
            model(**inputs, timestep=torch.tensor([500.0]))


def test_a_plan_for_all_parts_is_checked(ranks):
    ranks(2)(refused_by_a_plan)
