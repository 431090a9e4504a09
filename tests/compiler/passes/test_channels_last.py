"""Channels-last convolutions of stock models: the same numbers, the same strides, and few conversions."""

import copy
import re

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch._dynamo.backends.common import aot_autograd

import tritium
from support.channels_last import EAGER, ON, STATIC_IF_THOROUGH, Stack, compile_eagerly, entry_of, image
from support.fidelity import assert_no_worse
from support.small_vaes import SMALL_VAES
from support.zoo.codec import CODECS
from tiling.generated import generate
from tritium import compat
from tritium.compiler.passes import channels_last
from tritium.compiler.passes.channels_last import region
from tritium.compiler.passes.channels_last.strides import order_in_memory
from tritium.ops.memory_format import FORMATS


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
# The decoder of Qwen-Image is one of Wan's kind.
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.thorough] * (name == "qwen_image_decoder")) for name in CODECS]
)
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


class TestDecline:
    def test_a_cpu_declines(self):
        compiled = compile_eagerly(Stack())
        with torch.no_grad():
            compiled(image())
        assert entry_of(compiled)["declined"] == channels_last.ON_A_CPU
        assert not entry_of(compiled)["changed"]

    @pytest.mark.parametrize(
        ("device_type", "fidelity", "fires"),
        [("cuda", "close", True), ("cuda", "exact", False), ("cpu", "close", False), ("xpu", "close", False)],
    )
    def test_the_truth_table(self, device_type, fidelity, fires):
        assert (channels_last.decline(device_type, fidelity) is None) == fires


@pytest.mark.usefixtures("anywhere")
def test_the_report_says_it_in_words():
    compiled = compile_eagerly(nn.Sequential(Stack(), nn.Conv2d(8, 8, 3, groups=8)))
    with torch.no_grad():
        compiled(image())
    text = str(tritium.explain(compiled))
    assert "3 of 4 convolutions channels-last; activations converted 1x in, 1x out (for 1x conv2d)" in text
    assert f"1x left alone: {region.GROUPED}" in text


@pytest.mark.usefixtures("anywhere")
@pytest.mark.parametrize("rank", [2, 3])
def test_compiled_by_inductor(rank):
    model, x = Stack(rank), image(rank)
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


@pytest.mark.usefixtures("anywhere")
@pytest.mark.parametrize(("name", "family"), [("kl_decoder", "group_norm_silu"), ("wan_decoder", "rms_norm")])
def test_sites_are_recognised_as_without_the_pass(name, family):
    sites = []
    for enabled in (True, False):
        torch._dynamo.reset()
        config = EAGER.with_(pass_config=tritium.PassConfig(enable_channels_last=enabled))
        compiled = torch.compile(CODECS[name].build(), backend=tritium.Backend(config))
        with torch.no_grad():
            compiled(**CODECS[name].inputs())
        counts = tritium.explain(compiled).sites[family]
        sites.append((counts.fused, counts.inductor, counts.declined))
    assert sites[0] == sites[1]
    assert sites[0][0] > 0


@pytest.mark.usefixtures("anywhere")
@pytest.mark.parametrize("name", ["kl_decoder", pytest.param("wan_decoder", marks=pytest.mark.thorough)])
@pytest.mark.parametrize("dynamic", STATIC_IF_THOROUGH)
def test_copies_after_aot(name, dynamic, monkeypatch):
    """Copies cost in the graph behind AOTAutograd: one where the region is entered, and one where it is left."""
    counts = []
    for enabled in (True, False):
        torch._dynamo.reset()
        monkeypatch.setattr(channels_last, "decline", lambda *_, on=enabled: None if on else "off")
        inputs = CODECS[name].inputs()
        if dynamic:
            CODECS[name].mark_dynamic(inputs)
        counts.append(copies_after_aot(CODECS[name].build(), inputs, monkeypatch))
    assert counts[0] <= counts[1] + 2


def copies_after_aot(model, inputs, monkeypatch):
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
@pytest.mark.parametrize("rank", [2, 3])
def test_copies_in_generated_triton_code(rank):
    """Inductor generates Triton code for a CPU as well; nothing is compiled or run."""
    pytest.importorskip("triton")
    settings = {"layout_optimization": False}
    generated = generate(
        Stack(rank), [image(rank)], {0: (rank, rank + 1)}, backend=tritium.Backend(), settings=settings
    )
    (text,) = generated.wrappers
    assert text.count("extern_kernels.convolution(") == 3
    launched = re.findall(r"(triton_\w+?)\.run\(", text)
    copy = r"triton_poi_fused(_clone|_convolution|_contiguous)+_\d+"
    # The input, and the result for the caller.
    assert sum(bool(re.fullmatch(copy, name)) for name in launched) <= 2
    # The stride of a result's channels, as the generated code asserts it; torch 2.14 renamed the function.
    asserted = r"assert_(?:size_stride|tensor_metadata)\(buf\d+, \(2, 8, .*?\), \((.*?)\)"
    assert sum(stride.split(", ")[1] == "1" for stride in re.findall(asserted, text)) == 3
