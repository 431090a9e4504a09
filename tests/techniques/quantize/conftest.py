"""A tiny FLUX pipeline, and what tests of quantization ask of it."""

import pytest

from support import small_pipelines
from tritium import CompilationConfig, Plan, optimize


@pytest.fixture
def pipe():
    return small_pipelines.flux(1, 1)


@pytest.fixture
def quantized():
    """Optimize the denoiser of a pipeline without code generation; removed at the end of the test."""
    handles = []

    def apply(pipe, quantize, **plan):
        config = CompilationConfig(engine="eager")
        plan = {"config": config, "components": {"vae": "eager"}, "progress": False, **plan}
        handles.append(optimize(pipe, Plan(quantize=quantize, **plan)))
        return handles[-1]

    yield apply
    for handle in handles:
        handle.remove()
