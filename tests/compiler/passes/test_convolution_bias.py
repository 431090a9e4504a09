"""Biases of convolutions that the norm after them adds: the same numbers, and only where nobody else needs them."""

import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tritium
from support import codegen
from support.fidelity import assert_no_worse
from support.interpreter import interpreted
from support.small_vaes import SMALL_VAES
from support.zoo.codec import CODECS
from tritium import device, envs, fusions
from tritium.compiler.passes import channels_last, convolution_bias
from tritium.compiler.pipeline import passes_for
from tritium.ops import channel_norm
from tritium.ops.memory_format import FORMATS
from tritium.passes import PassContext

needs_triton = pytest.mark.skipif(not device.has_triton(), reason="triton is not installed")

PINNED = {"group_norm_silu": "triton", "channel_norm": "triton"}


class Between(nn.Module):
    """Convolution, norm, convolution; subclasses say what is special."""

    bias = True

    def __init__(self):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(11)
            self.first = nn.Conv2d(3, 8, 3, padding=1, bias=self.bias)
            self.second = nn.Conv2d(8, 4, 3, padding=1)
            self.norm = nn.GroupNorm(2, 8)
            nn.init.normal_(self.norm.weight)

    def forward(self, x):
        return self.second(F.silu(self.norm(self.first(x))))


class ByName(Between):
    """The bias as a keyword, which nn.Conv2d never does."""

    def forward(self, x):
        made = F.conv2d(x, self.first.weight, padding=1, bias=self.first.bias)
        return self.second(F.silu(self.norm(made)))


class ByItself(Between):
    bias = False


class ReadTwice(Between):
    def forward(self, x):
        made = self.first(x)
        return self.second(F.silu(self.norm(made)) + made)


class Added(Between):
    """As a UNet's block adds the time between the two."""

    def forward(self, x):
        return self.second(F.silu(self.norm(self.first(x) + x.mean())))


# What the report says, whatever the layout.
EXPECTED = {
    Between: "the norms after 1 convolutions add their biases",
    ByName: "the norms after 1 convolutions add their biases",
    ByItself: convolution_bias.NOTHING_TO_DO,
    ReadTwice: f"1 biases: {convolution_bias.READ_ELSEWHERE}",
    Added: convolution_bias.NOTHING_TO_DO,
}


def compiled_by(model, providers, *, laid_out=True):
    switches = tritium.PassConfig(enable_channels_last=laid_out)
    config = tritium.CompilationConfig(engine="eager", force_provider=providers, pass_config=switches)
    return torch.compile(model, backend=tritium.Backend(config))


def said(compiled) -> str:
    report = tritium.explain(compiled)
    assert report.failures == []
    (entry,) = [entry for entry in report.passes if entry["name"] == "convolution_bias"]
    return entry["declined"] or entry["summary"]


def everywhere(replace=setattr):
    """Both passes also on this CPU and with this engine, where they would decline."""
    replace(channels_last, "decline", lambda device_type, fidelity: None)
    replace(convolution_bias, "decline", lambda device_type, engine: None)


def check_rules() -> int:
    everywhere()
    x = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    for kind, expected in EXPECTED.items():
        for laid_out in (True, False):
            model = kind().eval()
            compiled = compiled_by(model, PINNED, laid_out=laid_out)
            with torch.inference_mode():
                made, eager = compiled(x), model(x)
                exact = model.double()(x.double())
            assert said(compiled) == expected, kind
            assert_no_worse(made, eager, exact, kind.__name__)
            assert made.stride() == eager.stride()
    with torch.inference_mode():
        by_reference = compiled_by(Between().eval(), "reference")
        by_reference(x)
        assert said(by_reference) == "1 biases: 'group_norm_silu' is computed by its reference"
    return 2 * len(EXPECTED)


def check_decoder(name: str) -> int:
    """Every second norm of a residual block stands behind a convolution, and the first ones behind a sum."""
    everywhere()
    biases = DECODERS[name]
    model, inputs = CODECS[name].build().eval(), CODECS[name].inputs()
    compiled = compiled_by(model, PINNED)
    with torch.inference_mode():
        made, eager = compiled(**inputs), model(**inputs)
        exact = model.double()(**{key: value.double() for key, value in inputs.items()})
    assert said(compiled) == f"the norms after {biases} convolutions add their biases", name
    assert_no_worse(made, eager, exact, name)
    return biases


