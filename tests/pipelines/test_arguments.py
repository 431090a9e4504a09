"""Strides of a batch of one: made equal where they mean nothing, left alone where they mean something."""

import torch

import tritium
from support import small_pipelines
from tritium import CompilationConfig, Plan
from tritium.pipelines import arguments


def part(batch=1):
    """A slice of the tokens of a batch."""
    return torch.arange(batch * 12.0).reshape(batch, 6, 2)[:, 2:]


def test_a_slice_of_a_batch_of_one_gets_strides_of_a_new_tensor():
    given = part()
    made = arguments.even(given)
    assert given.stride() == (12, 2, 1)
    assert made.stride() == (8, 2, 1) == torch.empty(1, 4, 2).stride()
    assert torch.equal(made, given)
    assert made.data_ptr() == given.data_ptr()


def test_what_is_no_such_slice_is_left_alone():
    marked = part()
    torch._dynamo.mark_dynamic(marked, 1)
    for value in (
        None,
        torch.tensor(1.0),
        torch.ones(1),
        torch.ones(1, 4, 2),
        torch.ones(1, 0, 2),
        part(batch=2),
        part().transpose(1, 2),
        part().requires_grad_(),
        torch.nn.Parameter(part()),
        marked,
    ):
        assert arguments.even(value) is value


def test_arguments_by_place_and_by_name():
    def call(x, *, y, z):
        return x.stride(0), y.stride(0), z

    assert arguments.with_even_strides(call)(part(), y=part(), z="z") == (8, 8, "z")


def test_single_stream_blocks_share_one_graph():
    pipe = small_pipelines.flux()
    blocks = {"transformer": ("FluxTransformerBlock", "FluxSingleTransformerBlock")}
    with tritium.optimize(
        pipe, Plan(config=CompilationConfig(engine="eager"), blocks=blocks, progress=False)
    ) as handle:
        small_pipelines.generate(pipe)
        records = handle.report.records
    assert len(pipe.transformer.single_transformer_blocks) > 1
    assert sum("FluxSingleTransformerBlock" in record.function for record in records) == 1
    assert not [record.recompile for record in records if record.recompile is not None]
