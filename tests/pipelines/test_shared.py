"""Parts that several pipelines share: optimized together, left alone by one, and put back when the last one is done."""

import gc
import weakref

import pytest
import torch
from torch import nn

import tritium
from support import small_pipelines, tiny_pipeline
from tritium import Choice, CompilationConfig, Plan, Shapes
from tritium.errors import PipelineError

PLAN = Plan(config=CompilationConfig(engine="eager"), progress=False)


def compiled(module):
    return [path for path, inner in module.named_modules() if "_compiled_call_impl" in inner.__dict__]


@pytest.fixture
def vae():
    return small_pipelines.autoencoder().eval().requires_grad_(requires_grad=False)


@pytest.fixture
def pipes(vae):
    encoder = nn.Sequential(nn.Linear(2, 2))
    return [tiny_pipeline.Pipeline(vae=vae, text_encoder=encoder) for _ in range(2)]


def decode(pipe):
    with torch.no_grad():
        return pipe.components["vae"].decode(torch.ones(1, 4, 8, 8)).sample


class TestShared:
    @pytest.mark.parametrize("first", [0, 1])
    def test_the_same_choice_is_shared_until_both_are_removed(self, pipes, vae, first):
        expected = decode(pipes[0])
        handles = [tritium.optimize(pipe, PLAN) for pipe in pipes]
        assert torch.equal(decode(pipes[0]), expected)
        handles[first].remove()
        assert not compiled(pipes[first].transformer)
        assert compiled(pipes[1 - first].transformer)
        assert compiled(vae)
        records = handles[1 - first].report.records
        assert torch.equal(decode(pipes[0]), expected)
        assert [record.function for record in records] == ["Decoder.forward"], "it goes on running compiled"
        handles[1 - first].remove()
        assert not compiled(vae)
        assert torch.equal(decode(pipes[0]), expected)

    @pytest.mark.parametrize("leaves", [0, 1], ids=["the first", "the second"])
    def test_one_pipeline_leaves_it_alone(self, pipes, vae, leaves):
        plans = [PLAN, PLAN]
        plans[leaves] = PLAN.with_(
            config=CompilationConfig(engine="eager", enable_freezing=True), components={"vae": "eager"}
        )
        handles = [tritium.optimize(pipe, plan) for pipe, plan in zip(pipes, plans, strict=True)]
        assert handles[leaves].choices["vae.decode"] == Choice(), "the other pipeline's choice runs"
        assert not handles[1 - leaves].part("vae.decode").plan.config.enable_freezing
        handles[1 - leaves].remove()
        assert handles[leaves].choices["vae.decode"] == Choice(how="eager")
        handles[leaves].remove()
        assert not compiled(vae)

    def test_the_one_that_left_it_alone_goes_first(self, pipes, vae):
        handles = [
            tritium.optimize(pipes[0], PLAN.with_(components={"vae": "eager"})),
            tritium.optimize(pipes[1], PLAN),
        ]
        handles[0].remove()
        assert handles[1].choices["vae.decode"] == Choice()
        assert compiled(vae)
        handles[1].remove()
        assert not compiled(vae)

    @pytest.mark.parametrize(
        "other",
        [
            {"components": {"vae": "inductor"}},
            {"config": CompilationConfig(engine="eager", enable_freezing=True)},
            {"dynamic": True},
            {"shapes": Shapes(sizes=64)},
        ],
    )
    def test_choices_that_exclude_each_other(self, pipes, vae, other):
        with tritium.optimize(pipes[0], PLAN) as handle:
            before = {path: vae.get_submodule(path).__dict__["_compiled_call_impl"] for path in compiled(vae)}
            with pytest.raises(PipelineError, match=r"vae\.encode is shared .*'eager'") as raised:
                tritium.optimize(pipes[1], PLAN.with_(**other))
            assert "\n" not in str(raised.value)
            assert not compiled(pipes[1].transformer)
            assert before == {path: vae.get_submodule(path).__dict__["_compiled_call_impl"] for path in compiled(vae)}
            assert handle.choices["vae.decode"] == Choice()
            left_alone = PLAN.with_(**{**other, "components": {"vae": "eager"}})
            with tritium.optimize(pipes[1], left_alone):
                assert compiled(pipes[1].transformer)

    def test_switching_follows_the_claims(self, pipes):
        with tritium.optimize(pipes[0], PLAN), tritium.optimize(pipes[1], PLAN) as second:
            with pytest.raises(PipelineError, match="shared with another pipeline"):
                second.use({"vae.decode": "inductor"})
            second.use({"vae.decode": "eager"})
            assert second.choices["vae.decode"] == Choice()

    def test_a_dropped_pipeline_is_freed_and_its_part_is_free(self, vae):
        pipe = tiny_pipeline.Pipeline(vae=vae)
        transformer = weakref.ref(pipe.transformer)
        tritium.optimize(pipe, PLAN)
        del pipe
        gc.collect()
        assert transformer() is None
        with tritium.optimize(tiny_pipeline.Pipeline(vae=vae), PLAN):
            assert compiled(vae)
        assert not compiled(vae)

    def test_a_removed_handle_switches_nothing_of_the_other(self, pipes):
        first = tritium.optimize(pipes[0], PLAN)
        with tritium.optimize(pipes[1], PLAN) as second:
            first.remove()
            with pytest.raises(PipelineError, match="handle is removed"):
                first.use({"vae.decode": "eager"})
            assert second.choices["vae.decode"] == Choice()
