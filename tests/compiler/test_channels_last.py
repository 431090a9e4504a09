"""Convolutions laid out channels-last: the same numbers, the same strides, few conversions, and weights that may change."""

import copy
import json
import re
import sys

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import tritium
from support.fidelity import assert_no_worse
from support.freezing import count_freezing
from support.small_vaes import SMALL_VAES
from support.zoo.codec import CODECS
from tritium import compat
from tritium.compiler.passes import channels_last, freezing
from tritium.compiler.passes.channels_last import convert, region
from tritium.compiler.passes.channels_last.strides import order_in_memory
from tritium.compiler.pipeline import passes_for
from tritium.ops.memory_format import FORMATS

ON = tritium.CompilationConfig()
EAGER = ON.with_(engine="eager")
STATIC_IF_THOROUGH = [
    pytest.param(False, marks=pytest.mark.thorough, id="static"),
    pytest.param(True, id="dynamic"),
]


@pytest.fixture
def anywhere(monkeypatch):
    """The pass also on this CPU, where it would decline."""
    monkeypatch.setattr(channels_last, "decline", lambda device_type, fidelity: None)


def compile_eagerly(model, **kwargs):
    return torch.compile(model, backend=tritium.Backend(EAGER), **kwargs)


def entry_of(compiled) -> dict:
    """What the report says about the pass, for the graph compiled last."""
    report = tritium.explain(compiled)
    assert report.failures == []
    return [entry for entry in report.passes if entry["name"] == "channels_last"][-1]


def first(output):
    return output[0] if isinstance(output, tuple) else getattr(output, "sample", output)


def as_channels_last(inputs: dict) -> dict:
    return {
        name: value.to(memory_format=FORMATS[value.dim()])
        if isinstance(value, torch.Tensor) and value.dim() in FORMATS
        else value
        for name, value in inputs.items()
    }


def mark_dynamic(entry, inputs: dict) -> None:
    """Height and width; of the UNet, whose skip connections fix one, what the zoo says."""
    if entry.name == "sdxl_unet":
        entry.mark_dynamic(inputs)
        return
    for value in inputs.values():
        torch._dynamo.mark_dynamic(value, (value.dim() - 2, value.dim() - 1))


# Convolutions laid out, those left alone, conversions in, conversions out.
EXPECTED = {
    "sdxl_unet": (35, 0, 1, 1),
    "kl_decoder": (16, 0, 1, 0),
    "kl_encoder": (12, 0, 1, 0),
    "wan_decoder": (17, 0, 1, 1),
    "qwen_image_decoder": (17, 0, 1, 1),
    # The repeated frames before and after every video are contiguous, whatever they were repeated from.
    "ltx_video_decoder": (12, 0, 24, 0),
    # PyTorch gives up channels-last in a replicating pad; Inductor, which generates it, does not.
    "hunyuan_video_decoder": (17, 0, 19, 1),
    "dc_decoder": (7, 3, 3, 0),
}


@pytest.mark.usefixtures("anywhere")
@pytest.mark.parametrize("dynamic", STATIC_IF_THOROUGH)
@pytest.mark.parametrize("name", CODECS)
def test_numbers_and_strides_of_stock_models(name, dynamic):
    entry = CODECS[name]
    model, exact = entry.build(), entry.build(torch.float64)
    compiled = compile_eagerly(model)
    sizes = entry.sizes if dynamic else entry.sizes[:1]
    for size in sizes:
        inputs = entry.inputs(size=size)
        with torch.no_grad():
            expected, truth = first(model(**inputs)), first(exact(**entry.inputs(torch.float64, size)))
            if dynamic:
                mark_dynamic(entry, inputs)
            actual = first(compiled(**inputs))
        assert actual.stride() == expected.stride()
        assert_no_worse(actual, expected, truth, name)
    assert tritium.explain(compiled).recompiles == []
    done, left, entered, exited = EXPECTED[name]
    found = entry_of(compiled)
    assert found["summary"].startswith(f"{done} of {done + left} convolutions channels-last; activations converted ")
    converted_in, converted_out = map(int, re.search(r"(\d+)x in, (\d+)x out", found["summary"]).groups())
    # Which layout PyTorch's own convolutions give on the way depends on the CPU.
    assert entered - 1 <= converted_in <= entered
    assert converted_out == exited
    assert sum(found["left_alone"].values()) == left
    assert len(tritium.explain(compiled).frozen) == done


