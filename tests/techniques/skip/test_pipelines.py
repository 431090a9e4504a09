"""Skipping in pipelines of diffusers: guidance, image to image, two denoisers, pairs of outputs, shared denoisers."""

import threading

import diffusers
import pytest
import torch

import tritium
from support import small_pipelines
from support.denoising import Denoiser, count_blocks, euler, generate, optimized, plan
from support.zoo import ZOO
from tritium import CompilationConfig, Plan, Skip

EAGER = {"transformer": "eager", "vae": "eager"}


def optimize(pipe, skip, **fields):
    fields = {"components": EAGER, **fields}
    return tritium.optimize(pipe, Plan(config=CompilationConfig(engine="eager"), progress=False, skip=skip, **fields))


@pytest.fixture(scope="module")
def pipe():
    return small_pipelines.flux(1, 1)


class TestFlux:
    def test_one_call_and_two_calls_a_step(self, pipe):
        skip = Skip(("RRR1R1", "RRRRDD"))
        with optimize(pipe, skip) as handle:
            small_pipelines.generate(pipe, steps=6)
            assert handle.skipping.images["transformer"].rows == ["RRR1R1"]
            guided = small_pipelines.guided(pipe, steps=6)
            assert handle.skipping.images["transformer"].rows == ["RRR1R1", "RRRRDR"]
            small_pipelines.generate(pipe, steps=6)
            assert handle.skipping.images["transformer"].rows == ["RRR1R1"]
            assert torch.equal(small_pipelines.guided(pipe, steps=6), guided)

    def test_parts_without_denoising_say_why(self, pipe):
        with optimize(pipe, Skip("RR1"), components={}) as handle:
            assert "without skip: it leaves out steps of denoisers alone" in str(handle)

    def test_image_to_image_uses_the_end_of_the_table(self, pipe):
        other = diffusers.FluxImg2ImgPipeline(
            **{
                name: value
                for name, value in pipe.components.items()
                if name not in ("image_encoder", "feature_extractor")
            }
        )
        other.set_progress_bar_config(disable=True)
        calls = []
        hook = pipe.transformer.register_forward_hook(lambda *_: calls.append(1))
        skip = Skip("RRR1R1R111")
        with optimize(other, skip) as handle:
            drawn = [draw_from_image(other, 10, 0.6) for _ in range(2)]
            record = handle.skipping.images["transformer"]
        hook.remove()
        assert record.begin == 4
        assert record.rows == skip.actions(10, begin=4) == ["RRR111"]
        assert len(calls) == 2 * 3
        assert torch.equal(*drawn)

    def test_several_images_a_prompt_are_a_batch(self, pipe):
        with optimize(pipe, Skip("RRR1R1")) as handle:
            sizes = []
            for count in (1, 3, 1):
                images = pipe(
                    "a red circle",
                    num_images_per_prompt=count,
                    num_inference_steps=6,
                    height=32,
                    width=32,
                    max_sequence_length=16,
                    output_type="pt",
                    generator=torch.Generator().manual_seed(0),
                ).images
                sizes.append(len(images))
                assert handle.skipping.images["transformer"].rows == ["RRR1R1"]
        assert sizes == [1, 3, 1]


def draw_from_image(pipe, steps, strength):
    return pipe(
        "a red circle",
        image=torch.full((1, 3, 32, 32), 0.5),
        strength=strength,
        num_inference_steps=steps,
        height=32,
        width=32,
        max_sequence_length=16,
        output_type="pt",
        generator=torch.Generator().manual_seed(0),
    ).images


class Noise:
    """A pipeline with two denoisers, each for a part of the steps, as Wan 2.2."""

    device = torch.device("cpu")

    def __init__(self, boundary):
        self.scheduler, self.boundary = euler(), boundary
        self.components = {"transformer": Denoiser(3), "transformer_2": Denoiser(5), "scheduler": self.scheduler}
        self.transformer, self.transformer_2 = self.components["transformer"], self.components["transformer_2"]

    def __call__(self, steps=10, stop=None):
        calls = iter(range(10**6))

        def denoise(*args):
            if next(calls) == stop:
                raise InterruptedError
            first = (self.scheduler.step_index or 0) < self.boundary
            return (self.transformer if first else self.transformer_2)(*args)

        return generate(denoise, self.scheduler, steps=steps, guidance=(0.0, 0.3))


