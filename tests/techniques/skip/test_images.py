"""Images of one pipeline after another: each equals the image alone, and executes the blocks that were planned."""

import dataclasses
import itertools

import diffusers
import pytest
import torch

import tritium
from support.denoising import Denoiser, count_blocks, euler, generate, optimized
from tritium import Choice, Plan, Skip
from tritium.errors import PipelineError

POLICIES = {
    "window": Skip.window(steps=8, runs=5, first=3, last=1),
    "order 2": Skip("RRR2R2R2"),
    "over sigma": Skip("RRR1R11R", over="sigma"),
    "cycle": Skip("RR(R1)"),
    "derive": Skip(("RRR1RRRR", "RRRRDDRD")),
    "derive in one row": Skip("RRRDD1DD"),
    "range": Skip("RRBBRBRB", span=(1, 3)),
    "cache-dit": Skip.like("cache-dit:fast", 8),
    "magcache": Skip.magcache([1.0] * 8),
    "block cache": Skip.blocks(1, 4, every=3, first=2),
    "attempts too much": Skip("11221122"),
}
GUIDANCE = {"one call": (0.0,), "two calls": (0.0, 0.3), "three calls": (0.0, 0.3, -0.2)}


@pytest.fixture
def model():
    return Denoiser()


class TestPlanned:
    @pytest.mark.parametrize("begin", [0, 3], ids=["whole", "from an image"])
    @pytest.mark.parametrize("guidance", GUIDANCE)
    @pytest.mark.parametrize("policy", POLICIES)
    def test_blocks_are_executed_as_planned(self, model, policy, guidance, begin):
        skip, branches = POLICIES[policy], GUIDANCE[guidance]
        counts, scheduler = count_blocks(model), euler()
        with optimized(model, skip, scheduler) as handle:
            generate(model, scheduler, guidance=branches, begin=begin)
            record = handle.skipping.images["model"]
        planned = skip.cost(8, blocks=4, branches=len(branches), begin=begin)
        assert sum(counts) == planned == record.done == record.planned
        assert record.rows == skip.actions(8, branches=len(branches), begin=begin)
        assert record.without == 4 * len(branches) * (8 - begin)
        if skip.span is not None:
            inside = set(counts[slice(*skip.span)])
            outside = set(counts[: skip.span[0]] + counts[skip.span[1] :])
            assert len(inside) == 1
            assert outside <= {record.without // 4}

    @pytest.mark.parametrize("policy", POLICIES)
    def test_the_same_image_twice_is_equal(self, model, policy):
        scheduler = euler()
        with optimized(model, POLICIES[policy], scheduler):
            first, other, again = (generate(model, scheduler, guidance=(0.0, 0.3), seed=seed) for seed in (0, 1, 0))
        assert torch.equal(first, again)
        assert not torch.equal(first, other)
        # Skipping is lossy, and this is what it costs on a smooth denoiser.
        exact = generate(model, scheduler, guidance=(0.0, 0.3))
        assert 0 < (first - exact).norm() / exact.norm() < 0.2


class TestAborted:
    @pytest.mark.parametrize("policy", POLICIES)
    @pytest.mark.parametrize("stop", [1, 2, 3, 6, 7, 11])
    def test_an_image_after_an_aborted_one(self, model, policy, stop):
        scheduler, two = euler(), (0.0, 0.3)
        with optimized(model, POLICIES[policy], scheduler):
            alone = generate(model, scheduler, guidance=two, seed=5)
        with optimized(model, POLICIES[policy], scheduler):
            with pytest.raises(InterruptedError):
                generate(model, scheduler, guidance=two, stop=stop)
            assert torch.equal(generate(model, scheduler, guidance=two, seed=5), alone)

    def test_a_failed_call_that_is_made_again(self, model):
        scheduler = euler()
        skip = Skip(("RRR1R1RR", "RRRRDRDD"))
        with optimized(model, skip, scheduler):
            expected = generate(model, scheduler, guidance=(0.0, 0.3))
        calls = itertools.count()

        def fails(module, *_):
            if next(calls) in (0, 3, 6):
                raise MemoryError

        handle = optimized(model, skip, scheduler)
        model.blocks[2].register_forward_pre_hook(fails)

        def patient(*args):
            try:
                return model(*args)
            except MemoryError:
                return model(*args)

        assert torch.equal(generate(patient, scheduler, guidance=(0.0, 0.3)), expected)
        handle.remove()


class TestChanges:
    def test_settings_changed_in_any_order(self, model):
        """Guidance, steps, size, dtype, start and scheduler of one image do not change the next one."""
        settings = [
            {},
            {"guidance": (0.0, 0.3)},
            {"steps": 5},
            {"tokens": 7},
            {"begin": 2},
            {"dtype": torch.bfloat16, "guidance": (0.0, 0.3)},
        ]
        skip = Skip(("RR(R1)", "RR(1D)"))

        weights = {name: value.clone() for name, value in model.state_dict().items()}

        def draw(model, fields):
            model.to(fields.get("dtype", torch.float32)).load_state_dict(weights)
            return generate(model, scheduler, **fields)

        alone = []
        for fields in settings:
            scheduler = euler()
            with optimized(model, skip, scheduler):
                alone.append(draw(model, fields))
        for order in itertools.permutations(range(len(settings)), 3):
            scheduler = euler()
            with optimized(model, skip, scheduler):
                for place in order:
                    assert torch.equal(draw(model, settings[place]), alone[place]), order

    def test_guidance_that_starts_and_ends_within_an_image(self, model):
        """A branch that appears late has no history; a change of the branches forgets what was kept."""
        scheduler, skip = euler(), Skip("RR(11)")
        calls = []
        model.register_forward_hook(lambda *_: calls.append(scheduler.step_index or 0))
        with optimized(model, skip, scheduler) as handle, torch.no_grad():
            scheduler.set_timesteps(9)
            latents = torch.ones(1, 3, 6)
            for step, time in enumerate(scheduler.timesteps):
                (output,) = model(latents, time)
                if 3 <= step < 6:
                    model(latents, time, 0.3)
                latents = scheduler.step(output, time, latents, return_dict=False)[0]
            rows = handle.skipping.images["model"].rows
        # Step 4 is the first that can know of the second branch of step 3; step 7 that it is gone in step 6.
        assert rows == ["RR11RR1RR", "...RRR..."]
        assert calls == [0, 1, 3, 4, 4, 5, 5, 7, 8]

    def test_a_batch_is_its_images(self, model):
        scheduler, skip = euler(), Skip("RRR1R1R2")
        with optimized(model, skip, scheduler), torch.no_grad():
            alone = [generate(model, scheduler, seed=seed) for seed in (1, 2)]
            noise = [torch.randn(1, 3, 6, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2)]
            latents = torch.cat(noise)
            scheduler.set_timesteps(8)
            for time in scheduler.timesteps:
                latents = scheduler.step(model(latents, time)[0], time, latents, return_dict=False)[0]
        torch.testing.assert_close(latents, torch.cat(alone), atol=1e-6, rtol=1e-6)

    def test_another_form_of_output_starts_again(self, model):
        scheduler, kinds = euler(), []
        with optimized(model, Skip("RR111111"), scheduler) as handle, torch.no_grad():
            scheduler.set_timesteps(8)
            latents = torch.ones(1, 3, 6)
            for step, time in enumerate(scheduler.timesteps):
                as_dict = step >= 4
                output = model(latents, time, return_dict=as_dict)
                kinds.append(type(output))
                sample = output["sample"] if as_dict else output[0]
                latents = scheduler.step(sample, time, latents, return_dict=False)[0]
            assert handle.skipping.images["model"].rows == ["RR11RR11"]
        assert kinds == [tuple] * 4 + [dict] * 4


class TestSchedulers:
    @pytest.mark.parametrize(
        "scheduler",
        [
            diffusers.UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=1.0),
            diffusers.DPMSolverMultistepScheduler(
                prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=1.0
            ),
            diffusers.EulerDiscreteScheduler(),
            diffusers.DEISMultistepScheduler(),
        ],
        ids=lambda scheduler: type(scheduler).__name__,
    )
    def test_the_step_is_read_from_it(self, model, scheduler):
        model = Denoiser()
        with optimized(model, Skip("RRR1R1R1"), scheduler) as handle:
            first = generate(model, scheduler)
            assert handle.skipping.images["model"].rows == ["RRR1R1R1"]
            assert torch.equal(generate(model, scheduler), first)

    def test_two_stages_are_refused(self, model):
        scheduler = diffusers.FlowMatchHeunDiscreteScheduler()
        choice = Choice(how="eager", skip="RR1R")
        with pytest.raises(PipelineError, match="FlowMatchHeunDiscreteScheduler calls the denoiser twice a step"):
            tritium.optimize(model, Plan(components={"model": choice}), scheduler=scheduler)
        expected = generate(model, scheduler)
        with optimized(model, Skip("RR1R1R1R"), scheduler):
            assert torch.equal(generate(model, scheduler), expected)

    def test_a_scheduler_that_becomes_two_stage_runs_all(self, model):
        holder = euler()
        with optimized(model, Skip("RR(11)"), holder) as handle:
            heun = diffusers.FlowMatchHeunDiscreteScheduler()
            handle._source.scheduler = heun
            found = generate(model, heun)
            assert "calls the denoiser twice a step" in str(handle)
        assert torch.equal(found, generate(model, heun))

    def test_one_that_counts_no_steps(self, model):
        scheduler = diffusers.DDIMScheduler()
        expected = generate(model, scheduler)
        with optimized(model, Skip("RR(R1)"), scheduler) as handle:
            assert torch.equal(generate(model, scheduler), expected)
            assert "DDIMScheduler counts no steps; announce images with" in str(handle)
            with handle.skipping.image(8):
                first = generate(model, scheduler)
            assert handle.skipping.images["model"].rows == ["RRR1R1R1"]
            with handle.skipping.image(8, calls=2):
                generate(model, scheduler, guidance=(0.0, 0.3))
            assert handle.skipping.images["model"].rows == ["RRR1R1R1"] * 2
            with handle.skipping.image(8):
                assert torch.equal(generate(model, scheduler), first)

    def test_a_model_without_a_scheduler(self, model):
        scheduler = euler()
        with optimized(model, Skip("RR(R1)"), None) as handle:
            generate(model, scheduler)
            assert "there is no scheduler; announce images" in str(handle)
            with handle.skipping.image(8):
                generate(model, scheduler)
            assert handle.skipping.images["model"].rows == ["RRR1R1R1"]


