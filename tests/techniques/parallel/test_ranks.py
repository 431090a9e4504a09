"""Ranks that stay together: what is refused at the install, exceptions, seeds, and the example pipeline."""

import time
import warnings

import diffusers
import peft
import pytest
import torch
import torch.distributed as dist

import tritium
from support import small_pipelines
from support.zoo import ZOO
from tritium import CompilationConfig, Parallel, Plan
from tritium.compiler import together
from tritium.errors import RankError
from tritium.pipelines import trial
from tritium.techniques.choice import Choice
from tritium.techniques.parallel import ranks as control

ENGINE = CompilationConfig(engine="eager")
EAGER = {"transformer": "eager", "vae": "eager", "text_encoder": "eager", "text_encoder_2": "eager"}


def plan(how="eager", **degrees):
    settings = Plan(parallel=Parallel(**{"vae": None} | degrees), config=ENGINE, progress=False, components=EAGER)
    return settings.with_(components={**EAGER, "transformer": how})


def pipeline():
    pipe = small_pipelines.flux(1, 1)
    pipe.set_progress_bar_config(disable=True)
    return pipe


CALL = {"prompt": "a red circle", "height": 32, "width": 32, "max_sequence_length": 16, "num_inference_steps": 4}
GUIDED = {"negative_prompt": "a blue square", "true_cfg_scale": 3.0}


def generate(pipe, seed=0, **call):
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    return pipe(**CALL | call, generator=generator, output_type="pt").images


# --- agreement at the install ---


def differing(what):
    """Return the message that this rank raises, and whether its pipeline is as it was."""
    rank, pipe = dist.get_rank(), pipeline()
    settings = plan(cfg=2)
    if what == "plan" and rank:
        settings = settings.with_(dynamic=True)
    elif what == "degrees" and rank:
        settings = plan(tensor=2)
    elif what == "weights" and rank:
        with torch.no_grad():
            next(pipe.transformer.parameters()).add_(1)
    elif what == "model" and rank:
        pipe.scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=7.0)
    elif what == "broken" and rank:
        pipe.transformer.compile()
        settings = plan("tritium", cfg=2)
    elif what == "broken":
        settings = plan("tritium", cfg=2)
    kind, before = type(pipe), set(vars(pipe.transformer))
    with pytest.raises(tritium.errors.PipelineError) as caught:
        tritium.optimize(pipe, settings)
    assert type(pipe) is kind
    assert set(vars(pipe.transformer)) == before
    return str(caught.value)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("plan", "ranks 0 and 1 cannot run one pipeline: they differ in plan.dynamic (None and True)"),
        ("degrees", "plan.techniques"),
        ("weights", "weights.transformer"),
        ("model", "models.scheduler"),
    ],
)
def test_ranks_that_differ_are_refused(ranks, what, words):
    messages = ranks(2)(differing, what)
    assert messages[0] == messages[1]
    assert words in messages[0]


def test_an_installation_that_fails_on_one_rank(ranks):
    first, second = ranks(2)(differing, "broken")
    assert first == f"rank 1 raised PipelineError: {second}"
    assert "a compiled call already" in second


# --- exceptions ---


class Fault(Exception):
    """What a rank raises in a test."""


def faulty(where, degrees, how, call):
    """Raise on rank 1 in the second step, and generate again; return what each rank raised, and the times of both."""
    rank, pipe = dist.get_rank(), pipeline()
    if where == "tiles":
        tile(pipe.vae)
    expected = generate(pipe, **call)
    steps, times = [], []

    def fail(*_, **__):
        steps.append(1)
        if rank == 1 and len(steps) == 2:
            times.append(time.monotonic())
            raise Fault("out of luck")

    def callback(_pipe, _step, _time, kwargs):
        if where == "callback":
            fail()
        return kwargs

    with tritium.optimize(pipe, plan(how, **degrees)) as handle:
        first = generate(pipe, **call)
        hook = pipe.transformer.register_forward_pre_hook(fail) if where == "denoiser" else None
        block = (
            pipe.transformer.single_transformer_blocks[0].attn.register_forward_pre_hook(fail)
            if where == "block"
            else None
        )
        if where in ("decoder", "tiles"):
            steps.append(1)
            pipe.vae.decoder.conv_in.register_forward_pre_hook(fail)
        with pytest.raises((Fault, RankError)) as caught:
            generate(pipe, **call, callback_on_step_end=callback)
        times.append(time.monotonic())
        for one in (hook, block):
            if one is not None:
                one.remove()
        pipe.vae.decoder.conv_in._forward_pre_hooks.clear()
        again = generate(pipe, **call)
        assert torch.equal(again, first)
        assert type(pipe).__name__ == "FluxPipeline"
        assert handle.active
    assert type(pipe) is diffusers.FluxPipeline
    assert torch.equal(generate(pipe, **call), expected)
    return type(caught.value).__name__, str(caught.value), times


