"""Recognition asks about symbolic sizes without adding guards: the same shapes compile as often as without it."""

import torch

import tritium
from support.small_models import flux, flux_inputs

EAGER = tritium.CompilationConfig(engine="eager")


class Plain:
    """A backend that looks at nothing."""

    def __init__(self) -> None:
        self.compiled = 0

    def __call__(self, gm, example_inputs):
        self.compiled += 1
        return gm.forward


class Counting(tritium.Backend):
    def __init__(self):
        super().__init__(EAGER)
        self.compiled = 0

    def __call__(self, *args, **kwargs):
        self.compiled += 1
        return super().__call__(*args, **kwargs)


def compiles(function, calls, backend, **kwargs) -> int:
    torch._dynamo.reset()
    compiled = torch.compile(function, backend=backend, **kwargs)
    with torch.inference_mode():
        for call in calls:
            compiled(*call)
    return backend.compiled


def test_sizes_that_happen_to_be_equal_stay_apart():
    """x and g have a batch of their own; the first call gives both the same number."""

    def function(x, y, g):
        return x + torch.nn.functional.silu(y) * x, g.sum(), torch.nn.functional.rms_norm(g, (8,)) * (1 + g[:1])

    def call(one, two):
        return torch.randn(one, 7, 8), torch.randn(one, 7, 8), torch.randn(two, 8)

    calls = [call(4, 4), call(5, 6), call(9, 3)]
    assert compiles(function, calls, Counting(), dynamic=True) == compiles(function, calls, Plain(), dynamic=True)


def test_a_stock_model_over_sizes():
    model = flux()
    calls = [flux_inputs(tokens) for tokens in (16, 24, 40, 9)]
    run = lambda *values: model(**dict(zip(calls[0], values, strict=True)))[0]  # noqa: E731
    tuples = [tuple(call.values()) for call in calls]
    assert compiles(run, tuples, Counting(), dynamic=True) == compiles(run, tuples, Plain(), dynamic=True)
