"""Branches of guidance on several ranks: equal images, fewer calls, and pipelines that read a branch early."""

import diffusers
import pytest
import torch

import tritium
from support import small_pipelines, states
from support.denoising import WIDTH, Denoiser, euler
from support.zoo import ZOO
from tritium import CompilationConfig, Parallel, Plan, Skip
from tritium.errors import ConfigError, PipelineError

ENGINE = CompilationConfig(engine="eager")


def plan(how="eager", part="model", **fields):
    return Plan(parallel=Parallel(vae=None, **fields.pop("parallel")), config=ENGINE, progress=False, **fields).with_(
        components={part: how}
    )


def optimized(model, scheduler, cfg, how="eager", **fields):
    return tritium.optimize(model, plan(how, parallel={"cfg": cfg}, **fields), scheduler=scheduler)


def calls_of(module):
    """Count the calls that this rank computes."""
    calls = []
    module.register_forward_hook(lambda *_: calls.append(1))
    return calls


# --- loops with one call for each branch ---


@torch.no_grad()
def generate(model, scheduler, *, seed=0, steps=4, guidance=(0.0, 0.3), stop=None, guided=None, early=()):
    """Denoise noise, with one call for every guidance in the steps of `guided`.

    Raise before call `stop`. In the steps of `early`, scale the first branch before the second runs.
    """
    latents = torch.randn(1, 3, WIDTH, generator=torch.Generator().manual_seed(seed))
    scheduler.set_timesteps(steps)
    calls = 0
    for step, time in enumerate(scheduler.timesteps):
        outputs = []
        for condition in guidance if guided is None or step in guided else guidance[:1]:
            if calls == stop:
                raise InterruptedError
            outputs.append(model(latents, time, condition)[0])
            calls += 1
            if step in early:
                outputs[0] = outputs[0] * 2
        output = outputs[0]
        for other in outputs[1:]:
            output = 1.5 * output - 0.5 * other
        latents = scheduler.step(output, time, latents, return_dict=False)[0]
    return latents


def loop(cfg, guidance, how, images=2):
    """Return whether images are equal to those without parallelism, and how many calls each computed here."""
    model, scheduler = Denoiser(2), euler()
    expected = [generate(model, scheduler, seed=seed, guidance=guidance) for seed in range(images)]
    calls, counts = calls_of(model), []
    with optimized(model, scheduler, cfg, how):
        for seed, image in enumerate(expected):
            calls.clear()
            assert torch.equal(generate(model, scheduler, seed=seed, guidance=guidance), image)
            counts.append(len(calls))
    assert torch.equal(generate(model, scheduler, guidance=guidance), expected[0])
    return counts


@pytest.mark.parametrize(
    ("ranks_", "guidance", "calls"),
    [
        # Two calls in the first step, one in each of the three others, and one in each step of the second image.
        (2, (0.0, 0.3), [[5, 4], [5, 4]]),
        (2, (0.0, 0.3, 0.7), [[9, 8], [6, 4]]),
        (3, (0.0, 0.3), [[5, 4], [5, 4], [2, 0]]),
        (2, (0.0,), [[4, 4], [4, 4]]),
    ],
    ids=["two branches", "three branches on two ranks", "two branches on three ranks", "no guidance"],
)
def test_images_are_equal_and_calls_are_shared(ranks, ranks_, guidance, calls):
    assert ranks(ranks_)(loop, ranks_, guidance, "eager") == calls


def test_compiled_calls_are_shared(ranks):
    assert len(ranks(2)(loop, 2, (0.0, 0.3), "tritium")) == 2


def switched():
    model, scheduler = Denoiser(2), euler()
    kinds = [(0.0, 0.3), (0.0,), (0.0, 0.3), (0.0, 0.2, 0.3)]
    expected = [generate(model, scheduler, steps=3, guidance=kind) for kind in kinds]
    with optimized(model, scheduler, 2):
        for kind, image in zip(kinds, expected, strict=True):
            assert torch.equal(generate(model, scheduler, steps=3, guidance=kind), image)


def test_guidance_on_and_off_between_images(ranks):
    ranks(2)(switched)


def aborted():
    model, scheduler = Denoiser(2), euler()
    expected = generate(model, scheduler)
    with optimized(model, scheduler, 2):
        # In the learning step, between branches, and between steps.
        for stop in (1, 3, 4, 5):
            with pytest.raises(InterruptedError):
                generate(model, scheduler, stop=stop, seed=5)
            assert torch.equal(generate(model, scheduler), expected)


def test_an_aborted_image_leaves_nothing_behind(ranks):
    ranks(2)(aborted)


