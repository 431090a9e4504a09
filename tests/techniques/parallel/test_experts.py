"""Experts on several ranks: the results of one process, weights that come back, and moves between images."""

import pytest
import torch
import torch.distributed as dist
from diffusers.models.transformers.transformer_hidream_image import MOEFeedForwardSwiGLU
from torch import nn

import tritium
from support import states
from support.denoising import euler
from support.fidelity import assert_no_worse
from support.zoo import ZOO
from tritium import CompilationConfig, Parallel, Plan, compat
from tritium.errors import PipelineError
from tritium.techniques.choice import Choice
from tritium.techniques.experts import Experts

ENGINE = CompilationConfig(engine="eager")


def plan(ranks_, how="tritium", **experts):
    fields = {"experts": Experts(**experts)} if experts else {}
    choice = Choice(how=how, **fields)
    parallel = Parallel(experts=ranks_, vae=None)
    return Plan(parallel=parallel, config=ENGINE, progress=False, components={"model": choice})


class Model(nn.Module):
    """Two mixtures one after the other, with a gate that prefers some experts."""

    def __init__(self, count=4, chosen=2):
        super().__init__()
        torch.manual_seed(0)
        mixtures = [MOEFeedForwardSwiGLU(64, 128, count, chosen, _force_inference_output=True) for _ in range(2)]
        self.mixtures = nn.ModuleList(mixtures)
        for mixture in mixtures:
            # With the offset of tokens below, the first experts get most of them.
            mixture.gate.weight.data[: count // 2] += 0.05
        self.eval().requires_grad_(False)

    def forward(self, x, time=None):
        for mixture in self.mixtures:
            x = x + mixture(x + 1) * (1 if time is None else 1 + time / 1e4)
        return (x,)


def tokens(count=33):
    return torch.randn(2, count, 64, generator=torch.Generator().manual_seed(1))


def state_of(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def split(ranks_, how, count, chosen, slots):
    """Return the bytes of experts on this rank before and while they are split."""
    model, x = Model(count, chosen), tokens()
    before, parameters, modules = state_of(model), list(model.parameters()), states.installed(model)
    expected, exact = model(x)[0], Model(count, chosen).double()(x.double())[0]
    whole = sum(value.numel() for name, value in before.items() if ".experts." in name)
    with tritium.optimize(model, plan(ranks_, how, **({"slots": slots} if slots else {}))) as handle:
        for _ in range(2):
            assert_no_worse(model(x)[0], expected, exact)
        kept = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name and not p.is_meta)
        note = handle.part("model").technique_notes["parallel"].text
        assert list(model.state_dict()) == list(before)
    assert all(map(torch.equal, model.state_dict().values(), before.values()))
    assert all(one is other for one, other in zip(model.parameters(), parameters, strict=True))
    assert states.installed(model) == modules
    assert torch.equal(model(x)[0], expected)
    assert type(model.mixtures[0]) is MOEFeedForwardSwiGLU
    return kept / whole, note


@pytest.mark.parametrize(
    ("ranks_", "how", "count", "chosen", "slots", "share"),
    [
        (2, "tritium", 4, 2, None, 1 / 2),
        (2, "eager", 4, 2, None, 1 / 2),
        (2, "tritium", 4, 2, 3, 3 / 4),
        (2, "tritium", 3, 1, None, 2 / 3),
        # More ranks than an equal share fills: experts with copies.
        (3, "eager", 4, 2, None, 1 / 2),
        (4, "eager", 2, 2, None, 1 / 2),
    ],
)
def test_as_on_one_rank(ranks_, how, count, chosen, slots, share, ranks):
    found = ranks(ranks_)(split, ranks_, how, count, chosen, slots)
    shares, notes = zip(*found, strict=True)
    assert sum(shares) / ranks_ <= share + 1e-9
    slots = slots or -(-count // ranks_)
    assert f"{slots} of {count} experts on each of {ranks_} ranks" in notes[0]
    assert "times the mean load" in notes[0]


def hidream(how):
    entry = ZOO["hidream"]
    model, inputs = entry.build(torch.float32), entry.inputs(torch.float32)
    with torch.inference_mode():
        expected = model(**inputs)[0]
        with tritium.optimize(model, plan(2, how)) as handle:
            torch.testing.assert_close(model(**inputs)[0], expected)
            refused = handle.part("model").refused
        assert torch.equal(model(**inputs)[0], expected)
    return refused


def test_hidream(ranks):
    assert ranks(2)(hidream, "tritium") == [None, None]


def combined():
    entry = ZOO["hidream"]
    model, inputs = entry.build(torch.float32), entry.inputs(torch.float32)
    both = Plan(parallel=Parallel(ulysses=2, experts=2, vae=None), config=ENGINE, progress=False)
    with torch.inference_mode():
        expected = model(**inputs)[0]
        with tritium.optimize(model, both):
            torch.testing.assert_close(model(**inputs)[0], expected)


@pytest.mark.thorough
def test_with_tokens(ranks):
    ranks(4)(combined)


@torch.no_grad()
def generate(model, scheduler, steps=3):
    latents = tokens()
    scheduler.set_timesteps(steps)
    for time in scheduler.timesteps:
        latents = scheduler.step(model(latents, time)[0], time, latents, return_dict=False)[0]
    return latents


def images(moves, slots):
    """Return the placements of the first mixture by image, and the loads of one image."""
    model, scheduler = Model(), euler()
    expected = generate(model, scheduler)
    placements = []
    with tritium.optimize(model, plan(2, slots=slots, moves=moves), scheduler=scheduler) as handle:
        (state,) = handle.part("model").state_of("parallel").undo
        compiled = None
        for _ in range(3):
            image = generate(model, scheduler)
            torch.testing.assert_close(image, expected)
            placements.append(state._mixtures[0].placement)
            graphs = compat.dynamo.graphs_compiled()
            assert compiled in (None, graphs), "a move compiles nothing"
            compiled = graphs
        loads, imbalance = state.loads()[0], state.imbalance()
    assert torch.equal(generate(model, scheduler), expected)
    return placements, loads, imbalance


class TestMoves:
    def test_none_without_being_named(self, ranks):
        for placements, loads, imbalance in ranks(2)(images, 0, None):
            assert placements == [((0, 1), (2, 3))] * 3
            assert sum(loads) == 3 * 66 * 2
            assert imbalance > 1.5

    def test_between_images(self, ranks):
        first, second = ranks(2)(images, None, None)
        assert first == second
        placements, _, imbalance = first
        assert placements[0] == ((0, 1), (2, 3)) != placements[1] == placements[2]
        assert imbalance < 1.2

    def test_with_spare_slots(self, ranks):
        placements, _, imbalance = ranks(2)(images, None, 3)[0]
        assert all(len(held) <= 3 for held in placements[-1])
        assert imbalance < 1.1


def changed(how):
    model, x = Model(), tokens()
    linear = model.mixtures[1].experts[2 * dist.get_rank()].w1
    with tritium.optimize(model, plan(2)) as handle:
        model(x)
        if how == "data":
            linear.weight.data = linear.weight.data.clone()
        elif how == "hook":
            model.mixtures[1].experts[0].w1.register_forward_hook(lambda *_: None)
        elif how == "move":
            with pytest.raises(PipelineError, match="cannot be moved or cast; call remove"):
                model.to(torch.float64)
            model(x)
            return
        with pytest.raises(PipelineError, match=r"mixtures.1.experts.\d was changed while its weights are split"):
            model(x)
        handle.remove()


@pytest.mark.parametrize("how", ["data", "hook", "move"])
def test_changes_that_are_not_seen_raise(how, ranks):
    ranks(2)(changed, how)


def refused():
    model = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(PipelineError, match="its experts cannot be split: it has no routed experts"):
        tritium.optimize(model, plan(2))
    model = Model()
    model.mixtures[0].experts[1].w2.register_forward_hook(lambda *_: None)
    with pytest.raises(PipelineError, match=r"linears of mixtures.0 have adapters, hooks or stored bytes"):
        tritium.optimize(model, plan(2))
    assert type(model.mixtures[1]) is MOEFeedForwardSwiGLU


def test_models_that_cannot_be_split(ranks):
    ranks(2)(refused)
