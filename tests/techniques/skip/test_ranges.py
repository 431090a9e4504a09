"""Ranges of blocks and attention that are left out: traces of the rebuilt suite's two caches, ControlNets, streams."""

import pytest
import torch
from torch import nn

import tritium
from support import small_models
from support.denoising import Denoiser, count_blocks, euler, generate, optimized, plan
from support.zoo import ZOO
from tritium import Choice, CompilationConfig, Plan, Skip
from tritium.errors import PipelineError


# Attention that is reused needs a part that runs eagerly, so the choice of the part has it.
def attending(model, skip, scheduler):
    choices = {"model": Choice(how="eager", skip=skip)}
    plan = Plan(config=CompilationConfig(engine="eager"), progress=False, components=choices)
    return tritium.optimize(model, plan, scheduler=scheduler)


class Affine(nn.Module):
    """Multiplies its input in place and counts, so that a value shows which blocks ran on it."""

    def __init__(self, factor, *, in_place=False):
        super().__init__()
        self.factor, self.in_place = nn.Parameter(torch.tensor(float(factor))), in_place

    def forward(self, hidden_states):
        return hidden_states.mul_(self.factor) if self.in_place else hidden_states * self.factor


class Traced(nn.Module):
    """Keeps the value after every block; the input of a step is its number, from 1."""

    def __init__(self, factors, **fields):
        super().__init__()
        self.blocks = nn.ModuleList([Affine(factor, **fields) for factor in factors])
        self.trace = []

    def forward(self, hidden_states, timestep, condition=0.0):
        for block in self.blocks:
            hidden_states = block(hidden_states)
            self.trace[-1].append(int(hidden_states.flatten()[0]))
        return (hidden_states.clone(),)


@torch.no_grad()
def trace(skip, factors, steps, *, times=1, **fields):
    model, scheduler = Traced(factors, **fields), euler()
    with optimized(model, skip, scheduler):
        for _ in range(times):
            model.trace.clear()
            scheduler.set_timesteps(steps)
            for step, time in enumerate(scheduler.timesteps):
                model.trace.append([])
                model(torch.full((1,), float(step + 1)), time)
                scheduler.step(torch.zeros(1), time, torch.zeros(1))
    return model.trace


class TestBlockCache:
    """Steps 0 and 1 compute, then every second one; blocks 2 to 5 of 7 are left out in the others."""

    SKIP = Skip.blocks(2, 6, every=2, first=1)
    # By hand: each block doubles. Step n starts from n; the kept change over blocks 2..5 of step n is 64n - 4n = 60n.
    GOLDEN = (
        [2, 4, 8, 16, 32, 64, 128],
        [4, 8, 16, 32, 64, 128, 256],
        [6, 12, 12, 12, 12, 12 + 120, 264],
        [8, 16, 32, 64, 128, 256, 512],
        [10, 20, 20, 20, 20, 20 + 240, 520],
    )

    @pytest.mark.parametrize("times", [1, 3])
    @pytest.mark.parametrize("in_place", [False, True])
    def test_golden_trace(self, in_place, times):
        assert trace(self.SKIP, [2] * 7, 5, in_place=in_place, times=times) == list(self.GOLDEN)

    def test_the_last_step_of_the_interval_is_respected(self):
        rows = trace(Skip.blocks(0, 2, every=2, first=0, until=1), [2, 2, 2], 5)
        assert rows == [[2, 4, 8], [2, 5, 10], [6, 12, 24], [8, 16, 32], [10, 20, 40]]

    def test_a_range_of_one_block(self):
        # The change of the block in step 0 is 4 - 2.
        assert trace(Skip.blocks(1, 2, every=5), [2] * 3, 5) == [
            [2, 4, 8],
            *([2 * n, 2 * n + 2, 4 * n + 4] for n in (2, 3, 4, 5)),
        ]

    def test_all_blocks(self):
        assert trace(Skip("RBB", span=(0, 3)), [3, 1, 2], 3) == [[3, 3, 6], [2, 2, 7], [3, 3, 8]]

    def test_nothing_is_left_of_an_aborted_image(self):
        model, scheduler = Denoiser(), euler()
        with optimized(model, self.SKIP_4, scheduler):
            alone = generate(model, scheduler, seed=1)
        with optimized(model, self.SKIP_4, scheduler):
            for stop in (1, 2, 3, 4):
                with pytest.raises(InterruptedError):
                    generate(model, scheduler, stop=stop)
                assert torch.equal(generate(model, scheduler, seed=1), alone)

    SKIP_4 = Skip.blocks(1, 3, every=2, first=1)


