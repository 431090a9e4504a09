"""The mesh that `Parallel()` chooses at the first call, what is measured, and what `handle.parallel` tells."""

import json

import pytest
import torch

import tritium
from support.denoising import euler
from support.zoo import ZOO
from tritium import CompilationConfig, Parallel, Plan
from tritium.errors import PipelineError
from tritium.pipelines import recipe as recipes
from tritium.pipelines.parts import BareModel

ENGINE = CompilationConfig(engine="eager")


def plan(**fields):
    fields = {"parallel": Parallel(vae=None), **fields}
    return Plan(config=ENGINE, progress=False, **fields)


def chosen(name, measure):
    """Return the degrees that were chosen, and what the handle tells before and after."""
    entry = ZOO[name]
    model, inputs = entry.build(torch.float32), entry.inputs(torch.float32)
    with torch.inference_mode():
        expected = model(**inputs)[0]
        with tritium.optimize(model, plan(measure=measure)) as handle:
            before = str(handle.parallel)
            for _ in range(2):
                torch.testing.assert_close(model(**inputs)[0], expected, rtol=1e-4, atol=1e-5)
            choice = handle.choices["model"]
            found = handle.parallel.to_dict()["parts"]["model"]
            after = str(handle.parallel)
        assert torch.equal(model(**inputs)[0], expected)
    return choice.to_dict()["parallel"], found, before, after


@pytest.mark.parametrize(("name", "measure"), [pytest.param("flux", False, marks=pytest.mark.thorough), ("flux", True)])
def test_all_ranks_choose_alike(name, measure, ranks):
    first, second = ranks(2)(chosen, name, measure)
    assert first[0] == second[0]
    degrees, found, before, after = first
    assert sum(size == 2 for axis, size in degrees.items() if axis != "vae") == 1
    assert before.startswith("model: the mesh is chosen at the first call")
    best = found["estimates"][0]
    assert best["degrees"] == {axis: size for axis, size in degrees.items() if size == 2}
    assert found["mesh"] == best["degrees"]
    assert (best["measured"] is not None) == measure
    assert ("measured" in found["why"]) == measure
    assert "ms a step" in after
    assert "GB/s" in after
    assert "on every rank: nothing else" in after
    json.dumps(found)


def guided():
    entry = ZOO["wan"]
    model, inputs = entry.build(torch.float32), entry.inputs(torch.float32)
    with torch.inference_mode(), tritium.optimize(model, plan(), scheduler=euler()) as handle:
        model(**inputs)
        return handle.parallel.to_dict()["parts"]["model"]["mesh"]


def test_branches_of_guidance_come_first(ranks):
    assert ranks(2)(guided) == [{"cfg": 2}] * 2


def explicit():
    entry = ZOO["flux"]
    model, inputs = entry.build(torch.float32), entry.inputs(torch.float32)
    with torch.inference_mode(), tritium.optimize(model, plan(parallel=Parallel(ulysses=2, vae=None))) as handle:
        model(**inputs)
        return str(handle.parallel)


def test_named_degrees_are_kept(ranks):
    for words in ranks(2)(explicit):
        assert "ulysses=2 (2 ranks)" in words
        assert "its degrees were named" in words


def refused():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    handle = tritium.optimize(model, plan())
    with pytest.raises(PipelineError, match="no attention, so no mesh can be chosen; name its degrees"):
        model(torch.ones(1, 4))
    handle.remove()


def test_a_model_without_attention(ranks):
    ranks(2)(refused)


def test_a_recipe_keeps_the_degrees(tmp_path):
    choice = tritium.Choice(parallel=Parallel(cfg=2, ulysses=4))
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    source = BareModel(model)
    recipe = recipes.Recipe(choices={"model": choice}, figures={}, fingerprint=recipes.fingerprint_of(source))
    recipe.save(tmp_path / "recipe.json")
    loaded = recipes.load(tmp_path / "recipe.json").plan_for(source)
    assert loaded.choice("model").get(Parallel) == Parallel(cfg=2, ulysses=4)