def intervals():
    model, scheduler = Denoiser(2), euler()
    for guided, early in [(range(3), ()), (range(2, 4), ()), (range(2, 4), range(6)), ((), range(6))]:
        image = {"steps": 6, "guided": guided, "early": early}
        expected = generate(model, scheduler, **image)
        with optimized(model, scheduler, 2):
            assert torch.equal(generate(model, scheduler, **image), expected)


def test_intervals_of_guidance(ranks):
    ranks(2)(intervals)


def early_read():
    model, scheduler = Denoiser(2), euler()
    expected = generate(model, scheduler)
    with optimized(model, scheduler, 2):
        with pytest.raises(PipelineError) as caught:
            generate(model, scheduler, early=range(6))
        assert torch.equal(generate(model, scheduler), expected)
    return str(caught.value)


def test_reading_a_branch_early_raises_on_all_ranks(ranks):
    messages = ranks(2)(early_read)
    assert messages[0] == messages[1]
    assert messages[0].startswith("aten.mul.Tensor reads the branch 'call' of model before the branch 'call 1' ran")


def skipped(skip, guidance):
    model, scheduler = Denoiser(2), euler()
    skip = Skip(**skip) if isinstance(skip, dict) else Skip(skip)
    alone = Plan(skip=skip, components={"model": "eager"}, progress=False)
    with tritium.optimize(model, alone, scheduler=scheduler) as handle:
        expected = [generate(model, scheduler, seed=seed, steps=8, guidance=guidance) for seed in range(2)]
        rows = handle.skipping.images["model"].rows
    with optimized(model, scheduler, 2, skip=skip) as handle:
        for seed, image in enumerate(expected):
            assert torch.equal(generate(model, scheduler, seed=seed, steps=8, guidance=guidance), image)
            assert handle.skipping.images["model"].rows == rows
    return rows


@pytest.mark.parametrize("skip", [("RRR1R1R1",), ("RRRRR1RR", "RRRDRDDR"), ("RR2RRRRR", "RRRR1R0D"), {"adaptive": 0.5}])
def test_skipping_plans_are_followed_on_all_ranks(ranks, skip):
    rows = ranks(2)(skipped, skip, (0.0, 0.3))
    assert rows[0] == rows[1]
    assert any(letter in "".join(rows[0]) for letter in "01D")


# --- stock pipelines ---