DECODERS = {"kl_decoder": 6, "wan_decoder": 6, "qwen_image_decoder": 6}


@needs_triton
def test_rules():
    assert interpreted("compiler.passes.test_convolution_bias", "check_rules") == 2 * len(EXPECTED)


@needs_triton
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "kl_decoder" else pytest.mark.thorough) for name in DECODERS]
)
def test_decoders(name):
    assert interpreted("compiler.passes.test_convolution_bias", "check_decoder", repr(name)) == DECODERS[name]


@pytest.mark.parametrize(
    ("device_type", "engine", "reason"),
    [
        ("cuda", "inductor", None),
        ("cpu", "inductor", convolution_bias.ON_A_CPU),
        ("cuda", "eager", convolution_bias.AS_EAGER_DOES),
        ("xpu", "inductor", "not measured on 'xpu'"),
    ],
)
def test_the_truth_table(device_type, engine, reason):
    assert convolution_bias.decline(device_type, engine) == reason


def lays_out_like_cudnn(x, weight, backend):
    layout = FORMATS[weight.dim()]
    wanted = any(side.is_contiguous(memory_format=layout) for side in (x, weight))
    return layout if wanted else torch.contiguous_format


def test_no_norm_of_wan_s_decoder_is_handed_another_layout(monkeypatch):
    """What is generated for the frames after the first: a norm that gets packed pixels would copy them there and back."""
    pytest.importorskip("triton")
    monkeypatch.setattr(torch._C, "_conv_determine_backend_memory_format", lays_out_like_cudnn)
    monkeypatch.setattr(envs, "triton_interpreted", lambda: True)
    lies, traced = channel_norm.is_channels_last, []

    def noted(x):
        if type(x).__name__ == "FunctionalTensor":
            traced.append(lies(x))
        return lies(x)

    monkeypatch.setattr(channel_norm, "is_channels_last", noted)
    everywhere(monkeypatch.setattr)
    decoder, frame = SMALL_VAES["wan"].build().decoder, torch.randn(1, 4, 1, 6, 8)
    cache = [None] * sum(isinstance(module, nn.Conv3d) for module in decoder.modules())
    with torch.inference_mode():
        for first in (True, False):
            decoder(frame, feat_cache=cache, feat_idx=[0], first_chunk=first)
    kept = [index for index, value in enumerate(cache) if isinstance(value, torch.Tensor)]

    def next_frame(frame, *frames):
        known = list(cache)
        for index, value in zip(kept, frames, strict=True):
            known[index] = value
        return decoder(frame, feat_cache=known, feat_idx=[0]), *(known[index] for index in kept)

    taken = []

    def rewrite(graph):
        config = tritium.CompilationConfig(force_provider=PINNED)
        context = PassContext(config, "cuda", fusions=tuple(fusions.catalog().values()))
        for entry in passes_for(config, ()):
            entry.run(graph, context)
        taken.extend(site for site in context.sites if site.provider == "triton")

    inputs = [frame, *(cache[index].clone() for index in kept)]
    sizes = dict.fromkeys(range(len(inputs)), (3, 4))
    codegen.generated(next_frame, *inputs, dynamic=sizes, rewrite=rewrite)
    (wrapper,) = codegen.WRAPPERS
    norms = sum(type(module).__name__ == "WanRMS_norm" for module in decoder.modules())
    # One stays as it is: what comes from attention has another stride for its one frame.
    assert len(re.findall(r"channel_norm_kernel_\d+\.run\(", wrapper)) == len(taken) == norms - 1
    assert codegen.owned_calls() == []
    assert traced
    assert all(traced)


@pytest.mark.gpu
@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize("dynamic", [False, True])
def test_decoders_on_a_gpu(name, dynamic):
    model, inputs = CODECS[name].build(torch.bfloat16).cuda(), CODECS[name].inputs(torch.bfloat16)
    inputs = {key: value.cuda() for key, value in inputs.items()}
    compiled = torch.compile(
        model, backend=tritium.Backend(tritium.CompilationConfig(force_provider=PINNED)), dynamic=dynamic
    )
    with torch.inference_mode():
        made, eager = compiled(**inputs), model(**inputs)
        exact = model.double()(**{key: value.double() for key, value in inputs.items()})
    assert said(compiled) == f"the norms after {DECODERS[name]} convolutions add their biases"
    assert_no_worse(made, eager, exact, name)
