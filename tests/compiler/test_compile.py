"""`tritium.compile`: dims by argument name, on everything that can be compiled."""

import copy
from dataclasses import dataclass

import pytest
import torch
from torch import nn

import tritium
from support import small_vaes
from support.small_models import Block, block_inputs
from tritium.errors import ConfigError, ShapeError

EAGER = tritium.CompilationConfig(engine="eager")


@dataclass
class Inner:
    t: torch.Tensor


@dataclass
class Settings:
    inner: Inner
    options: dict


def graphs(compiled) -> int:
    return len(tritium.explain(compiled).records)


def scaled(x, y=None):
    out = x * 2
    return out if y is None else out + y.sum()


class Scaled(nn.Module):
    def forward(self, x, y=None):
        return scaled(x, y)


def as_function():
    def function(x, y=None):
        return scaled(x, y)

    return tritium.compile(function, config=EAGER, dynamic_dims={"x": [1]})


def as_instance():
    return tritium.compile(Scaled(), config=EAGER, dynamic_dims={"x": [1]})


def as_class():
    @tritium.compile(config=EAGER, dynamic_dims={"x": [1]})
    class Decorated(nn.Module):
        def forward(self, x, y=None):
            return scaled(x, y)

    return Decorated()


def as_method_decorator():
    class Decorated(nn.Module):
        @tritium.compile(config=EAGER, dynamic_dims={"x": [1]})
        def forward(self, x, y=None):
            return scaled(x, y)

    return Decorated()


@pytest.mark.parametrize("make", [as_function, as_instance, as_class, as_method_decorator])
def test_the_named_dim_changes_freely_and_no_other(make):
    compiled = make()
    with torch.inference_mode():
        for width in (4, 7, 63, 100):
            x = torch.randn(3, width)
            assert torch.equal(compiled(x), x * 2)
        assert graphs(compiled) == 1
        x = torch.randn(5, 4)
        assert torch.equal(compiled(x=x), x * 2)
        assert graphs(compiled) == 2
        x = torch.randn(6, 4)
        compiled(x)
        # Static: a third size of the first dim is a third graph, where automatic dynamic shapes would have stopped at two.
        assert graphs(compiled) == 3


def test_nested_paths_and_negative_dims():
    @tritium.compile(config=EAGER, dynamic_dims={"cfg.inner.t": [-2], "cfg.options.mask": [0], "extra.1": [0]})
    def f(cfg, extra):
        return cfg.inner.t.sum() + cfg.options["mask"].sum() + extra[1].sum()

    with torch.inference_mode():
        for size in (2, 5, 9):
            inner, mask = torch.ones(size, 3), torch.ones(size + 1)
            result = f(Settings(Inner(inner), {"mask": mask}), [torch.ones(1), torch.ones(size + 2)])
            assert result.item() == 3 * size + size + 1 + size + 2
    assert graphs(f) == 1


def test_a_star_reaches_every_tensor_of_a_list_or_dict():
    """A cache of frames holds tensors, words and nothing, side by side."""

    @tritium.compile(config=EAGER, dynamic_dims={"cache.*": [-1], "layers.*.k": [0]})
    def f(cache, layers=None):
        found = sum(item.sum() for item in cache if isinstance(item, torch.Tensor))
        return found + sum(layer["k"].sum() for layer in layers or ())

    with torch.inference_mode():
        for size in (2, 5, 9):
            layers = [{"k": torch.ones(size), "v": 1}, {"k": torch.ones(size + 1), "v": 1}]
            assert f([torch.ones(3, size), None, "word", torch.ones(size)], layers).item() == 6 * size + 1
    assert graphs(f) == 1
    with torch.inference_mode():
        assert f([None, torch.ones(2)]).item() == 2


def test_a_decoder_with_a_cache_of_frames():
    vae = small_vaes.SMALL_VAES["wan"].build()
    latents = [small_vaes.SMALL_VAES["wan"].latent(*size, frames=2) for size in ((8, 8), (8, 12), (16, 5))]
    expected = [small_vaes.decode(vae, latent) for latent in latents]
    vae.decoder = tritium.compile(vae.decoder, EAGER, dynamic_dims={"x": [-2, -1], "feat_cache.*": [-2, -1]})
    for latent, image in zip(latents, expected, strict=True):
        torch.testing.assert_close(small_vaes.decode(vae, latent), image)
    assert graphs(vae.decoder) == 2


def test_sizes_zero_and_one_are_specialised_and_right():
    f = as_function()
    with torch.inference_mode():
        for width in (1, 0, 5, 8, 1):
            x = torch.randn(3, width)
            assert torch.equal(f(x), x * 2)
    assert graphs(f) == 3


def test_the_callers_tensors_keep_no_marks():
    f, x = as_function(), torch.randn(3, 4)
    torch._dynamo.mark_dynamic(x, 0)
    before = {name: copy.copy(value) for name, value in x.__dict__.items()}
    with torch.inference_mode():
        f(x)
    assert x.__dict__ == before


def test_keyword_arguments_of_an_open_signature():
    @tritium.compile(config=EAGER, dynamic_dims={"x": [0]})
    def f(**kwargs):
        return kwargs["x"] * 2

    with torch.inference_mode():
        f(x=torch.ones(3))
        f(x=torch.ones(5))
    assert graphs(f) == 1


def test_without_dims_it_is_torch_compile():
    model, inputs = Block(), block_inputs()
    with torch.inference_mode():
        compiled = tritium.compile(model, EAGER)
        torch.testing.assert_close(compiled(*inputs), model(*inputs))
    assert tritium.explain(compiled).sites["rms_norm"].fused == 1


@pytest.mark.parametrize(
    ("dims", "call", "message"),
    [
        ({"z": [0]}, None, "'z', which is no argument; valid: 'x', 'y'"),
        ({"x": "0"}, None, "must be a list of dims"),
        ({"x": [2]}, (torch.ones(3, 4),), "dim 2 does not exist in a tensor of 2 dims"),
        ({"x": [0]}, (7,), "is a int, not a tensor"),
        ({"x.t": [0]}, (torch.ones(3),), "is a builtin_function_or_method, not a tensor"),
        ({"x.a": [0]}, ({"b": 1},), "dict has no 'a'"),
        ({"x.3": [0]}, ([1],), "list has no '3'"),
        ({"x.*": [0]}, (torch.ones(3),), "a Tensor has no items"),
        ({"x.*": [2]}, ([torch.ones(3), None],), "dim 2 does not exist in a tensor of 1 dims"),
        ({"x.missing": [0]}, (torch.ones(2),), "Tensor has no 'missing'"),
    ],
)
def test_dims_that_fit_nothing_are_errors(dims, call, message):
    def run():
        compiled = tritium.compile(scaled, config=EAGER, dynamic_dims=dims)
        if call is not None:
            compiled(*call)

    with pytest.raises(ShapeError) as error:
        run()
    assert message in str(error.value)


def test_contradictions_are_errors():
    with pytest.raises(ConfigError, match="not both"):
        tritium.compile(scaled, dynamic_dims={"x": [0]}, dynamic=True)
    with pytest.raises(ConfigError, match="sets the backend itself"):
        tritium.compile(scaled, backend="inductor")
    with pytest.raises(ConfigError, match="takes a module, a class, a method or a function, got int"):
        tritium.compile(7)


def test_inside_another_compiled_function():
    inner = as_function()

    @torch.compile(backend="eager")
    def outer(x):
        return inner(x) + 1

    x = torch.randn(3, 4)
    with torch.inference_mode():
        assert torch.equal(outer(x), x * 2 + 1)
