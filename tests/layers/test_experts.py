"""Routing, grouping, grouped products and their sums, against loops over experts."""

import pytest
import torch
import torch.nn.functional as F

from support.fidelity import assert_no_worse
from tritium import layers
from tritium.errors import ArgumentError, ArgumentTypeError
from tritium.layers import experts

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def mixture(random, tokens=33, width=64, hidden=96, count=4, top_k=2, dtype=torch.float32):
    """Tokens, their experts and weights, and the weights of the experts."""
    x = random(tokens, width, dtype=dtype)
    indices, weights = layers.route(random(tokens, count, dtype=dtype, seed=1), top_k)
    shapes = ((hidden, width), (hidden, width), (width, hidden))
    sides = [random(count, *shape, dtype=dtype, seed=2 + place) / shape[1] ** 0.5 for place, shape in enumerate(shapes)]
    return x, indices, weights, *sides


def one_by_one(x, indices, weights, gate, up, down):
    """The sum over the experts of each token, expert by expert."""
    out = torch.zeros_like(x)
    for expert in range(len(gate)):
        tokens, choice = torch.where(indices == expert)
        rows = x[tokens]
        rows = F.linear(F.silu(F.linear(rows, gate[expert])) * F.linear(rows, up[expert]), down[expert])
        out.index_add_(0, tokens, rows * weights[tokens, choice, None])
    return out


def exactly(x, indices, *others):
    return one_by_one(x.double(), indices, *(other.double() for other in others))


class TestRoute:
    def test_the_largest_of_the_softmax(self, random):
        logits = random(7, 5)
        indices, weights = layers.route(logits, 2)
        shares = logits.softmax(-1)
        assert torch.equal(weights, shares.gather(1, indices))
        assert torch.equal(weights.sort(-1).values, shares.sort(-1).values[:, -2:])
        normal = layers.route(logits, 2, normalize=True)[1]
        torch.testing.assert_close(normal.sum(-1), torch.ones(7))

    @pytest.mark.parametrize("top_k", [0, 6])
    def test_more_experts_than_there_are(self, top_k, random):
        with pytest.raises(ArgumentError, match="top_k must be 1 to 5"):
            layers.route(random(7, 5), top_k)


