"""Skipping is outside of compiled and captured code: the same bits, no new graph, no new capture, no read of a tensor."""

import random

import pytest
import torch

import tritium
from support import small_pipelines
from support.denoising import Denoiser, Known, euler, generate, optimized, plan
from tritium import CompilationConfig, Plan, Shapes, Skip, compat
from tritium.techniques.skip.clock import HostCopy

ENGINES = {
    "eager": {"components": {"model": "eager"}},
    "compiled": {"components": {}, "config": CompilationConfig(engine="eager")},
    "captured": {"components": {}, "config": CompilationConfig(engine="eager", graphs="only")},
    "captured blocks": {
        "components": {},
        "config": CompilationConfig(engine="eager", graphs="with_compile"),
        "blocks": {"model": ("Block",)},
    },
}


def run_all(steps=8):
    return [Skip("R" * steps), Skip("(R)"), Skip("R" * steps, over="sigma"), Skip(("(R)", "(R)"))]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("skip", run_all(), ids=str)
def test_a_plan_that_runs_all_changes_no_bit(engine, skip):
    fields = ENGINES[engine]
    found = []
    for given in (None, skip):
        model, scheduler = Denoiser(), euler()
        settings = plan(given, **fields) if given is not None else plan(Skip("(R)"), **fields).with_(techniques=())
        with tritium.optimize(model, settings, scheduler=scheduler) as handle:
            assert (given is not None) == ("skip" in str(handle))
            found.append(generate(model, scheduler, guidance=(0.0, 0.3)))
    assert torch.equal(*found)


@pytest.mark.parametrize("row", ["RRR1R1R2", "RRBBRBRB", "RRRDRDRD"])
@pytest.mark.parametrize("engine", ENGINES)
def test_engines_agree(engine, row):
    skip = Skip(row, span=(1, 3) if "B" in row else None)
    model, scheduler = Denoiser(), euler()
    with optimized(model, skip, scheduler):
        expected = generate(model, scheduler, guidance=(0.0, 0.3))
    with tritium.optimize(model, plan(skip, **ENGINES[engine]), scheduler=scheduler) as handle:
        first, second = (generate(model, scheduler, guidance=(0.0, 0.3)) for _ in range(2))
        assert handle.skipping.images["model"].rows == skip.actions(8, branches=2)
    assert torch.equal(first, second)
    torch.testing.assert_close(first, expected, atol=1e-5, rtol=1e-5)


def test_captured_results_are_copied_and_not_held():
    """A capture whose result is held over its next call would copy its results for good."""
    model, scheduler = Denoiser(), euler()
    with tritium.optimize(model, plan(Skip("RRR1R1R2"), **ENGINES["captured"]), scheduler=scheduler) as handle:
        for _ in range(3):
            generate(model, scheduler)
        captures = handle.report.captures
    assert captures
    assert not any(row["copies"] for row in captures)


def test_fifty_images_with_random_plans_after_warmup():
    """After `warmup()` nothing compiles, is captured again or is refused, with plans for other steps each image."""
    pipe = small_pipelines.flux(1, 1)
    shapes = Shapes(sizes=[(32, 32)], text_tokens=16, on_violation="error")
    config = CompilationConfig(engine="eager", graphs="only")
    plan = Plan(config=config, progress=False, shapes=shapes, components={"vae": "eager"}, skip=Skip("RR(R1)"))
    chance = random.Random(0)
    with tritium.optimize(pipe, plan) as handle, torch.inference_mode():
        handle.warmup()
        assert not handle.skipping.images
        graphs, captures = compat.dynamo.graphs_compiled(), [row["bytes"] for row in handle.report.captures]
        gate = handle.part("transformer").state_of("skip").gate
        skipped = 0
        for _ in range(50):
            steps = chance.randint(2, 9)
            row = "".join(chance.choice("RR012") for _ in range(steps))
            gate.config = Skip(row)
            small_pipelines.generate(pipe, steps=steps)
            assert handle.skipping.images["transformer"].rows == Skip(row).actions()
            skipped += handle.skipping.images["transformer"].skipped
        assert skipped > 50
        assert compat.dynamo.graphs_compiled() == graphs
        assert [row["bytes"] for row in handle.report.captures] == captures
        assert not handle.violations


class Unreadable(torch.Tensor):
    """A tensor whose values cannot be read on the host."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func in (torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.__bool__, torch.Tensor.__float__):
            raise AssertionError(f"{func.__name__} reads a tensor")
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.mark.parametrize(
    "skip", [Skip("RRR1R1R2"), Skip(("RRR1R1RR", "RRRRRDDD")), Skip("RR(R1)")], ids=["orders", "derive", "cycle"]
)
def test_no_value_is_read(skip):
    scheduler = euler()
    scheduler.set_timesteps(8)
    scheduler.timesteps = scheduler.timesteps.as_subclass(Unreadable)
    scheduler.sigmas = scheduler.sigmas.as_subclass(Unreadable)
    model = Known(scheduler, lambda step, condition: step + condition)
    latents = torch.zeros(1, 3).as_subclass(Unreadable)
    with optimized(model, skip, scheduler) as handle, torch.no_grad():
        for step in range(8):
            scheduler._step_index = step
            for condition in (0.0, 1.0):
                model(latents, None, condition)
        assert handle.skipping.images["model"].rows == skip.actions(8, branches=2)


@pytest.mark.gpu
@pytest.mark.parametrize("skip", [Skip("RRR1R1R2"), Skip("RRR1R1R1", over="sigma"), Skip("RRBBRBRB", span=(1, 3))])
def test_no_call_waits_for_the_gpu(skip):
    model, scheduler = Denoiser().cuda(), euler()
    with optimized(model, skip, scheduler) as handle, torch.no_grad():
        for _ in range(2):
            scheduler.set_timesteps(8, device="cuda")
            latents = torch.ones(1, 3, 6, device="cuda")
            for time in scheduler.timesteps:
                torch.cuda.set_sync_debug_mode("error")
                try:
                    (output,) = model(latents, time)
                finally:
                    torch.cuda.set_sync_debug_mode("default")
                latents = scheduler.step(output, time, latents, return_dict=False)[0]
            assert handle.skipping.images["model"].rows == skip.actions(8)


@pytest.mark.gpu
def test_a_copy_to_the_host_arrives():
    values = torch.arange(5.0, device="cuda") * 2
    assert HostCopy(values).read() == [0.0, 2.0, 4.0, 6.0, 8.0]


def test_inside_of_a_larger_compiled_graph_every_step_runs():
    model, scheduler = Denoiser(), euler()
    expected = generate(model, scheduler)
    with optimized(model, Skip("RR(11)"), scheduler):
        outer = torch.compile(lambda *args: model(*args), backend="eager")
        found = generate(outer, scheduler)
    torch.testing.assert_close(found, expected)


def test_gradients_run_every_step():
    model, scheduler = Denoiser(), euler()
    with optimized(model, Skip("R0000000"), scheduler) as handle:
        scheduler.set_timesteps(8)
        latents = torch.ones(1, 3, 6)
        for time in scheduler.timesteps[:3]:
            (output,) = model(latents, time)
            output.sum().backward()
            scheduler.step(output.detach(), time, latents)
        assert "its output needs gradients" in str(handle)