class TestTwoDenoisers:
    def test_each_runs_its_first_steps(self):
        pipe = Noise(boundary=6)
        counts = [count_blocks(model) for model in (pipe.transformer, pipe.transformer_2)]
        skip = Skip("RRR1R11111")
        with optimize(pipe, skip, components=dict.fromkeys(("transformer", "transformer_2"), "eager")) as handle:
            expected = pipe()
            rows = {name: record.rows for name, record in handle.skipping.images.items()}
            assert rows == {"transformer": ["RRR1R1"] * 2, "transformer_2": ["RR11"] * 2}
            done = [record.done for record in handle.skipping.images.values()]
            assert [sum(count) for count in counts] == done == [4 * 2 * 3, 2 * 2 * 5]
            assert [record.planned for record in handle.skipping.images.values()] == done
            for stop in (1, 9, 13, 17):
                with pytest.raises(InterruptedError):
                    pipe(stop=stop)
                assert torch.equal(pipe(), expected)

    def test_wan_2_2(self):
        models = [ZOO["wan"].build() for _ in range(2)]
        pipe = diffusers.WanPipeline(
            tokenizer=None,
            text_encoder=None,
            vae=diffusers.AutoencoderKLWan(base_dim=4, z_dim=4, num_res_blocks=1, dim_mult=[1, 1, 1, 1]),
            scheduler=diffusers.UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True),
            transformer=models[0],
            transformer_2=models[1],
            boundary_ratio=0.6,
        )
        pipe.set_progress_bar_config(disable=True)
        width = models[0].config.text_dim
        embeddings = [torch.randn(1, 6, width, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2)]
        calls = [0, 0]

        def counted(place):
            def count(*_):
                calls[place] += 1

            return count

        for place, model in enumerate(models):
            model.register_forward_hook(counted(place))
        eager = dict.fromkeys(("transformer", "transformer_2", "vae"), "eager")
        with optimize(pipe, Skip("RR(11R)"), components=eager) as handle:
            pipe(
                prompt_embeds=embeddings[0],
                negative_prompt_embeds=embeddings[1],
                height=64,
                width=64,
                num_frames=5,
                num_inference_steps=10,
                output_type="latent",
                generator=torch.Generator().manual_seed(0),
            )
            images = handle.skipping.images
        first, second = images["transformer"], images["transformer_2"]
        assert first.begin == 0
        assert second.begin == len(first.rows[0])
        assert first.calls + second.calls == 20
        assert second.rows[0].startswith("RR")
        assert calls == [first.calls - first.skipped, second.calls - second.skipped]
        assert sum(calls) < 20


