"""Biases of convolutions that the norm after them adds: the same numbers, and only where nobody else needs them."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tritium
from fidelity import assert_no_worse
from interpreter import interpreted
from small_codecs import CODECS
from tritium import device
from tritium.compiler import hand_on, lay_out

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
    ByItself: hand_on.NOTHING_TO_DO,
    ReadTwice: f"1 biases: {hand_on.READ_ELSEWHERE}",
    Added: hand_on.NOTHING_TO_DO,
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


def everywhere():
    """Both passes also on this CPU and with this engine, where they would decline."""
    lay_out.gate = lambda device_type, fidelity: None
    hand_on.gate = lambda device_type, engine: None


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


def check_decoders() -> int:
    """Every second norm of a residual block stands behind a convolution, and the first ones behind a sum."""
    everywhere()
    for name, biases in DECODERS.items():
        model, inputs = CODECS[name].build().eval(), CODECS[name].inputs()
        compiled = compiled_by(model, PINNED)
        with torch.inference_mode():
            made, eager = compiled(**inputs), model(**inputs)
            exact = model.double()(**{key: value.double() for key, value in inputs.items()})
        assert said(compiled) == f"the norms after {biases} convolutions add their biases", name
        assert_no_worse(made, eager, exact, name)
    return len(DECODERS)


DECODERS = {"kl_decoder": 6, "wan_decoder": 6, "qwen_image_decoder": 6}


@needs_triton
def test_rules():
    assert interpreted("compiler.test_hand_on", "check_rules") == 2 * len(EXPECTED)


@needs_triton
def test_decoders():
    assert interpreted("compiler.test_hand_on", "check_decoders") == len(DECODERS)


@pytest.mark.parametrize(
    ("device_type", "engine", "reason"),
    [
        ("cuda", "inductor", None),
        ("cpu", "inductor", hand_on.ON_A_CPU),
        ("cuda", "eager", hand_on.AS_EAGER_DOES),
        ("xpu", "inductor", "not measured on 'xpu'"),
    ],
)
def test_the_truth_table(device_type, engine, reason):
    assert hand_on.gate(device_type, engine) == reason


def test_a_cpu_declines():
    compiled = compiled_by(Between().eval(), "reference")
    with torch.inference_mode():
        compiled(torch.randn(1, 3, 8, 8))
    assert said(compiled) == hand_on.AS_EAGER_DOES


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
