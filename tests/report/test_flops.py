"""Operations of contractions and bytes of tensors, counted from shapes."""

import pytest
import torch
from torch import fx

from tritium import ops
from tritium.report.flops import bytes_of, flops_of


def with_value(graph, name, value):
    made = graph.placeholder(name)
    made.meta["val"] = value
    return made


@pytest.mark.parametrize(
    ("target", "shapes", "extra", "flops"),
    [
        (torch.ops.aten.addmm.default, [(7,), (3, 5), (5, 7)], (), 2 * 3 * 5 * 7),
        (torch.ops.aten.bmm.default, [(2, 3, 5), (2, 5, 7)], (), 2 * 2 * 3 * 5 * 7),
        (
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
            [(2, 4, 6, 8)] * 3,
            (),
            2 * (2 * 4 * 6 * 6 * 8) * 2,
        ),
        (
            torch.ops.aten.convolution.default,
            [(1, 3, 8, 8), (5, 3, 3, 3)],
            (None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1),
            2 * 8 * 8 * 5 * 3 * 9,
        ),
        (torch.ops.aten.mul.Tensor, [(3, 5), (3, 5)], (), None),
    ],
)
def test_from_shapes(target, shapes, extra, flops):
    graph = fx.Graph()
    tensors = [torch.empty(shape, device="meta") for shape in shapes]
    inputs = [with_value(graph, f"x{index}", tensor) for index, tensor in enumerate(tensors)]
    made = graph.call_function(target, (*inputs, *extra))
    made.meta["val"] = target(*tensors, *extra)
    assert flops_of(made) == flops


def test_an_owned_op_counts_what_its_reference_contracts():
    graph = fx.Graph()
    op = ops.catalog()["linear_gelu"]
    values = list(next(iter(op.samples(torch.float32, "cpu"))).arguments.values())
    inputs = [
        with_value(graph, f"x{index}", value) if isinstance(value, torch.Tensor) else value
        for index, value in enumerate(values)
    ]
    made = graph.call_function(op.overload, tuple(inputs), {"provider": "reference"})
    assert flops_of(made) == 2 * values[0].numel() * values[1].shape[0]


def test_arguments_that_no_formula_understands_have_no_count():
    graph = fx.Graph()
    inputs = [with_value(graph, name, torch.empty(3, device="meta")) for name in "ab"]
    made = graph.call_function(torch.ops.aten.mm.default, tuple(inputs))
    made.meta["val"] = torch.empty(3, device="meta")
    assert flops_of(made) is None


def test_bytes_read_once_where_expanded():
    assert bytes_of([torch.empty(3, 5), torch.empty(1, 5).expand(9, 5), None, 2]) == 60 + 20