class TestGroups:
    @pytest.mark.parametrize(("tokens", "count", "top_k"), [(1, 2, 1), (7, 4, 2), (63, 3, 3), (100, 64, 8), (0, 4, 2)])
    def test_as_a_stable_sort(self, tokens, count, top_k, random):
        indices = layers.route(random(tokens, count), top_k)[0]
        rows, slots, offsets = layers.group_rows(indices, count)
        order = torch.argsort(indices.flatten(), stable=True)
        assert torch.equal(rows, order // top_k)
        assert torch.equal(slots.flatten()[order], torch.arange(tokens * top_k))
        assert torch.equal(offsets, torch.bincount(indices.flatten(), minlength=count).cumsum(0).to(torch.int32))

    def test_rows_come_back(self, random):
        x = random(9, 8)
        indices, weights = layers.route(random(9, 4, seed=1), 2)
        rows, slots, _ = layers.group_rows(indices, 4)
        torch.testing.assert_close(layers.combine_rows(x[rows], slots, weights), x * weights.sum(-1, keepdim=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fused", [True, False])
def test_groups_against_single_products(dtype, fused, random):
    x, weight = random(20, 32, dtype=dtype), random(3, 16, 32, dtype=dtype, seed=1)
    offsets = torch.tensor([5, 5, 17], dtype=torch.int32)
    out = layers.grouped_linear(x, weight, offsets, fused=fused)
    expected = torch.cat([F.linear(x[:5], weight[0]), F.linear(x[5:17], weight[2]), torch.zeros(3, 16, dtype=dtype)])
    torch.testing.assert_close(out, expected)
    assert torch.equal(out[17:], expected[17:])
    assert torch.equal(layers.grouped_linear(x, list(weight), offsets, fused=fused), out)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fused", [True, False])
def test_a_mixture_is_no_worse_than_a_loop(dtype, fused, random):
    given = mixture(random, dtype=dtype)
    assert_no_worse(layers.routed_swiglu(*given, fused=fused), one_by_one(*given), exactly(*given))


@pytest.mark.parametrize("sizes", [{"tokens": 1}, {"count": 2}, {"top_k": 1}, {"width": 60, "hidden": 100}])
def test_other_sizes(sizes, random):
    given = mixture(random, **sizes)
    assert_no_worse(layers.routed_swiglu(*given), one_by_one(*given), exactly(*given))


@pytest.mark.parametrize(
    "dtype",
    [torch.bfloat16, *(pytest.param(one, marks=pytest.mark.thorough) for one in (torch.float32, torch.float64))],
)
def test_one_graph_without_a_look_at_values(dtype, random):
    given = mixture(random, dtype=dtype)
    compiled = torch.compile(layers.routed_swiglu, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(*given), layers.routed_swiglu(*given))


def test_the_order_of_experts_changes_nothing(random):
    x, indices, weights, *sides = mixture(random)
    order = torch.tensor([2, 0, 3, 1])
    renamed = torch.argsort(order)[indices]
    other = layers.routed_swiglu(x, renamed, weights, *(side[order] for side in sides))
    torch.testing.assert_close(other, layers.routed_swiglu(x, indices, weights, *sides))


def test_gradients_reach_the_weights(random):
    """The grouped product has none: then every expert computes all tokens."""
    x, indices, weights, *sides = mixture(random, tokens=5)

    def gradients(function):
        leaves = [side.clone().requires_grad_() for side in sides]
        function(x, indices, weights, *leaves).square().sum().backward()
        return [leaf.grad for leaf in leaves]

    for found, expected in zip(gradients(layers.routed_swiglu), gradients(one_by_one), strict=True):
        torch.testing.assert_close(found, expected)


def test_an_expert_without_tokens_may_overflow(random):
    x, indices, weights, *_ = mixture(random, count=4, top_k=1)
    indices = indices.clamp(max=2)
    expected = experts.every_expert(x, indices, weights, [lambda rows: rows] * 4)
    spoiled = [lambda rows: rows] * 3 + [lambda rows: rows * float("inf")]
    assert torch.equal(experts.every_expert(x, indices, weights, spoiled), expected)


class TestArguments:
    @pytest.mark.parametrize(
        ("changes", "error", "message"),
        [
            ({"indices": torch.zeros(33, 2)}, ArgumentTypeError, "indices must be int32 or int64"),
            ({"indices": torch.zeros(32, 2, dtype=torch.int64)}, ArgumentError, "weights must have shape"),
            ({"weights": torch.zeros(33, 1)}, ArgumentError, "weights must have shape"),
            ({"gate": torch.zeros(64, 96)}, ArgumentError, "gate must have rank 3"),
            ({"gate": []}, ArgumentError, "gate must be weights"),
            ({"up": torch.zeros(3, 96, 64)}, ArgumentError, "as many experts"),
            ({"x": torch.zeros(33, 64, dtype=torch.int64)}, ArgumentTypeError, "x must be float16"),
        ],
    )
    def test_of_a_mixture(self, changes, error, message, random):
        names = ("x", "indices", "weights", "gate", "up", "down")
        given = dict(zip(names, mixture(random), strict=True)) | changes
        with pytest.raises(error, match=message):
            layers.routed_swiglu(**given)

    def test_of_a_product(self, random):
        x, weight, offsets = random(8, 16), random(2, 16, 16), torch.tensor([4, 8], dtype=torch.int32)
        with pytest.raises(ArgumentError, match=r"x must be \[M, 16\]"):
            layers.grouped_linear(x[:, :8], weight, offsets)
        with pytest.raises(ArgumentError, match="offsets must have shape"):
            layers.grouped_linear(x, weight, offsets[:1])
        with pytest.raises(ArgumentTypeError, match="offsets must be int32"):
            layers.grouped_linear(x, weight, offsets.float())