class Layer(nn.Module):
    """An attention layer as diffusers has it: with a processor."""

    def __init__(self):
        super().__init__()
        self.runs = 0

    def processor(self):
        """Stand for diffusers' attention processors."""

    def forward(self, hidden_states, *, both=False):
        self.runs += 1
        result = hidden_states + 10 * self.runs
        return (result, None) if both else result


class AttentionBlock(nn.Module):
    def __init__(self, *, both=False):
        super().__init__()
        self.attn, self.both = Layer(), both
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, hidden_states):
        result = self.attn(hidden_states, both=self.both)
        return result[0] if self.both else result


class Attending(nn.Module):
    def __init__(self, blocks, **fields):
        super().__init__()
        self.blocks = nn.ModuleList([AttentionBlock(**fields) for _ in range(blocks)])
        self.trace = []

    def forward(self, hidden_states, timestep, condition=0.0):
        for block in self.blocks:
            self.trace.append(int(block(hidden_states).flatten()[0]))
        return (hidden_states,)


class TestAttentionCache:
    """Starts at step 1, ends at step 5, every third step computes: 7 steps of 5 blocks."""

    @pytest.mark.parametrize("both", [False, True], ids=["a tensor", "a tuple"])
    def test_golden_trace(self, both):
        # A layer returns ten times how often it ran: it runs in steps 0, 1, 4 and 6 of every image.
        model, scheduler = Attending(5, both=both), euler()
        skip = Skip.attention(0, 5, every=3, first=1, until=5)
        with attending(model, skip, scheduler) as handle, torch.no_grad():
            for image in range(5):
                model.trace.clear()
                scheduler.set_timesteps(7)
                for time in scheduler.timesteps:
                    model(torch.zeros(1), time)
                    scheduler.step(torch.zeros(1), time, torch.zeros(1))
                runs = [40 * image + 10 * run for run in (1, 2, 2, 2, 3, 3, 4)]
                assert model.trace == [run for run in runs for _ in range(5)]
            assert handle.skipping.images["model"].rows == ["RRAARAR"]
            assert "attention kept in" in str(handle)
        assert all("forward" not in block.attn.__dict__ for block in model.blocks)

    def test_layers_outside_of_the_range_run(self):
        model, scheduler = Attending(4), euler()
        with attending(model, Skip("RAAA", span=(1, 3)), scheduler), torch.no_grad():
            scheduler.set_timesteps(4)
            for time in scheduler.timesteps:
                model(torch.zeros(1), time)
                scheduler.step(torch.zeros(1), time, torch.zeros(1))
        assert [block.attn.runs for block in model.blocks] == [4, 1, 1, 4]

    def test_results_that_do_not_fit_are_not_kept(self, monkeypatch):
        from tritium.techniques.skip import ranges

        monkeypatch.setattr(ranges.device, "free_memory", lambda _: 3)
        model, scheduler = Attending(2), euler()
        with attending(model, Skip("RAAA", span=(0, 2)), scheduler) as handle, torch.no_grad():
            generate(model, scheduler, steps=4)
            assert "the results of 2 attention layers take" in str(handle)
        assert [block.attn.runs for block in model.blocks] == [4, 4]