@pytest.mark.usefixtures("anywhere")
@pytest.mark.parametrize("name", ["kl_decoder", "wan_decoder", "hunyuan_video_decoder"])
def test_inputs_in_the_other_layout(name):
    entry = CODECS[name]
    model, exact, inputs = entry.build(), entry.build(torch.float64), as_channels_last(entry.inputs())
    compiled = compile_eagerly(model)
    with torch.no_grad():
        actual, expected = first(compiled(**inputs)), first(model(**inputs))
        assert actual.stride() == expected.stride()
        assert_no_worse(actual, expected, first(exact(**entry.inputs(torch.float64))))
    assert entry_of(compiled)["summary"].startswith(str(EXPECTED[name][0]))


@pytest.mark.usefixtures("anywhere")
def test_a_video_decoded_frame_by_frame():
    """Wan's decoder keeps frames between its calls: what it keeps leaves one graph and enters the next."""
    vae = SMALL_VAES["wan"].build()
    exact = copy.deepcopy(vae).double()
    z = torch.randn(1, 4, 3, 6, 8)
    with torch.no_grad():
        expected, truth = vae.decode(z).sample, exact.decode(z.double()).sample
        vae.decoder.compile(backend=tritium.Backend(EAGER))
        actual = vae.decode(z).sample
    assert actual.stride() == expected.stride()
    assert_no_worse(actual, expected, truth)
    entries = [entry for entry in tritium.explain(vae.decoder).passes if entry["name"] == "channels_last"]
    assert len(entries) > 1
    assert all(entry["summary"] for entry in entries)
    # Frames are kept with the strides that the model gives them, and those are no reason to compute anything again.
    norms = sum(type(module).__name__ == "WanRMS_norm" for module in vae.decoder.modules())
    graphs = [[site.fusion for site in record.sites] for record in tritium.explain(vae.decoder).records]
    assert [graph.count("channel_norm") for graph in graphs] == [norms] * len(graphs)


class Frames(nn.Module):
    """Frames are convolved one by one, and become a video, as in the upsampling of Wan's decoder."""

    def __init__(self, *, bias: bool):
        super().__init__()
        self.of_frames = nn.Conv2d(3, 8, 3, padding=1, bias=bias)
        self.of_video = nn.Conv3d(8, 8, 3, padding=1)

    def forward(self, frames):
        made = self.of_frames(frames)
        video = made.view(1, -1, *made.shape[1:]).permute(0, 2, 1, 3, 4)
        return self.of_video(F.silu(video)) + video


@pytest.mark.usefixtures("anywhere")
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_a_bias_before_views_is_added_in_the_layout_behind_them(bias, dynamic, tmp_path):
    """Inductor would write the sum as it is before the views."""
    model, frames = Frames(bias=bias), torch.randn(4, 3, 6, 8)
    exact = copy.deepcopy(model).double()
    config = EAGER.with_(graph_log_url=str(tmp_path))
    compiled = torch.compile(model, backend=tritium.Backend(config), dynamic=dynamic)
    with torch.no_grad():
        expected, actual = model(frames), compiled(frames)
    assert actual.stride() == expected.stride()
    assert_no_worse(actual, expected, exact(frames.double()))
    (text,) = [path.read_text() for path in tmp_path.rglob("01-channels_last-after.txt")]
    views = re.findall(r"(\w+): .* = \.permute\(", text)
    pinned = [name for name in re.findall(r"tritium\.channels_last\.default\((\w+)\)", text) if name in views]
    assert len(pinned) == bias