class TestPairs:
    def test_both_outputs_are_continued(self):
        model, inputs, scheduler = ZOO["ltx2"].build(), ZOO["ltx2"].inputs(), euler()
        outputs = []
        with optimized(model, Skip("RR11"), scheduler) as handle, torch.no_grad():
            scheduler.set_timesteps(4)
            for step, time in enumerate(scheduler.timesteps):
                given = {**inputs, "hidden_states": inputs["hidden_states"] * (1 + 0.1 * step)}
                outputs.append(model(**given))
                scheduler.step(torch.zeros(1), time, torch.zeros(1))
            assert handle.skipping.images["model"].rows == ["RR11"]
        for first, second, third, fourth in zip(*outputs, strict=True):
            torch.testing.assert_close(third, 2 * second - first, atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(fourth, 3 * second - 2 * first, atol=1e-5, rtol=1e-5)
        assert len(outputs[0]) == 2


class TestShared:
    """Two pipelines with one denoiser: each image belongs to the pipeline that calls."""

    def setup(self):
        model = Denoiser()
        schedulers = [euler(), euler(shift=3.0)]
        return [Sharing(model, scheduler) for scheduler in schedulers]

    def test_images_in_turn(self):
        pipes = self.setup()
        skip = Skip(("RRR1R1R1", "RRRRDDRD"))
        alone = []
        for pipe in pipes:
            with optimize(pipe, skip, components=EAGER_ONE):
                alone.append(pipe())
        handles = [optimize(pipe, skip, components=EAGER_ONE) for pipe in pipes]
        for place in (0, 1, 1, 0, 1, 0, 0):
            assert torch.equal(pipes[place](), alone[place])
        for handle in handles:
            handle.remove()

    @pytest.mark.parametrize("stop", [1, 2, 5, 8])
    def test_an_image_of_the_other_after_an_aborted_one(self, stop):
        pipes = self.setup()
        skip = Skip(("RRR1R1R1", "RRRRDDRD"))
        with optimize(pipes[1], skip, components=EAGER_ONE):
            alone = pipes[1]()
        handles = [optimize(pipe, skip, components=EAGER_ONE) for pipe in pipes]
        with pytest.raises(InterruptedError):
            pipes[0](stop=stop)
        # The first calls may belong to either, and run.
        torch.testing.assert_close(pipes[1](), alone, atol=0.05, rtol=0.05)
        assert torch.equal(pipes[1](), alone)
        for handle in handles:
            handle.remove()

    def test_two_images_at_once(self):
        """The calls of two loops that take turns cannot be told apart, so all run."""
        pipes = self.setup()
        exact = [pipe(guidance=(0.0,)) for pipe in pipes]
        skip = Skip("R0000000")
        handles = [optimize(pipe, skip, components=EAGER_ONE) for pipe in pipes]
        loops = [pipe.steps() for pipe in pipes]
        found = [None, None]
        for values in zip(*loops, strict=True):
            found = list(values)
        assert all(map(torch.equal, found, exact))
        assert "their images take turns" in str(handles[0])
        for handle in handles:
            handle.remove()

    def test_other_threads_run_every_step(self):
        pipes = self.setup()
        exact = [pipe() for pipe in pipes]
        skip = Skip("RR(11)")
        handles = [optimize(pipe, skip, components=EAGER_ONE) for pipe in pipes]
        pipes[0]()
        found = []
        thread = threading.Thread(target=lambda: found.append(pipes[1]()))
        thread.start()
        thread.join()
        assert torch.equal(found[0], exact[1])
        assert "from several threads" in str(handles[0])
        for handle in handles:
            handle.remove()


EAGER_ONE = {"transformer": "eager"}


class Sharing:
    device = torch.device("cpu")

    def __init__(self, model, scheduler):
        self.transformer, self.scheduler = model, scheduler
        self.components = {"transformer": model, "scheduler": scheduler}

    def __call__(self, **fields):
        return generate(self.transformer, self.scheduler, **{"guidance": (0.0, 0.3), **fields})

    @torch.no_grad()
    def steps(self):
        latents = torch.randn(1, 3, 6, generator=torch.Generator().manual_seed(0))
        self.scheduler.set_timesteps(8)
        for time in self.scheduler.timesteps:
            (output,) = self.transformer(latents, time, 0.0)
            latents = self.scheduler.step(output, time, latents, return_dict=False)[0]
            yield latents


def test_controlnet_residuals_reach_skipped_steps_once(pipe):
    """A forecast of the output needs no residuals: they are in the outputs that it continues."""
    model, scheduler = Denoiser(), euler()
    with optimized(model, Skip("RRR1R1R1"), scheduler):
        found = generate(model, scheduler, guidance=(0.2,))
    exact = generate(model, scheduler, guidance=(0.2,))
    assert (found - exact).norm() / exact.norm() < 0.1


def test_switching_engines_keeps_the_plan():
    model, scheduler = Denoiser(), euler()
    skip = Skip("RRR1R1R1")
    with tritium.optimize(model, plan(skip, components={}), scheduler=scheduler) as handle:
        compiled = generate(model, scheduler)
        handle.use({"model": "eager"})
        eager = generate(model, scheduler)
        assert handle.skipping.images["model"].rows == ["RRR1R1R1"]
    torch.testing.assert_close(compiled, eager, atol=1e-5, rtol=1e-5)


def test_calibration_measures_every_step(pipe):
    """Steps that a plan skips have no inputs, so skipping pauses while quantization is measured."""
    calls = []
    hook = pipe.transformer.register_forward_hook(lambda *_: calls.append(1))
    with optimize(pipe, Skip("R00000")) as handle:
        handle.sensitivity(["a red circle"], num_inference_steps=6, height=32, width=32, max_sequence_length=16)
        assert len(calls) == 6
        small_pipelines.generate(pipe, steps=6)
        assert len(calls) == 7
    hook.remove()
