"""Compile a function with Tritium's recognition alone, and read the sites that it reports."""

import torch

import tritium

EAGER = tritium.CompilationConfig(engine="eager")


def recognise(function, *inputs, config=EAGER, **kwargs):
    """The compiled result, and the report's sites by family."""
    torch._dynamo.reset()
    compiled = torch.compile(function, backend=tritium.Backend(config), fullgraph=True, **kwargs)
    with torch.inference_mode():
        result = compiled(*inputs)
    return result, tritium.explain(compiled).sites


def check_no_site(family, function, *inputs):
    """Assert that nothing of a family is found, and that the results are eager's."""
    result, sites = recognise(function, *inputs)
    assert sites[family].recognised == sites[family].declined == 0
    with torch.inference_mode():
        torch.testing.assert_close(result, function(*inputs))


def check_declined(family, reason, function, *inputs):
    """Assert that the one site of a family is declined for a reason, and that the results are eager's."""
    expected = function(*(value.clone() for value in inputs))
    result, sites = recognise(function, *inputs)
    assert sites[family].reasons == {reason: 1}
    assert (sites[family].recognised, sites[family].declined) == (0, 1)
    torch.testing.assert_close(result, expected)


class Counting(tritium.Backend):
    """Tritium's backend, which counts its compilations."""

    def __init__(self, config=EAGER):
        super().__init__(config)
        self.compiled = 0

    def __call__(self, *args, **kwargs):
        self.compiled += 1
        return super().__call__(*args, **kwargs)


class Plain:
    """A backend that looks at nothing, and counts its compilations."""

    def __init__(self):
        self.compiled = 0

    def __call__(self, gm, example_inputs):
        self.compiled += 1
        return gm.forward


def compiles(function, calls, backend, **kwargs) -> int:
    """The number of graphs that some calls compile."""
    torch._dynamo.reset()
    compiled = torch.compile(function, backend=backend, **kwargs)
    with torch.inference_mode():
        for call in calls:
            compiled(*call)
    return backend.compiled