@given(st.permutations(range(4)), st.lists(st.integers(2, 5), min_size=4, max_size=4))
def test_the_order_of_dims_in_memory(order, sizes):
    packed = torch.empty(sizes)
    value = packed.permute(*order)
    assert value.permute(*order_in_memory(value)).stride() == packed.stride()
    assert order_in_memory(value[:, ::2] if value.shape[1] > 2 else value.expand(2, *value.shape)) is None


@pytest.mark.usefixtures("anywhere")
@pytest.mark.parametrize(("name", "family"), [("kl_decoder", "group_norm_silu"), ("wan_decoder", "rms_norm")])
def test_sites_are_recognised_as_before(name, family):
    entry = CODECS[name]
    sites = []
    for enabled in (True, False):
        torch._dynamo.reset()
        config = EAGER.with_(pass_config=tritium.PassConfig(enable_channels_last=enabled))
        compiled = torch.compile(entry.build(), backend=tritium.Backend(config))
        with torch.no_grad():
            compiled(**entry.inputs())
        counts = tritium.explain(compiled).sites[family]
        sites.append((counts.fused, counts.inductor, counts.declined))
    assert sites[0] == sites[1]
    assert sites[0][0] > 0


class Stack(nn.Module):
    """Three convolutions with what stands between them in a decoder."""

    def __init__(self, rank: int = 2, width: int = 8, between=None) -> None:
        super().__init__()
        kind = nn.Conv2d if rank == 2 else nn.Conv3d
        self.convs = nn.ModuleList(kind(width, width, 3, padding=1) for _ in range(3))
        self.norm = nn.GroupNorm(4, width)
        self.between = between

    def forward(self, x):
        y = F.silu(self.norm(self.convs[0](x)))
        y = self.convs[1](y) + x
        if self.between is not None:
            y = self.between(y)
        return self.convs[2](y)


def picture(rank: int = 2, width: int = 8, size: int = 6) -> torch.Tensor:
    return torch.randn(2, width, *[3] * (rank - 2), size, 8)


class TestCopies:
    """Counted where they would cost: in the graph behind AOTAutograd, and in the code that Inductor generates."""

    @staticmethod
    def clones(model, inputs, monkeypatch) -> int:
        from torch._dynamo.backends.common import aot_autograd

        graphs = []

        def keep(gm, example_inputs):
            graphs.append(gm.graph)
            return gm.forward

        monkeypatch.setattr(compat.inductor, "compile_fx", aot_autograd(fw_compiler=keep))
        with torch.no_grad():
            torch.compile(model, backend=tritium.Backend(ON), dynamic=None)(**inputs)
        copies = (torch.ops.aten.clone.default, torch.ops.aten._to_copy.default, torch.ops.aten.copy.default)
        return sum(node.target in copies for node in graphs[0].nodes)

    @pytest.mark.usefixtures("anywhere")
    @pytest.mark.parametrize("name", ["kl_decoder", "wan_decoder"])
    @pytest.mark.parametrize("dynamic", STATIC_IF_THOROUGH)
    def test_after_aot(self, name, dynamic, monkeypatch):
        entry = CODECS[name]
        counts = []
        for enabled in (True, False):
            torch._dynamo.reset()
            monkeypatch.setattr(channels_last, "decline", lambda *_, on=enabled: None if on else "off")
            inputs = entry.inputs()
            if dynamic:
                entry.mark_dynamic(inputs)
            counts.append(self.clones(entry.build(), inputs, monkeypatch))
        # Those of the model, one where the region is entered and one where it is left.
        assert counts[0] <= counts[1] + 2

    def test_in_generated_triton_code(self, in_process):
        pytest.importorskip("triton")
        found = json.loads(in_process(CODEGEN, loaded=True).splitlines()[-1])
        assert found["convolutions"] == {"2": 3, "3": 3}
        # The input, and the result for the caller.
        assert found["copies"]["2"] <= 2
        assert found["copies"]["3"] <= 2
        assert found["channels_last"] == {"2": 3, "3": 3}