@pytest.mark.parametrize(
    ("where", "degrees", "how", "call"),
    [
        ("callback", {"cfg": 2}, "eager", GUIDED),
        ("callback", {"cfg": 2}, "eager", {}),
        ("denoiser", {"cfg": 2}, "eager", GUIDED),
        ("decoder", {"cfg": 2}, "eager", {}),
        ("denoiser", {"tensor": 2}, "eager", {}),
        # The other rank waits in a collective inside of the denoiser.
        ("block", {"tensor": 2}, "eager", {}),
        ("tiles", {"cfg": 2, "vae": "auto"}, "eager", {}),
        ("block", {"ulysses": 2}, "eager", {}),
        pytest.param("denoiser", {"tensor": 2}, "tritium", {}, marks=pytest.mark.thorough),
    ],
    ids=["callback", "unguided", "branch", "decoder", "split", "split, inside", "tiles", "tokens", "split, compiled"],
)
def test_what_one_rank_raises_is_raised_on_all(ranks, where, degrees, how, call):
    (kind, message, (others,)), (own_kind, own, (begun, own_time)) = ranks(2)(faulty, where, degrees, how, call)
    assert (own_kind, own) == ("Fault", "out of luck")
    assert (kind, message) == ("RankError", "rank 1 raised Fault: out of luck")
    assert max(others, own_time) - begun < 5


def tile(vae):
    """Decode in four tiles, of which rank 1 computes the last."""
    scale = 2 ** (len(vae.config.block_out_channels) - 1)
    vae.enable_tiling()
    vae.tile_latent_min_size, vae.tile_sample_min_size = 32 // scale * 3 // 4, 32 * 3 // 4


def faulty_model():
    """A model without a pipeline, which raises on rank 1 in its second call."""
    model, inputs, calls = ZOO["flux"].build(), ZOO["flux"].inputs(), []

    def fail(*_):
        calls.append(1)
        if dist.get_rank() == 1 and len(calls) == 2:
            raise Fault("out of luck")

    settings = Plan(parallel=Parallel(tensor=2, vae=None), config=ENGINE, progress=False, components={"model": "eager"})
    with torch.no_grad(), tritium.optimize(model, settings):
        model.transformer_blocks[0].attn.register_forward_pre_hook(fail)
        first = model(**inputs)[0]
        with pytest.raises((Fault, RankError)) as caught:
            model(**inputs)
        assert torch.equal(model(**inputs)[0], first)
    return str(caught.value)


def test_a_model_without_a_pipeline(ranks):
    assert ranks(2)(faulty_model) == ["rank 1 raised Fault: out of luck", "out of luck"]


# --- calls ---


def seeds():
    """Return images without a generator, of global states that differ by rank."""
    pipe = pipeline()
    torch.manual_seed(dist.get_rank())
    with tritium.optimize(pipe, plan(cfg=2)):
        with pytest.warns(RuntimeWarning, match="all ranks use the seed [0-9]+ that rank 0 drew"):
            first = generate(pipe, seed=None)
        with pytest.warns(RuntimeWarning, match="no generator was given"):
            second = generate(pipe, seed=None)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            generate(pipe)
    return first, second


def test_without_a_generator_all_ranks_draw_alike(ranks):
    (first, second), (other, another) = ranks(2)(seeds)
    assert torch.equal(first, other)
    assert torch.equal(second, another)
    assert not torch.equal(first, second)


def arguments():
    pipe, rank, found = pipeline(), dist.get_rank(), []
    with tritium.optimize(pipe, plan(cfg=2)):
        for seed, call in [
            (rank, {}),
            (0, {"num_inference_steps": 3 + rank}),
            (0, {"latents": torch.full((1, 4, 16), rank)}),
        ]:
            with pytest.raises(RankError) as caught:
                generate(pipe, seed, **call)
            found.append(str(caught.value))
        if rank:
            pipe.transformer.add_adapter(peft.LoraConfig(r=2, target_modules=["to_q"]))
        with pytest.raises(RankError, match="they differ in adapters"):
            generate(pipe)
        if rank:
            pipe.transformer.unload_lora()
        # One rank may show its progress.
        generate(pipe, callback_on_step_end=(lambda *_: {}) if rank else None)
    return found


def test_calls_with_other_arguments_are_refused(ranks):
    first, second = ranks(2)(arguments)
    assert first == second
    assert "were called with different arguments: they differ in generator" in first[0]
    assert "num_inference_steps (3 and 4)" in first[1]
    assert "latents" in first[2]


