"""Remembered launches: the same arguments elsewhere in memory, and what must not be remembered."""

import pytest
import torch

from fidelity import assert_no_worse
from tritium import ops
from tritium.ops import launch


class Compiled:
    def __init__(self):
        self.launched = []

    def __getitem__(self, grid):
        return lambda *values: self.launched.append((grid, values))


def planned(values, inputs, result):
    compiled = Compiled()
    record = [launch.Launch(compiled, (7,), tuple(values))]
    return compiled, launch._planned(record, [tensor.data_ptr() for tensor in inputs], result)


class TestPlans:
    def test_addresses_are_filled_in_and_results_made_anew(self):
        x, w, out = torch.randn(2, 3), torch.randn(3), torch.empty(2, 3)
        compiled, plan = planned([x, w, out, 1.5, None, 8], [x, w], out)
        others = [torch.randn(2, 3), torch.randn(3)]
        made = plan.launch([tensor.data_ptr() for tensor in others], torch.device("cpu"))
        assert (made.shape, made.stride(), made.dtype) == (out.shape, out.stride(), out.dtype)
        assert made.data_ptr() != out.data_ptr()
        pointers = [tensor.data_ptr() for tensor in (*others, made)]
        assert compiled.launched == [((7, 1, 1), (*pointers, 1.5, None, 8))]

    def test_several_results(self):
        x, first, second = torch.randn(2, 3), torch.empty(2, 3), torch.empty(3, 2).t()
        compiled, plan = planned([x, second, first], [x], (first, second))
        made = plan.launch([x.data_ptr()], torch.device("cpu"))
        assert [one.stride() for one in made] == [first.stride(), second.stride()]
        assert compiled.launched[0][1] == (x.data_ptr(), made[1].data_ptr(), made[0].data_ptr())

    def test_a_launch_on_a_copy_is_not_remembered(self):
        x, out = torch.randn(2, 3), torch.empty(2, 3)
        assert planned([x.clone(), out], [x], out)[1] is None

    @pytest.mark.parametrize("count", [0, 2])
    def test_only_a_single_launch_is_remembered(self, count):
        x = torch.randn(2)
        record = [launch.Launch(Compiled(), (1,), (x,))] * count
        assert launch._planned(record, [x.data_ptr()], x) is None


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.double(),
        lambda x: x[:1],
        lambda x: x.t().contiguous().t(),
        lambda x: x.unsqueeze(0),
        lambda x: [x],
    ],
    ids=["dtype", "shape", "stride", "rank", "nesting"],
)
def test_what_makes_another_signature(change):
    x = torch.randn(2, 3)

    def signature(*arguments):
        return launch._signature(arguments, [])

    assert signature(x, 1.0, None) == signature(torch.randn(2, 3), 1.0, None)
    assert signature(x, 1.0) != signature(change(x), 1.0)
    assert signature(x, 1.0) != signature(x, 2.0)


def elsewhere(value):
    """Other numbers of the same shape, strides and dtype, at another address."""
    if isinstance(value, list):
        return [elsewhere(part) for part in value]
    if not isinstance(value, torch.Tensor):
        return value
    made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    return made.copy_(torch.randn(value.shape, device=value.device, dtype=value.dtype))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "op", [op for op in ops.catalog().values() if "triton" in ops.providers(op)], ids=lambda op: op.name
)
def test_a_remembered_launch_computes_the_same(op):
    provider = ops.providers(op)["triton"]
    for sample in op.samples(torch.float32, "cuda"):
        if provider.decline(**sample.arguments) is not None:
            continue
        provider.run(*sample.arguments.values())
        for _ in range(2):
            arguments = [elsewhere(value) for value in sample.arguments.values()]
            made, plain = provider.run(*arguments), op.reference(*arguments)
            pairs = zip(made, plain, strict=True) if isinstance(made, tuple) else [(made, plain)]
            for actual, expected in pairs:
                assert_no_worse(actual, expected, expected.double(), sample.label)