# Inductor generates Triton code for a CPU as well; nothing is compiled or run.
CODEGEN = f"""
import json, re, sys
sys.path[:0] = {[path for path in sys.path if path.endswith("tests")]!r}
sys.path.insert(0, {str(__file__.rsplit("/", 2)[0])!r})
import torch
import torch.utils._triton
torch.utils._triton.triton_hash_with_backend = lambda *args, **kwargs: "none"
from torch._inductor.graph import GraphLowering
import tritium
from tritium.compiler.passes import channels_last
channels_last.decline = lambda *_: None
texts = []
def codegen_only(self):
    code = self.codegen()
    texts.append(getattr(code[0], "value", str(code[0])))
    raise RuntimeError("nothing is run here")
GraphLowering.compile_to_module = codegen_only
sys.path.insert(0, {str(__file__.rsplit("/", 1)[0])!r})
from test_channels_last import Stack, picture
options = dict(cpu_backend="triton", fx_graph_cache=False, compile_threads=1, layout_optimization=False)
found = dict(convolutions={{}}, copies={{}}, channels_last={{}})
for rank in (2, 3):
    torch._dynamo.reset()
    texts.clear()
    x = picture(rank)
    torch._dynamo.mark_dynamic(x, (rank, rank + 1))
    compiled = torch.compile(Stack(rank), backend=tritium.Backend(), options=options)
    with torch.no_grad():
        compiled(x)
    text = texts[0]
    launched = re.findall(r"(triton_\\w+?)\\.run\\(", text)
    copies = [name for name in launched if re.fullmatch(r"triton_poi_fused(_clone|_convolution|_contiguous)+_\\d+", name)]
    found["copies"][rank] = len(copies)
    found["convolutions"][rank] = text.count("extern_kernels.convolution(")
    # The stride of a result's channels, as the generated code asserts it; torch 2.14 renamed the function.
    asserted = r"assert_(?:size_stride|tensor_metadata)\\(buf\\d+, \\(2, 8, .*?\\), \\((.*?)\\)"
    strides = re.findall(asserted, text)
    found["channels_last"][rank] = sum(stride.split(", ")[1] == "1" for stride in strides)
print(json.dumps(found))
"""


CHANGES = {
    "in place": lambda conv: conv.weight.mul_(2),
    "load_state_dict": lambda conv: conv.load_state_dict(nn.Conv2d(8, 8, 3, padding=1).state_dict()),
    "load_state_dict(assign=True)": lambda conv: conv.load_state_dict(
        nn.Conv2d(8, 8, 3, padding=1).state_dict(), assign=True
    ),
    "a new parameter": lambda conv: setattr(conv, "weight", nn.Parameter(torch.randn(8, 8, 3, 3))),
    "new data": lambda conv: setattr(conv.weight, "data", torch.randn(8, 8, 3, 3)),
    "new data, channels last": lambda conv: setattr(
        conv.weight, "data", torch.randn(8, 8, 3, 3).to(memory_format=torch.channels_last)
    ),
    "copy_": lambda conv: conv.weight.copy_(torch.randn(8, 8, 3, 3)),
}


