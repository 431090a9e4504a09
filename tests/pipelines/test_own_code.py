"""A function of a module with the parameters of its forward."""

import inspect

import pytest
import torch
from torch import nn

from tritium.pipelines.own_code import call_with_own_code


def module_of(forward):
    module = nn.Module()
    module.forward = forward
    return module


FORMS = [
    (lambda x: x, [((1,), {}), ((), {"x": 1})]),
    (lambda x, y=2, *, z=3: (x, y, z), [((1,), {}), ((1, 5), {"z": 4}), ((), {"y": 7, "x": 1})]),
    (lambda x, /, y=2: (x, y), [((1,), {"y": 4}), ((1, 3), {})]),
    (lambda x, *rest, y=2, **more: (x, rest, y, more), [((1, 2, 3), {"y": 4, "w": 5}), ((1,), {})]),
    (lambda *args, **kwargs: (args, kwargs), [((1, 2), {"a": 3}), ((), {})]),
    (lambda self, x: (self, x), [((1, 2), {}), ((1,), {"x": 2})]),
    (lambda: 1, [((), {})]),
]


@pytest.mark.parametrize(("forward", "calls"), FORMS)
def test_calls_arrive_as_they_were(forward, calls):
    module = module_of(forward)
    call = call_with_own_code(module)
    for args, kwargs in calls:
        assert call(module, *args, **kwargs) == forward(*args, **kwargs)


@pytest.mark.parametrize(("forward", "calls"), FORMS[:5])
def test_the_parameters_are_those_of_the_forward(forward, calls):
    own = list(inspect.signature(call_with_own_code(module_of(forward))).parameters.values())[1:]
    assert [(p.name, p.kind, p.default) for p in own] == [
        (p.name, p.kind, p.default) for p in inspect.signature(forward).parameters.values()
    ]


def test_a_wrong_call_is_an_error_that_names_the_argument():
    module = module_of(lambda x: x)
    with pytest.raises(TypeError, match="unexpected keyword argument 'w'"):
        call_with_own_code(module)(module, 1, w=2)


def test_hooks_run():
    module = module_of(lambda x: x + 1)
    module.register_forward_hook(lambda module, args, out: out * 10)
    assert call_with_own_code(module)(module, torch.tensor(1)) == 20


def test_each_has_code_of_its_own():
    module = module_of(lambda x: x)
    assert call_with_own_code(module).__code__ is not call_with_own_code(module).__code__


def test_one_program_for_all_spellings_of_a_call():
    module = module_of(lambda x, scale=2.0, bias=None: x * scale if bias is None else x * scale + bias)
    graphs = []

    def backend(gm, example_inputs):
        graphs.append(gm)
        return gm.forward

    call = torch.compile(call_with_own_code(module), backend=backend)
    x = torch.ones(3)
    for args, kwargs in [((x,), {}), ((), {"x": x}), ((x, 2.0), {}), ((x,), {"bias": None}), ((x, 2.0, None), {})]:
        assert torch.equal(call(module, *args, **kwargs), x * 2)
    assert len(graphs) == 1