class TestStock:
    @pytest.mark.parametrize("span", [(0, 1), (0, 2), (1, 2)])
    @pytest.mark.parametrize("name", ["flux", "qwen_image", "wan", "sd3", "ltx", "chroma", "hunyuan_video", "flux2"])
    def test_an_equal_step_through_a_range_is_the_step(self, name, span):
        model, inputs, scheduler = ZOO[name].build(), ZOO[name].inputs(), euler()
        # Double and single blocks have other streams in these two.
        is_cut = span == (0, 2) and name in ("chroma", "flux2")
        with optimized(model, Skip("RRBB", span=span), scheduler) as handle, torch.no_grad():
            outputs = four_equal_steps(model, scheduler, inputs)
            assert handle.skipping.images["model"].rows == ["RRRR" if is_cut else "RRBB"], str(handle)
            assert ("no blocks are left out: the shapes of its streams differ" in str(handle)) == is_cut
        torch.testing.assert_close(outputs[2:], outputs[:2], atol=2e-5, rtol=2e-5)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("span", [(0, 1), (0, 2), (1, 3), (0, 4), (1, 6)])
    def test_residuals_of_a_controlnet_count_once(self, span, dtype):
        blocks = (2, 4)
        model, inputs, scheduler = small_models.flux(*blocks).to(dtype), small_models.flux_inputs(dtype=dtype), euler()
        residual = torch.randn(1, inputs["hidden_states"].shape[1], model.inner_dim).to(dtype)
        inputs = {
            **inputs,
            "controlnet_block_samples": [residual] * blocks[0],
            "controlnet_single_block_samples": [residual] * blocks[1],
        }
        with optimized(model, Skip("RRBB", span=span), scheduler) as handle, torch.no_grad():
            outputs = four_equal_steps(model, scheduler, inputs)
            assert handle.skipping.images["model"].rows == ["RRBB"]
        if dtype == torch.bfloat16:
            assert torch.equal(outputs[2], outputs[1])
        torch.testing.assert_close(outputs[2:], outputs[:2], atol=2e-5, rtol=2e-5)

    def test_streams_of_one_shape_are_not_confused(self):
        model, scheduler = ZOO["flux"].build(), euler()
        inputs = ZOO["flux"].inputs()
        tokens = inputs["encoder_hidden_states"].shape[1]
        inputs["hidden_states"], inputs["img_ids"] = inputs["hidden_states"][:, :tokens], inputs["img_ids"][:tokens]
        assert inputs["hidden_states"].shape[1] == tokens
        with optimized(model, Skip("RRBB", span=(0, 1)), scheduler) as handle, torch.no_grad():
            outputs = four_equal_steps(model, scheduler, inputs)
            assert handle.skipping.images["model"].rows[0].endswith("B")
        torch.testing.assert_close(outputs[3], outputs[0], atol=2e-5, rtol=2e-5)

    def test_block_executions_are_as_planned_when_compiled(self):
        model, scheduler = Denoiser(), euler()
        skip = Skip("RRBBRBRB", span=(1, 3))
        counts = count_blocks(model)
        with optimized(model, skip, scheduler):
            eager = generate(model, scheduler)
        assert sum(counts) == skip.cost(blocks=4)
        fields = {"components": {}, "blocks": {"model": ("Block",)}}
        model = Denoiser()
        with tritium.optimize(model, plan(skip, **fields), scheduler=scheduler) as handle:
            compiled = generate(model, scheduler)
            assert handle.skipping.images["model"].rows == ["RRBBRBRB"]
        torch.testing.assert_close(compiled, eager, atol=1e-6, rtol=1e-6)

    @pytest.mark.parametrize(
        ("name", "span", "message"),
        [("sdxl_unet", (0, 1), "its repeated blocks are not known"), ("flux", (0, 99), "the span ends at 99")],
    )
    def test_ranges_that_cannot_be_left_out_are_refused(self, name, span, message):
        model = ZOO[name].build()
        choice = Choice(how="eager", skip=Skip("RB", span=span))
        with pytest.raises(PipelineError, match=message):
            tritium.optimize(model, Plan(components={"model": choice}), scheduler=euler())


def four_equal_steps(model, scheduler, inputs):
    outputs = []
    scheduler.set_timesteps(4)
    for time in scheduler.timesteps:
        output = model(**inputs)
        output = output[0] if isinstance(output, tuple) else output.sample
        outputs.append(output.clone())
        scheduler.step(torch.zeros(1), time, torch.zeros(1))
    return torch.stack(outputs)
