"""Stock denoisers with many blocks: code is generated for every size, and later graphs are cut as the first."""

import warnings

import pytest
import torch

import tritium
from support.families import FAMILIES, Call, code_generation, deep, tensors, unbound
from tritium import Backend, CompilationConfig, Plan, compat

# The first size, a second one, and another batch and prompt at once.
CALLS = (Call(), Call(rows=4), Call(rows=4, batch=2, text=3))

# Why no graph of a family is cut with this few blocks.
WHOLE = {"pixart": "pieces are equal", "sdxl": "pieces are equal"}

# It reads a number off the device, so its blocks are compiled one by one.
NOT_ONE_GRAPH = ("lumina2",)

# The first call computes tables, and is compiled block by block.
TABLES = ("z_image",)


def check(model, call, inputs):
    """Results of the generated graphs are those of eager mode."""
    with torch.inference_mode():
        expected = tensors(model(**inputs))
        for found, right in zip(tensors(call(**inputs)), expected, strict=True):
            torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-5)


def cuts(report):
    return [entry for record in report.records for entry in record.passes if entry.name == "reuse_blocks"]


@pytest.fixture
def texts():
    with code_generation() as texts, warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        yield texts
    assert texts
    assert not set().union(*map(unbound, texts))


def test_an_input_that_equals_a_number_the_graph_does_not_take(texts):
    """As the columns of two images of Qwen-Image: only the second input is used, and sizes have the first one's symbol."""

    def crop(table, columns, others):
        if columns != others:
            raise ValueError
        return table[: others // 2].sin()

    compiled = torch.compile(crop, backend=Backend(CompilationConfig()), dynamic=True, fullgraph=True)
    table = torch.arange(40.0).view(20, 2)
    torch.testing.assert_close(compiled(table, 8, 8), crop(table, 8, 8))
    assert tritium.explain(compiled).failures == []


@pytest.mark.parametrize(
    "name", ["sana", *(pytest.param(name, marks=pytest.mark.thorough) for name in ("flux", "qwen_image"))]
)
def test_every_size_is_symbolic(name, texts):
    family = deep(name)
    model = family.build(torch.float32).requires_grad_(False)
    compiled = torch.compile(model, backend=Backend(CompilationConfig(reuse_blocks=True)), dynamic=True)
    with compat.dynamo.floats_as_constants():
        check(model, compiled, family.inputs(Call(rows=2, batch=2, text=1)))
    report = tritium.explain(compiled)
    assert report.failures == []
    assert [entry.changed for entry in cuts(report)] == [True]


@pytest.mark.thorough
@pytest.mark.parametrize("name", FAMILIES)
def test_other_sizes_of_an_optimized_denoiser(name, texts):
    family = deep(name)
    model = family.build(torch.float32).requires_grad_(False)
    eager = family.build(torch.float32).requires_grad_(False)
    with tritium.optimize(model, Plan(progress=False)) as handle:
        for call in CALLS:
            check(eager, model, family.inputs(call))
        report = handle.report
        assert (handle.part("model").refused is not None) == (name in NOT_ONE_GRAPH)
    assert report.failures == []
    if name not in (*NOT_ONE_GRAPH, *TABLES):
        assert len(report.records) == len(CALLS)
        for entry in cuts(report):
            assert entry.failed is None
            assert entry.changed or WHOLE[name] in entry.declined