def steps_apart():
    """A rank that makes one call more than the other."""
    model = ZOO["wan"].build()
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=7.0)
    parts = {"tokenizer": None, "text_encoder": None, "vae": None}
    pipe = diffusers.WanPipeline(scheduler=scheduler, transformer=model, **parts)
    pipe.set_progress_bar_config(disable=True)
    embeds = torch.ones(1, 6, model.config.text_dim)
    call = {
        "prompt_embeds": embeds,
        "height": 32,
        "width": 32,
        "num_frames": 5,
        "output_type": "latent",
        "guidance_scale": 1.0,
    }

    def skip(pipe, _step, _time, kwargs):
        pipe._interrupt = dist.get_rank() == 1
        return kwargs

    def generate(**more):
        return pipe(**call, num_inference_steps=4, generator=torch.Generator().manual_seed(0), **more).frames

    with tritium.optimize(pipe, plan(cfg=2).with_(components={"transformer": "eager"})):
        expected = generate()
        with pytest.raises(RankError, match="the ranks have made different calls"):
            generate(callback_on_step_end=skip)
        assert torch.equal(generate(), expected)


def test_ranks_that_go_separate_ways_are_stopped(ranks):
    ranks(2)(steps_apart)


# --- compiling and capturing ---


def turns():
    """Return when this rank entered and left its turn."""
    ranks_ = control.control()
    dist.barrier()
    begun = []
    with together.turn("a graph"):
        begun.append(time.monotonic())
        time.sleep(0.2)
        begun.append(time.monotonic())
    with together.turn("another one"):
        pass
    return ranks_.all(True), ranks_.all(dist.get_rank() == 0), begun


def test_one_rank_compiles_first(ranks):
    (all_, some, first), (_, _, second) = ranks(2)(turns)
    assert all_
    assert not some
    assert first[1] <= second[0] or second[1] <= first[0]


def timed():
    """Time two ways to run a split part on ranks of which one is slower."""
    model, inputs = ZOO["flux"].build(), ZOO["flux"].inputs()
    settings = Plan(parallel=Parallel(tensor=2, vae=None), config=ENGINE, progress=False, components={"model": "eager"})
    with torch.no_grad(), tritium.optimize(model, settings) as handle:
        model.register_forward_hook(lambda *_: time.sleep(0.005 * dist.get_rank()))
        choices = [Choice(how="eager"), Choice(how="tritium")]
        taken = trial.timed(handle.part("model"), choices, [((), inputs)], seconds=0.01)
        return list(taken.values())


def test_ways_are_timed_alike_on_all_ranks(ranks):
    first, second = ranks(2)(timed)
    assert first == second
    assert min(first) > 5


def captured(refuses):
    model = ZOO["flux"].build()
    inputs = ZOO["flux"].inputs()
    settings = Plan(parallel=Parallel(tensor=2, vae=None), config=ENGINE, progress=False, graphs="with_compile")
    if refuses and dist.get_rank():
        from tritium.compiler.capture.region import Region

        def refuse(*_):
            raise tritium.errors.CaptureRefused("not here")

        Region._check, check = refuse, Region._check
    try:
        with torch.inference_mode(), tritium.optimize(model, settings) as handle:
            results = [model(**inputs)[0].clone() for _ in range(3)]
            rows = [(row.hits, row.declined) for row in handle.captures]
    finally:
        if refuses and dist.get_rank():
            Region._check = check
    assert all(torch.equal(one, results[0]) for one in results)
    return rows


@pytest.mark.parametrize("refuses", [False, True])
def test_all_ranks_capture_or_none(ranks, refuses):
    first, second = ranks(2)(captured, refuses)
    if refuses:
        assert first == [(0, "another rank cannot capture it, and captures contain collectives")]
        assert second == [(0, "not here")]
    else:
        assert first == second
        assert first[0][0] > 0


# --- the example pipeline ---


def grey(images):
    return (images * 255).round()


def example(guided, tokens):
    """Return whether guided branches on two ranks give equal images, and how far images of split tokens are off."""
    pipe = tritium.load_example()
    pipe.set_progress_bar_config(disable=True)

    def generate(**more):
        call = {"num_inference_steps": 4, "output_type": "pt", "generator": torch.Generator().manual_seed(0)}
        return pipe("two red circles above a blue square", **call, **more).images

    guidance = {"negative_prompt": "a blue circle", "true_cfg_scale": 2.0} if guided else {}
    alone = generate(**guidance)
    with tritium.optimize(pipe, plan(cfg=2)):
        equal = [torch.equal(generate(**guidance), alone) for _ in range(2)]
    if not tokens:
        return equal, 0, 0
    with tritium.optimize(pipe, plan(ulysses=2, vae="auto")):
        split = generate(**guidance)
    assert torch.equal(generate(**guidance), alone)
    off = (grey(split) - grey(alone)).abs()
    return equal, float(off.max()), float((off > 0).float().mean())


@pytest.mark.parametrize(
    ("guided", "tokens"),
    [pytest.param(True, False, id="guided", marks=pytest.mark.thorough), pytest.param(False, True, id="unguided")],
)
def test_the_example_on_two_ranks(ranks, guided, tokens):
    for equal, levels, share in ranks(2)(example, guided, tokens):
        assert equal == [True, True]
        assert levels <= 1
        assert share < 1e-3