@pytest.mark.usefixtures("anywhere")
class TestWeights:
    @pytest.mark.parametrize("enable_freezing", [False, True])
    @pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
    @pytest.mark.parametrize("change", CHANGES)
    def test_a_change_is_seen(self, change, mode, enable_freezing):
        model, x = Stack(), picture()
        compiled = torch.compile(model, backend=tritium.Backend(EAGER.with_(enable_freezing=enable_freezing)))
        with mode():
            before = compiled(x)
        assert len(tritium.explain(compiled).frozen) == 3
        with torch.no_grad():
            CHANGES[change](model.convs[1])
        with mode():
            after = compiled(x)
            torch.testing.assert_close(after, model(x))
        assert not torch.equal(before, after)

    def test_they_are_laid_out_once(self, monkeypatch):
        model, x = Stack(), picture()
        runs = count_freezing(monkeypatch)
        compiled = compile_eagerly(model)
        with torch.inference_mode():
            for _ in range(3):
                compiled(x)
        assert len(runs) == 1

    def test_without_freezing_nothing_else_is_frozen(self):
        class Scaled(Stack):
            def forward(self, x):
                return super().forward(x) * (self.norm.weight.exp() + 1)[:, None, None]

        compiled = compile_eagerly(Scaled())
        with torch.no_grad():
            compiled(picture())
        sources = [source for entry in tritium.explain(compiled).frozen for source in entry["sources"]]
        assert sources == [f"self.convs.{index}.weight" for index in range(3)]

    def test_equal_blocks_keep_their_own(self):
        one, other, x = Stack(), Stack(), picture()
        with torch.no_grad():
            expected = one(x), other(x)
            for model in (one, other):
                model.compile(backend=tritium.Backend(EAGER))
            for _ in range(2):
                torch.testing.assert_close((one(x), other(x)), expected)

    def test_those_that_are_channels_last_stay(self):
        model, x = Stack().to(memory_format=torch.channels_last), picture()
        compiled = compile_eagerly(model)
        with torch.no_grad():
            torch.testing.assert_close(compiled(x), model(x))
            assert compiled(x).stride() == model(x).stride()
        assert tritium.explain(compiled).frozen == []

    def test_those_that_cannot_be_tracked_are_laid_out_on_every_call(self):
        with torch.inference_mode():
            model, x = Stack(), picture()
            compiled = compile_eagerly(model)
            torch.testing.assert_close(compiled(x), model(x))
            model.convs[0].weight.mul_(2)
            torch.testing.assert_close(compiled(x), model(x))
        assert {entry["declined"] for entry in tritium.explain(compiled).frozen} == {freezing.UNTRACKED}

    def test_a_fused_lora_is_seen(self):
        peft = pytest.importorskip("peft")
        model, x = Stack(), picture()
        config = peft.LoraConfig(r=2, target_modules=["convs.0", "convs.2"], init_lora_weights=False)
        peft.inject_adapter_in_model(config, model)
        with torch.no_grad():
            compiled = compile_eagerly(model)
            apart = compiled(x)
            torch.testing.assert_close(apart, model(x))
            model.convs[0].merge()
            model.convs[0].scaling["default"] *= 3
            torch.testing.assert_close(compiled(x), model(x))
            model.convs[0].unmerge()
            model.convs[2].merge()
            torch.testing.assert_close(compiled(x), model(x))


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

        model, x = Model(), picture()
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
        model, x = Stack(between=between), picture()
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

        model, x = Model(), picture()
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


@pytest.mark.usefixtures("anywhere")
class TestReasons:
    def declined(self, model, x) -> str:
        compiled = compile_eagerly(model)
        with torch.no_grad():
            torch.testing.assert_close(compiled(x), model(x))
        return entry_of(compiled)["declined"]

    def test_alone(self):
        assert region.ALONE in self.declined(nn.Conv2d(8, 8, 3), picture())

    def test_two_regions_of_one(self):
        """What lies between is no picture."""
        model = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.Flatten(2), nn.Linear(48, 48), nn.Unflatten(2, (6, 8)))
        model.append(nn.Flatten(1)).append(nn.Softmax(1)).append(nn.Unflatten(1, (8, 6, 8))).append(nn.Conv2d(8, 8, 3))
        assert region.ALONE in self.declined(model, picture())

    def test_none(self):
        assert self.declined(nn.Conv1d(8, 8, 3), torch.randn(2, 8, 9)) == "no 2-D or 3-D convolution"

    def test_grouped(self):
        model = nn.Sequential(*(nn.Conv2d(8, 8, 3, groups=2) for _ in range(2)))
        assert region.GROUPED in self.declined(model, picture())

    def test_float64(self):
        assert "float64" in self.declined(Stack().double(), picture().double())

    def test_no_batch(self):
        assert region.NO_BATCH in self.declined(nn.Sequential(*(nn.Conv2d(8, 8, 3) for _ in range(2))), picture()[0])

    def test_autocast(self):
        model, x = Stack(), picture()

        def function(x):
            with torch.autocast("cpu", torch.bfloat16):
                return model(x)

        compiled = compile_eagerly(function)
        with torch.no_grad():
            actual, expected = compiled(x), function(x)
        assert actual.dtype == expected.dtype
        assert convert.NOT_FOLLOWED in entry_of(compiled)["declined"]
        torch.testing.assert_close(actual, expected, rtol=2e-2, atol=2e-2)

    def test_gradients(self):
        model, x = Stack(), picture()
        compiled = compile_eagerly(model)
        compiled(x).sum().backward()
        names = [entry["name"] for entry in tritium.explain(compiled).passes]
        assert names == ["fuse"]


