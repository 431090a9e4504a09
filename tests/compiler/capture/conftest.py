"""Static graphs are emulated on a CPU, where they are as strict; on a GPU they are CUDA's."""

import pytest

from tritium import CompilationConfig


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    return request.param


@pytest.fixture(params=["only", "with_compile"])
def config(request):
    """Both ways of capturing, without generated code."""
    return CompilationConfig(graphs=request.param, engine="eager")
