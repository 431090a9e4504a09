"""The sparse attention kernel in every way that a sweep may choose, and what the copy engine is told of its tensors."""

import itertools

import pytest
import torch

from ops.test_contract import exact
from support.fidelity import assert_no_worse
from support.interpreter import interpreted
from tritium import device
from tritium.ops import block_sparse_attention as op
from tritium.ops.block_sparse_attention import triton as kernel

pytestmark = pytest.mark.skipif(not device.has_triton(), reason="triton is not installed")

LABELS = (
    "one token",
    "less than a block",
    "video and text, neither a multiple",
    "blocks of 128",
    "blocks of 64, several samples",
    "fewer heads of keys",
    "some queries see nothing",
    "nobody sees anything",
    "causal",
    "causal, more keys",
    "heads first in memory",
)
WAYS = list(itertools.product((True, False), (1, 2)))


def check_ways() -> int:
    checked = 0
    for sample in op.OP.samples(torch.float16, "cpu"):
        if sample.label not in LABELS:
            continue
        (truth,), plain = exact(op.OP, sample.arguments), op.reference(**sample.arguments)
        for by_tables, pieces in WAYS:
            tile = max(16, sample.arguments["block"] // pieces)
            options = {"TILE": tile, "PART": min(tile, 32), "PRECISION": "ieee", "TABLES": by_tables}
            made = kernel.run_triton(op.OP.bind(**sample.arguments), options)
            assert not made.isnan().any(), (sample.label, options)
            assert_no_worse(made, plain, truth, f"{sample.label}, {options}")
            checked += 1
    return checked


def test_every_way_in_the_interpreter():
    assert interpreted("ops.test_block_sparse_attention", "check_ways") == len(LABELS) * len(WAYS)


def laid_out(name: str) -> torch.Tensor:
    """[2, 5, 3, 64] in memory as models have it."""
    numbers = torch.arange(2 * 5 * 3 * 3 * 64).to(torch.float16)
    return {
        "tokens first": lambda: numbers[: 2 * 5 * 3 * 64].view(2, 5, 3, 64),
        "heads first": lambda: numbers[: 2 * 5 * 3 * 64].view(2, 3, 5, 64).transpose(1, 2),
        "a third of a projection": lambda: numbers.view(2, 5, 3, 3, 64)[:, :, 1],
    }[name]()


class TestTables:
    @pytest.mark.parametrize("name", ["tokens first", "heads first", "a third of a projection"])
    def test_each_head_is_found(self, name):
        tensor = laid_out(name)
        row_batch, row_head, column_head = places = kernel.places_of(tensor)
        told = kernel.table(tensor, places, 4)
        flat = tensor.as_strided(told.shape, told.strides)
        for sample, head in itertools.product(range(2), range(3)):
            row, column = sample * row_batch + head * row_head, head * column_head
            assert torch.equal(flat[row : row + 5, column : column + 64], tensor[sample, :, head])

    def test_one_token_of_any_stride(self):
        tensor = torch.randn(1, 1, 1, 64).as_strided((1, 1, 1, 64), (7, 3, 5, 1))
        assert kernel.places_of(tensor) == (0, 0, 0)
        assert kernel.table(tensor, (0, 0, 0), 16).strides == [64, 1]

    @pytest.mark.parametrize(
        "tensor",
        [
            torch.randn(2 * 5 * 3 * 64 + 1)[1:].view(2, 5, 3, 64),
            torch.randn(2, 5, 3, 65)[..., :64],
            torch.randn(2, 1, 3, 64).expand(2, 5, 3, 64),
            torch.randn(2, 3 * 5 * 64 + 4)[:, :-4].view(2, 5, 3, 64),
            torch.randn(2, 0, 3, 64),
        ],
        ids=["address", "strides", "one token for all", "samples apart", "no keys"],
    )
    def test_what_the_engine_cannot_read(self, tensor):
        assert kernel.places_of(tensor) is None


@pytest.mark.parametrize("scale", [0.0, -0.5, float("nan")])
def test_scales_that_turn_the_order_of_scores_are_declined(scale):
    sample = next(iter(op.OP.samples(torch.float32, "cpu")))
    assert "scale" in kernel.decline_triton(op.OP.bind(**{**sample.arguments, "scale": scale}))
