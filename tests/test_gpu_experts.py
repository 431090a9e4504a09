"""Grouped experts on a real GPU: no wait for the device, and captured calls. Run with -m gpu."""

import copy

import pytest
import torch
from diffusers.models.transformers.transformer_hidream_image import MOEFeedForwardSwiGLU

import tritium
from support.fidelity import assert_no_worse
from tritium import layers
from tritium.techniques.experts import mixture

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def given():
    torch.manual_seed(0)
    with torch.device("cuda"):
        module = MOEFeedForwardSwiGLU(512, 1024, 4, 2, _force_inference_output=True).eval()
        x = torch.randn(2, 1000, 512)
    return module.to(torch.bfloat16).requires_grad_(False), x.to(torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_no_worse_than_stock_and_no_wait(given, dtype):
    module, x = copy.deepcopy(given[0]).to(dtype), given[1].to(dtype)
    with torch.inference_mode():
        expected, exact = module(x), copy.deepcopy(module).double()(x.double())
        (found,) = mixture.find(module)
        assert mixture.group(found) is None
        compiled = torch.compile(module, fullgraph=True)
        compiled(x)
        module(x)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            eager, actual = module(x), compiled(x)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        for result in (eager, actual):
            assert_no_worse(result, expected, exact)


def test_calls_are_captured(given):
    module, x = copy.deepcopy(given[0]), given[1]
    plan = tritium.Plan(graphs="with_compile", progress=False)
    with torch.inference_mode():
        expected = module(x)
        with tritium.optimize(torch.nn.Sequential(module), plan) as handle:
            model = handle.part("model").module
            for _ in range(4):
                found = model(x)
                torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)
            (capture,) = handle.captures
            assert capture.declined is None
            assert capture.hits >= 2
            other = torch.randn_like(x)
            torch.testing.assert_close(model(other), module(other), rtol=0.02, atol=0.02)


def test_rows_beyond_the_last_group_are_zero():
    x = torch.randn(64, 128, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(3, 64, 128, device="cuda", dtype=torch.bfloat16) / 11
    offsets = torch.tensor([10, 10, 33], device="cuda", dtype=torch.int32)
    x[33:] = float("nan")
    out = layers.grouped_linear(x, weight, offsets)
    assert torch.equal(out[33:], torch.zeros_like(out[33:]))
    torch.testing.assert_close(out[:10], x[:10] @ weight[0].t(), rtol=0.02, atol=0.02)
    torch.testing.assert_close(out[10:33], x[10:33] @ weight[2].t(), rtol=0.02, atol=0.02)