class TestDecline:
    def test_a_cpu_declines(self):
        compiled = compile_eagerly(Stack())
        with torch.no_grad():
            compiled(picture())
        assert entry_of(compiled)["declined"] == channels_last.ON_A_CPU
        assert not entry_of(compiled)["changed"]

    @pytest.mark.parametrize(
        ("device_type", "fidelity", "fires"),
        [("cuda", "close", True), ("cuda", "exact", False), ("cpu", "close", False), ("xpu", "close", False)],
    )
    def test_the_truth_table(self, device_type, fidelity, fires):
        assert (channels_last.decline(device_type, fidelity) is None) == fires

    def test_registration(self, monkeypatch):
        def names(config):
            return [entry.name for entry in passes_for(config, ())]

        assert names(tritium.CompilationConfig())[:3] == ["channels_last", "fuse", "convolution_bias"]
        monkeypatch.setenv("TRITIUM_PASS_CONFIG__ENABLE_CHANNELS_LAST", "0")
        assert "channels_last" not in names(tritium.CompilationConfig())


@pytest.mark.usefixtures("anywhere")
def test_the_report_says_it_in_words():
    compiled = compile_eagerly(nn.Sequential(Stack(), nn.Conv2d(8, 8, 3, groups=8)))
    with torch.no_grad():
        compiled(picture())
    text = str(tritium.explain(compiled))
    assert "3 of 4 convolutions channels-last; activations converted 1x in, 1x out (for 1x conv2d)" in text
    assert f"1x left alone: {region.GROUPED}" in text


@pytest.mark.usefixtures("anywhere")
@pytest.mark.parametrize("rank", [2, 3])
def test_compiled_by_inductor(rank):
    model, x = Stack(rank), picture(rank)
    exact = copy.deepcopy(model).double()
    compiled = torch.compile(model, backend=tritium.Backend(ON))
    with torch.inference_mode():
        expected, actual = model(x), compiled(x)
        assert actual.stride() == expected.stride()
        assert_no_worse(actual, expected, exact(x.double()))
        model.convs[0].weight.mul_(2)
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", ["kl_decoder", "wan_decoder"])
def test_on_a_gpu(name, dynamic):
    entry = CODECS[name]
    model, exact = entry.build(torch.bfloat16).cuda(), entry.build(torch.float64).cuda()
    inputs, exactly = (
        {key: value.cuda() for key, value in entry.inputs(dtype).items()} for dtype in (torch.bfloat16, torch.float64)
    )
    compiled = torch.compile(model, backend=tritium.Backend(ON))
    with torch.no_grad():
        expected, truth = first(model(**inputs)), first(exact(**exactly))
        if dynamic:
            mark_dynamic(entry, inputs)
        assert_no_worse(first(compiled(**inputs)), expected, truth, name)
    done = EXPECTED[name][0]
    assert entry_of(compiled)["summary"].startswith(f"{done} of {done} convolutions channels-last")
    assert len(tritium.explain(compiled).frozen) == done
