"""Weights of channels-last convolutions may change, and what follows or precedes them keeps its strides and memory."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tritium
from support.channels_last import EAGER, STATIC_IF_THOROUGH, Stack, compile_eagerly, entry_of, image
from support.fidelity import assert_no_worse
from tritium.compiler.passes.channels_last import convert, region


@pytest.mark.usefixtures("anywhere")
class TestWeights:
    """They are frozen values, whose tests are in test_freezing."""

    @pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
    @pytest.mark.parametrize("enable_freezing", [False, True])
    def test_a_change_is_seen(self, layout, enable_freezing):
        model, x = Stack(), image()
        compiled = torch.compile(model, backend=tritium.Backend(EAGER.with_(enable_freezing=enable_freezing)))
        with torch.inference_mode():
            before = compiled(x)
        assert len(tritium.explain(compiled).frozen) == 3
        model.convs[1].weight.data = torch.randn(8, 8, 3, 3).to(memory_format=layout)
        with torch.inference_mode():
            after = compiled(x)
            torch.testing.assert_close(after, model(x))
        assert not torch.equal(before, after)

    def test_without_freezing_nothing_else_is_frozen(self):
        class Scaled(Stack):
            def forward(self, x):
                return super().forward(x) * (self.norm.weight.exp() + 1)[:, None, None]

        compiled = compile_eagerly(Scaled())
        with torch.no_grad():
            compiled(image())
        sources = [source for entry in tritium.explain(compiled).frozen for source in entry["sources"]]
        assert sources == [f"self.convs.{index}.weight" for index in range(3)]

    def test_those_that_are_channels_last_stay(self):
        model, x = Stack().to(memory_format=torch.channels_last), image()
        compiled = compile_eagerly(model)
        with torch.no_grad():
            torch.testing.assert_close(compiled(x), model(x))
            assert compiled(x).stride() == model(x).stride()
        assert tritium.explain(compiled).frozen == []


def _fill(y, value):
    y[:, :2] = value
    return y


def _two_views(y):
    tokens = y.permute(0, 2, 3, 1).reshape(2, -1, 8)
    return tokens, y.permute(0, 2, 3, 1).reshape(2, -1, 4, 2)


# What may stand after a convolution, by name; each gives a tensor or several.
AFTER = {
    "view": lambda y: y.view(2, 4, 2, -1),
    "view of all": lambda y: y.view(2, -1),
    "view as bits": lambda y: y.view(torch.int32),
    "view_as_complex": lambda y: torch.view_as_complex(y.view(2, 8, 6, 4, 2)),
    "as_strided": lambda y: y.as_strided((2, 3), (5, 7)),
    "flatten": lambda y: y.flatten(1),
    "tokens": lambda y: y.flatten(2).transpose(1, 2),
    "tokens, packed": lambda y: y.permute(0, 2, 3, 1).reshape(2, -1, 8),
    "two views of what was copied": _two_views,
    "chunks": lambda y: y.chunk(2, 1),
    "unbind": lambda y: y.unbind(1),
    "a slice": lambda y: y[:, 1:3, ::2],
    "relu_": lambda y: y.relu_(),
    "relu in place": lambda y: F.relu(y, inplace=True),
    "leaky relu in place, by position": lambda y: F.leaky_relu(y, 0.1, True),
    "add_ after a reader": lambda y: (y * 2, y.add_(1)),
    "iadd": lambda y: y.__iadd__(1),
    "a write through a view": lambda y: (y[:, :2].mul_(3), y + 1),
    "setitem": lambda y: _fill(y, 4.0),
    "a write to a copy": lambda y: (y.permute(0, 2, 3, 1).contiguous().add_(1), y * 2),
    "a write to a reshaped copy": lambda y: (y.permute(0, 2, 3, 1).reshape(2, -1, 8).add_(1), y * 2),
    "empty_like": lambda y: torch.zeros_like(y) + y,
    "numbers": lambda y: y * (y.stride(1) + y.is_contiguous()),
    "cumsum": lambda y: y.cumsum(1),
    "sort": lambda y: y.sort(dim=1).values,
    "index": lambda y: y[:, torch.tensor([2, 0])],
    "upsampled": lambda y: F.interpolate(y, scale_factor=2.0),
    "pixel shuffle": lambda y: F.pixel_shuffle(y, 2),
    "twice": lambda y: (y, y),
    "with itself": lambda y: (y, y.contiguous(), y.clone()),
    "with a view": lambda y: (y.view(2, -1), y, y.permute(0, 2, 3, 1), y[:, 1]),
    "with views of one frame": lambda y: (y[:, :, :1], y[:, :, :1].squeeze(2), y[:1]),
    "a view of strides, with itself": lambda y: (y.as_strided((2, 3), (5, 7)), y),
}


@pytest.mark.usefixtures("anywhere")
class TestWhatFollows:
    @staticmethod
    def same(actual, expected) -> None:
        if isinstance(expected, tuple):
            assert len(actual) == len(expected)
            for one, other in zip(actual, expected, strict=True):
                TestWhatFollows.same(one, other)
            return
        assert actual.stride() == expected.stride()
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)

    @staticmethod
    def aliases(values) -> list[int]:
        pointers = [value.untyped_storage().data_ptr() for value in values]
        return [pointers.index(pointer) for pointer in pointers]

    @pytest.mark.parametrize("dynamic", STATIC_IF_THOROUGH)
    @pytest.mark.parametrize("after", AFTER)
    def test_values_strides_and_sharing(self, after, dynamic):
        class Model(Stack):
            def forward(self, x):
                return AFTER[after](super().forward(x))

        model, x = Model(), image()
        with torch.no_grad():
            expected = model(x.clone())
            compiled = compile_eagerly(model, dynamic=dynamic)
            actual = compiled(x)
        if after == "view as bits":
            actual, expected = actual.view(torch.float32), expected.view(torch.float32)
        self.same(actual, expected)
        if isinstance(expected, tuple):
            assert self.aliases(actual) == self.aliases(expected)
        assert entry_of(compiled)["summary"] is not None

    @pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
    @pytest.mark.parametrize(
        "between",
        [
            lambda y: y.relu_(),
            lambda y: F.elu(y, 1.0, True),
            lambda y: y.view(2, 8, -1).softmax(-1).view(y.shape),
            lambda y: torch.cat([y[:, :4], y[:, 4:] * 2], 1),
            lambda y: y.permute(0, 2, 3, 1).contiguous().add_(1).permute(0, 3, 1, 2),
            lambda y: F.layer_norm(y.permute(0, 2, 3, 1), (8,)).permute(0, 3, 1, 2).contiguous(),
            lambda y: y * torch.sigmoid(y.mean((2, 3), keepdim=True)),
            lambda y: F.pad(y, (1, 1, 1, 1), mode="reflect")[:, :, 1:-1, 1:-1],
        ],
        ids=["relu_", "elu in place", "views", "cat", "written copy", "layer norm", "squeeze and excite", "reflect"],
    )
    def test_between_two_convolutions(self, between, dynamic):
        model, x = Stack(between=between), image()
        exact = copy.deepcopy(model).double()
        compiled = compile_eagerly(model, dynamic=dynamic)
        with torch.no_grad():
            expected, actual = model(x), compiled(x)
            assert actual.stride() == expected.stride()
            assert_no_worse(actual, expected, exact(x.double()))
        assert "convolutions channels-last" in entry_of(compiled)["summary"]

    def test_a_written_input_is_not_laid_out(self):
        conv = nn.Conv2d(8, 8, 3, padding=1)

        def function(x):
            y = conv(conv(x))
            x.add_(1)
            return y + conv(x)

        x, again = (torch.ones(2, 8, 6, 8) for _ in range(2))
        with torch.no_grad():
            compiled = compile_eagerly(function)
            torch.testing.assert_close(compiled(x), function(again))
            torch.testing.assert_close(x, again)
        assert entry_of(compiled)["declined"] is not None or entry_of(compiled)["left_alone"] == {region.WRITTEN: 2}

    @pytest.mark.parametrize("after", ["tokens", "tokens, packed", "chunks", "view", "with itself", "with a view"])
    def test_the_caller_may_write_to_results(self, after):
        class Model(Stack):
            def forward(self, x):
                y = super().forward(x)
                return y, AFTER[after](y), y.permute(0, 2, 3, 1).contiguous()

        model, x = Model(), image()
        with torch.no_grad():
            actual, expected = compile_eagerly(model)(x), model(x)
            for results in (actual, expected):
                results[2].zero_()
            self.same(actual, expected)

    def test_channels_last_results_are_not_the_callers_input(self):
        """`contiguous` on the way to a convolution is where memory could come to be shared."""

        def function(x, weight):
            packed = (x * 1).permute(0, 3, 1, 2).contiguous()
            y = F.conv2d(F.conv2d(packed, weight), weight)
            return y, packed

        x, weight = torch.randn(2, 6, 8, 4), torch.randn(4, 4, 1, 1)
        with torch.no_grad():
            actual, expected = compile_eagerly(function)(x, weight), function(x, weight)
        self.same(actual, expected)


def convolutions(count, **options):
    return nn.Sequential(*(nn.Conv2d(8, 8, 3, padding=1, **options) for _ in range(count)))


# What lies between the two convolutions is no image.
APART = nn.Sequential(*convolutions(1), nn.Flatten(1), nn.Softmax(1), nn.Unflatten(1, (8, 6, 8)), *convolutions(1))


@pytest.mark.usefixtures("anywhere")
@pytest.mark.parametrize(
    ("model", "x", "reason"),
    [
        (convolutions(1), image(), region.ALONE),
        (APART, image(), region.ALONE),
        (nn.Conv1d(8, 8, 3), torch.randn(2, 8, 9), "no 2-D or 3-D convolution"),
        (convolutions(2, groups=2), image(), region.GROUPED),
        (convolutions(2).double(), image().double(), "float64"),
        (convolutions(2), image()[0], region.NO_BATCH),
    ],
)
def test_a_graph_is_left_alone_for_a_reason(model, x, reason):
    compiled = compile_eagerly(model)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x))
    assert reason in entry_of(compiled)["declined"]


@pytest.mark.usefixtures("anywhere")
def test_autocast_cannot_be_followed():
    model, x = Stack(), image()

    def function(x):
        with torch.autocast("cpu", torch.bfloat16):
            return model(x)

    compiled = compile_eagerly(function)
    with torch.no_grad():
        actual, expected = compiled(x), function(x)
    assert actual.dtype == expected.dtype
    assert convert.NOT_FOLLOWED in entry_of(compiled)["declined"]
    torch.testing.assert_close(actual, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.usefixtures("anywhere")
def test_gradients_are_left_alone():
    compiled = compile_eagerly(Stack())
    compiled(image()).sum().backward()
    assert [entry["name"] for entry in tritium.explain(compiled).passes] == ["fuse"]