def random(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def wan():
    """As Wan 2.2: two denoisers, each for a part of the steps."""
    models = [ZOO["wan"].build() for _ in range(2)]
    parts = {"tokenizer": None, "text_encoder": None, "vae": None, "boundary_ratio": 0.6}
    pipe = diffusers.WanPipeline(scheduler=euler(shift=7.0), transformer=models[0], transformer_2=models[1], **parts)
    width = models[0].config.text_dim
    call = {"prompt_embeds": random(1, 6, width), "negative_prompt_embeds": random(1, 7, width)[:, :6]}
    return pipe, {**call, "height": 32, "width": 32, "num_frames": 5}


def qwen_image():
    model = ZOO["qwen_image"].build()
    pipe = diffusers.QwenImagePipeline(
        scheduler=euler(), vae=None, text_encoder=None, tokenizer=None, transformer=model
    )
    width = model.config.joint_attention_dim
    call = {"true_cfg_scale": 4.0, "height": 32, "width": 48}
    for name, tokens in (("prompt", 5), ("negative_prompt", 7)):
        call |= {
            f"{name}_embeds": random(1, tokens, width),
            f"{name}_embeds_mask": torch.ones(1, tokens, dtype=torch.int64),
        }
    return pipe, call


def flux():
    return small_pipelines.flux(1, 1), {
        "prompt": "a red circle",
        "negative_prompt": "a blue square",
        "true_cfg_scale": 3.0,
        "height": 32,
        "width": 32,
        "max_sequence_length": 16,
    }


def sd3():
    """Calls its denoiser once a step, with both branches in a batch."""
    model = ZOO["sd3"].build()
    names = ("vae", "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2", "text_encoder_3", "tokenizer_3")
    pipe = diffusers.StableDiffusion3Pipeline(scheduler=euler(), transformer=model, **dict.fromkeys(names))
    call = {"height": 96, "width": 96, "guidance_scale": 4.0}
    for name in ("prompt", "negative_prompt"):
        call[f"{name}_embeds"] = random(1, 4, model.config.joint_attention_dim) + len(name)
        call[f"{'negative_' if name != 'prompt' else ''}pooled_prompt_embeds"] = random(
            1, model.config.pooled_projection_dim
        )
    return pipe, call


def pipeline(name, how):
    pipe, call = globals()[name]()
    pipe.set_progress_bar_config(disable=True)

    def generate():
        generator = torch.Generator().manual_seed(0)
        output = pipe(**call, num_inference_steps=4, output_type="latent", generator=generator)
        return output[0]

    settings = plan(parallel={}).with_(
        components={
            name: how if name.startswith("transformer") else "eager"
            for name in ("transformer", "transformer_2", "vae", "text_encoder", "text_encoder_2")
            if getattr(pipe, name, None) is not None
        }
    )
    with tritium.optimize(pipe, settings.with_(techniques=())):
        expected = generate()
    calls = calls_of(pipe.transformer)
    before = states.installed(pipe.transformer)
    counts = []
    with tritium.optimize(pipe, settings.with_(techniques=(Parallel(cfg=2, vae=None),))):
        for _ in range(2):
            calls.clear()
            difference = float((generate() - expected).abs().max())
            counts.append(len(calls))
    assert states.installed(pipe.transformer) == before
    return difference, counts


@pytest.mark.parametrize(
    ("name", "how", "calls"),
    [
        # Wan's first denoiser has three of the four steps.
        ("wan", "eager", [4, 3]),
        ("qwen_image", "eager", [5, 4]),
        ("flux", "eager", [5, 4]),
        # Compiled calls are shared above, by a smaller model.
        pytest.param("flux", "tritium", None, marks=pytest.mark.thorough),
    ],
)
def test_pipelines_with_two_calls_a_step(ranks, name, how, calls):
    for difference, counts in ranks(2)(pipeline, name, how):
        assert difference == 0.0
        assert calls is None or counts == calls


def in_a_batch():
    pipe, call = sd3()
    pipe.set_progress_bar_config(disable=True)

    def generate():
        return pipe(**call, num_inference_steps=4, output_type="latent", generator=torch.Generator().manual_seed(0))[0]

    batch, forward = generate(), pipe.transformer.forward

    def by_rows(**arguments):
        rows = [{name: _row(value, row) for name, value in arguments.items()} for row in range(2)]
        return (torch.cat([forward(**one)[0] for one in rows]),)

    pipe.transformer.forward = by_rows
    alone = generate()
    del pipe.transformer.forward
    calls = calls_of(pipe.transformer)
    with tritium.optimize(pipe, plan(part="transformer", parallel={"cfg": 2})):
        images = [generate(), generate()]
    # The second step of the first image also compares the batch with its parts.
    assert len(calls) == 5 + 4
    assert torch.equal(images[1], alone)
    torch.testing.assert_close(images[0], batch, rtol=1e-5, atol=1e-5)
    return images


def _row(value, row):
    return value[row : row + 1] if isinstance(value, torch.Tensor) else value


def test_a_pipeline_with_both_branches_in_a_batch(ranks):
    # Kernels for a batch of two may sum in another order, so images are equal to those of each branch alone.
    first, second = ranks(2)(in_a_batch)
    assert all(map(torch.equal, first, second))


def mixed_batch(batch):
    """A denoiser whose samples depend on each other, and one with an argument that has as many rows by chance."""
    model, scheduler = Mixed(), euler()
    latents, notes = torch.randn(batch, 3, WIDTH, generator=torch.Generator().manual_seed(0)), []
    for table in (torch.ones(1, WIDTH), torch.arange(batch * WIDTH).reshape(batch, WIDTH).float()):
        expected = denoise(model, scheduler, latents, table)
        with optimized(model, scheduler, 2) as handle:
            assert torch.equal(denoise(model, scheduler, latents, table), expected)
            notes.append(handle.part("model").technique_notes["parallel"].text)
    return notes


class Mixed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))

    def forward(self, latents, time, table):
        # Sums over the batch if the table has a row for each sample.
        return (latents * self.weight + (table.sum(0) if len(table) > 1 else table) * 1e-2,)


def denoise(model, scheduler, latents, table):
    scheduler.set_timesteps(4)
    with torch.no_grad():
        for time in scheduler.timesteps:
            latents = scheduler.step(model(latents, time, table)[0], time, latents, return_dict=False)[0]
    return latents


@pytest.mark.parametrize("batch", [2, 3])
def test_batches_that_cannot_be_shared_are_computed_whole(ranks, batch):
    shared, whole = ranks(2)(mixed_batch, batch)[0]
    assert "not shared" not in shared
    assert "its batch in parts differs from the whole batch by" in whole


def test_blocks_left_out_by_what_a_rank_kept_are_refused():
    with pytest.raises(ConfigError, match="leaves out blocks"):
        plan(parallel={"cfg": 2}, skip=Skip("RRBB", span=(0, 1)))
