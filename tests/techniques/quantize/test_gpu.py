"""The pipeline that ships, quantized on a GPU: where weights are kept, captured calls, scales and steps."""

import re

import pytest
import torch

import tritium
from support.promised import Compiles
from tritium import CompilationConfig, Plan, Quantize, Steps, optimize, quality

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:tritium. quantize makes")]

STEPS = 6

# Without captures the host's time counts too, so other providers may be chosen, which round differently.
SAME = CompilationConfig(force_provider={"qk_norm_rope": "triton"})


@pytest.fixture(scope="module")
def pipe():
    pipe = tritium.load_example("cuda", torch.bfloat16)
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.fixture(scope="module")
def plain(pipe):
    with optimize(pipe, Plan(progress=False)):
        return generate(pipe)


def generate(pipe, steps=STEPS):
    generator = torch.Generator("cpu").manual_seed(0)
    return pipe(tritium.example.PROMPTS[0], num_inference_steps=steps, generator=generator, output_type="pt").images


@pytest.mark.parametrize("config", [Quantize("fp8"), Quantize("int8"), Quantize("int8-rotated")], ids=str)
def test_captured_calls_are_those_that_are_not(pipe, plain, config, capsys):
    images = {}
    for graphs in ("off", "with_compile"):
        with optimize(pipe, Plan(quantize=config, graphs=graphs, config=SAME, progress=False)) as handle:
            images[graphs] = generate(pipe)
            with Compiles() as compiles:
                assert torch.equal(generate(pipe), images[graphs])
            assert compiles.count == 0
            handle.summary()
            counts = re.findall(r"(\d+) linears in (\S+)", capsys.readouterr().out)
            assert sum(int(count) for count, _ in counts) == 49, counts
    assert torch.equal(images["off"], images["with_compile"])
    assert quality.psnr(images["off"], plain) >= 28


@pytest.mark.parametrize("format_", ["fp8", "int8", "int8-weights", "int4-weights"])
def test_weights_kept_on_the_host_come_back(pipe, plain, format_):
    before = {name: value.clone() for name, value in pipe.transformer.state_dict().items()}
    with optimize(pipe, Plan(quantize=Quantize(format_, keep="cpu"), progress=False)):
        inside = generate(pipe)
        assert quality.psnr(inside, plain) >= (18 if format_ == "int4-weights" else 28)
    after = pipe.transformer.state_dict()
    assert all(value.is_cuda and torch.equal(value, before[name]) for name, value in after.items())
    assert after.keys() == before.keys()


def test_a_captured_call_reads_the_scales_of_its_step(pipe, plain):
    images = {}
    for graphs in ("off", "with_compile"):
        plan = Plan(quantize=Quantize("int8", scales="step"), graphs=graphs, config=SAME, progress=False)
        with optimize(pipe, plan) as handle:
            handle.calibrate(list(tritium.example.PROMPTS[:2]), num_inference_steps=STEPS)
            generate(pipe)
            with Compiles() as compiles:
                images[graphs] = generate(pipe)
            assert compiles.count == 0
    assert torch.equal(images["off"], images["with_compile"])
    assert quality.psnr(images["off"], plain) >= 28


def test_a_policy_of_steps_compiles_nothing_more(pipe):
    with optimize(pipe, Plan(quantize=Quantize("fp8", steps=Steps(first=1, last=1)), progress=False)):
        generate(pipe)
        generate(pipe)
        with Compiles() as compiles:
            generate(pipe, steps=50)
        assert compiles.count == 0