class TestOther:
    @pytest.mark.parametrize(
        ("skip", "fields", "message"),
        [
            (Skip("RRR1R1R1"), {"steps": 5}, "no plan for 5 steps: its table has 8"),
            (Skip("RRR1R1R1", scheduler="UniPC"), {}, "no plan for FlowMatchEulerDiscreteScheduler"),
            (Skip("RRR1R1R1", sigmas=(1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3)), {}, "its sigmas are others"),
        ],
    )
    def test_every_step_runs_or_it_raises(self, model, skip, fields, message):
        scheduler = euler()
        expected = generate(model, scheduler, **fields)
        with optimized(model, skip, scheduler) as handle:
            for _ in range(2):
                assert torch.equal(generate(model, scheduler, **fields), expected)
            assert message in str(handle)
            assert str(handle).count(message) == 1
        with (
            optimized(model, dataclasses.replace(skip, on_other="error"), scheduler),
            pytest.raises(PipelineError, match="use on_other='run'"),
        ):
            generate(model, scheduler, **fields)

    def test_the_sigmas_of_the_search(self, model):
        scheduler = euler()
        scheduler.set_timesteps(8)
        skip = Skip("RRR1R1R1", sigmas=tuple(scheduler.sigmas.tolist()), scheduler=type(scheduler).__name__)
        with optimized(model, skip, scheduler) as handle:
            generate(model, scheduler)
            assert handle.skipping.images["model"].rows == ["RRR1R1R1"]
