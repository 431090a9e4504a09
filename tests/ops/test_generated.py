"""What becomes of ops in generated code: their kernels are launched by it, sizes stay dynamic, none of our Python runs.

Code is generated for a GPU that need not be there; nothing is compiled or launched, except on the CPU at the end.
"""

import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch._higher_order_ops import triton_kernel_wrap
from torch._inductor import lowering

import tritium
from support import codegen
from tritium import device, envs, ops

pytestmark = pytest.mark.skipif(not device.has_triton(), reason="triton is not installed")

CALL = torch.ops.tritium

# Ops that generated code calls through the dispatcher; their modules say why.
CALLED = {"attention", "block_sparse_attention", "grouped_linear", "wide_attention"}

# PyTorch's kernels for attention, and its products of 8 bits, run on a GPU alone.
GPU_ALONE = ("cudnn", "flash", "efficient", "scaled_mm", "fp8")

TRACED = [
    (op, provider)
    for op in ops.catalog().values()
    for provider in ops.providers(op).values()
    if (provider.traced or provider.inlined) and provider.name not in GPU_ALONE
]


@pytest.fixture(autouse=True)
def _willing(monkeypatch):
    """Kernels take tensors of this machine as if they lay on a GPU."""
    monkeypatch.setattr(envs, "triton_interpreted", lambda: True)


def random(*shape, dtype=torch.bfloat16):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1)).to(dtype)


def call_of(op, provider, arguments):
    """A function of the tensors in some arguments that calls the op, and these tensors."""
    tensors = []

    def taken(value):
        if isinstance(value, list):
            return [taken(part) for part in value]
        if isinstance(value, torch.Tensor):
            tensors.append(value)
            return len(tensors) - 1, None
        return value

    places = [taken(value) for value in arguments.values()]

    def call(*given):
        def filled(place):
            if isinstance(place, list):
                return [filled(part) for part in place]
            return given[place[0]] if isinstance(place, tuple) else place

        return op.overload(*map(filled, places), provider=provider)

    return call, tensors


def launched(wrapper):
    return re.findall(r"(\w+_kernel)_\d+\.run\(", wrapper)


def test_every_op_s_code_is_part_of_the_graph_or_says_why_not():
    called = {op.name for op in ops.catalog().values() for p in ops.providers(op).values() if not p.traced | p.inlined}
    assert called == CALLED


# Samples of an op; all of them, nearly, where time does not matter.
SAMPLES = 6


@pytest.mark.parametrize(("op", "provider"), TRACED, ids=lambda value: value.name)
@pytest.mark.parametrize("most", [SAMPLES, pytest.param(2 * SAMPLES, marks=pytest.mark.thorough)])
def test_generated_code_calls_no_operator_of_ours(op, provider, most):
    labels = {}
    for sample in op.samples(torch.bfloat16, "cpu"):
        given = op.bind(**sample.arguments)
        # `linear_gelu` declines a CPU before anything else.
        if op.name == "linear_gelu" and (given.bias is None or given.approximate != "tanh"):
            continue
        if op.name != "linear_gelu" and provider.decline(given) is not None:
            continue
        call, tensors = call_of(op, provider.name, sample.arguments)
        observer = codegen.generated(call, *tensors)
        (wrapper,) = codegen.WRAPPERS
        assert codegen.owned_calls() == [], sample.label
        assert "'fp64'" not in wrapper, sample.label
        kernels = launched(wrapper)
        owned = [kernel for kernel in observer.kernels if kernel.kind == "owned"]
        assert [kernel.name.rpartition("_")[0] for kernel in owned] == kernels
        assert {kernel.ops[0] for kernel in owned} <= {f"tritium.{op.name}"}
        labels[sample.label] = kernels
        # One of each way to compute it is enough.
        if len(labels) == most:
            break
    assert labels
    if provider.name == "triton":
        assert any(labels.values())
        assert all(name.startswith(op.name) for kernels in labels.values() for name in kernels)
    else:
        assert not any(labels.values())


def norms(x, y, gate):
    residual, out = CALL.residual_norm_modulate(
        x + 1, y * 2, gate, None, None, gate, gate, 1e-6, "layer", None, None, provider="triton"
    )
    return residual, CALL.rms_norm(out * 2, None, 1e-6, None, provider="triton") + 1


def heads(q, text_q, k, text_k, weight, cos, sin):
    given = [text_q * 2, q], [text_k, k], [weight, weight], [weight, weight], [cos], [sin]
    return CALL.qk_norm_rope(*given, 1e-6, "head", "interleaved", False, provider="triton")


def image(x, weight):
    return CALL.group_norm_silu(x * 2, 8, weight, weight, 1e-6, None, provider="triton") + 1


def video(x, weight):
    return CALL.channel_norm(x * 2, weight, 8.0, 0.5, 1, 1e-12, True, None, provider="triton") + 1


def attention(batch, text, tokens):
    sides = [random(batch, size, 3, 128) for size in (tokens, text, tokens, text)]
    return *sides, random(128), random(1, text + tokens, 128), random(1, text + tokens, 128)


def last(x):
    return x.to(memory_format={4: torch.channels_last, 5: torch.channels_last_3d}[x.ndim])


# A function, its inputs at several sizes, and which dims of which inputs are dynamic.
DYNAMIC = {
    "tokens": (
        norms,
        [(random(2, n, 64), random(2, n, 64), random(2, 1, 64)) for n in (100, 63, 4096)],
        {0: [1], 1: [1]},
    ),
    "batch and tokens": (
        norms,
        [(random(b, n, 64), random(b, n, 64), random(b, 1, 64)) for b, n in ((2, 100), (3, 63), (5, 7))],
        {0: [0, 1], 1: [0, 1], 2: [0]},
    ),
    "text and image": (
        heads,
        [attention(*sizes) for sizes in ((1, 7, 63), (1, 16, 100), (1, 9, 8))],
        {place: [1] for place in (0, 1, 2, 3, 5, 6)},
    ),
    "a batch of text and image": (
        heads,
        [attention(*sizes) for sizes in ((2, 7, 63), (3, 16, 100), (5, 9, 8))],
        {**{place: [0, 1] for place in range(4)}, 5: [1], 6: [1]},
    ),
    "images": (image, [(random(1, 64, *size), random(64)) for size in ((32, 32), (63, 100), (16, 8))], {0: [2, 3]}),
    "images, channels last": (
        image,
        [(last(random(b, 64, h, w)), random(64)) for b, h, w in ((2, 32, 32), (3, 63, 100), (4, 16, 8))],
        {0: [0, 2, 3]},
    ),
    "videos": (
        video,
        [(last(random(1, 96, *size)), random(96, 1, 1, 1)) for size in ((2, 16, 16), (3, 7, 10), (4, 16, 8))],
        {0: [2, 3, 4]},
    ),
}


@pytest.mark.parametrize("name", DYNAMIC)
def test_one_graph_serves_all_sizes(name):
    function, calls, dynamic = DYNAMIC[name]
    wrappers = codegen.generations(function, calls, dynamic)
    assert len(wrappers) == 1
    assert launched(wrappers[0])
    assert "torch.ops.tritium." not in re.sub("#.*", "", wrappers[0])
    assert "'fp64'" not in wrappers[0]


@pytest.mark.parametrize("name", ["images", "images, channels last", "videos"])
def test_what_several_kernels_read_is_computed_once(name):
    function, calls, dynamic = DYNAMIC[name]
    observer = codegen.generated(function, *calls[0], dynamic=dynamic)
    # x * 2 before, and + 1 after; results are not filled first.
    assert len(codegen.launches(observer)) == 2


def test_equal_launches_are_analysed_once(monkeypatch):
    """Which arguments a kernel writes to is found by compiling it: five times for each launch, if nothing is remembered."""
    analysed, original = [], triton_kernel_wrap.generate_ttir

    def noted(kernel, *given):
        analysed.append(getattr(kernel, "fn", kernel).__name__)
        return original(kernel, *given)

    monkeypatch.setattr(triton_kernel_wrap, "generate_ttir", noted)

    def several(x, weight):
        for _ in range(4):
            x = CALL.rms_norm(x * 2, weight, 1.25e-6, None, provider="triton")
        return x

    codegen.generated(several, random(2, 7, 96), random(96))
    assert launched(codegen.WRAPPERS[0]) == ["rms_norm_kernel"] * 4
    assert len(analysed) == 1


def test_a_product_is_added_to_the_one_before_in_place():
    parts = [random(1, 64, 32), random(1, 64, 96)]
    weight, bias = random(48, 128), random(48)

    def joined(first, second, weight, bias):
        return CALL.cat_linear([first + 1, F.gelu(second)], weight, bias, None, provider="aten") * 2

    codegen.generated(joined, *parts, weight, bias)
    assert len(re.findall(r"torch\.ops\.aten\.addmm_\.default\(", codegen.WRAPPERS[0])) == 1

    def shared(first, second, third, weight, bias):
        one, other = (CALL.cat_linear([first, part], weight, bias, None, provider="aten") for part in (second, third))
        return one, other

    with torch.inference_mode():
        given = [random(1, 8, 4, dtype=torch.float32), *(random(1, 8, 6, dtype=torch.float32) for _ in range(2))]
        given += [random(5, 10, dtype=torch.float32), random(5, dtype=torch.float32)]
        given[2] = given[2] * 3
        # The two begin with the same product, which Inductor computes once.
        for made, expected in zip(torch.compile(shared)(*given), shared(*given), strict=True):
            torch.testing.assert_close(made, expected)
    assert CALL.add_product.default in lowering.lowerings


class Single(torch.nn.Module):
    """The end of a FLUX single block."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = torch.nn.Linear(16, 32), torch.nn.Linear(48, 16)

    def forward(self, x):
        return x + self.outer(torch.cat([x, self.inner(x)], -1))


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_no_python_of_the_package_runs_in_a_compiled_call():
    config = tritium.CompilationConfig(force_provider={"cat_linear": "aten"})
    model, x = Single(), random(2, 7, 16, dtype=torch.float32)
    with torch.inference_mode():
        compiled = torch.compile(model, backend=tritium.Backend(config))
        torch.testing.assert_close(compiled(x), model(x))
        sites = [site for record in tritium.explain(compiled).records for site in record.sites]
        assert "aten" in {site.provider for site in sites if site.fusion == "cat_linear"}
        package, frames = str(Path(tritium.__file__).parent), []

        def note(frame, event, _):
            if event == "call" and frame.f_code.co_filename.startswith(package):
                frames.append(f"{frame.f_code.co_filename}:{frame.f_code.co_name}")

        sys.setprofile(note)
        try:
            compiled(x)
        finally:
            sys.setprofile(None)
    assert frames == []


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_a_kernel_that_cannot_be_traced_fails_its_graph_alone(monkeypatch):
    from tritium.ops.kernels import rms_norm

    class Broken:
        fn = None

    monkeypatch.setattr(rms_norm, "rms_norm_kernel", Broken())
    config = tritium.CompilationConfig(force_provider={"rms_norm": "triton"})
    model, x = torch.nn.RMSNorm(16, eps=1e-6), random(4, 16, dtype=torch.float32)
    with torch.inference_mode(), pytest.warns(RuntimeWarning, match="lowering"):
        compiled = torch.compile(model, backend=tritium.Backend(config))
        torch.testing.assert_close(compiled(x), model(x))
    report = tritium.explain(compiled)
    (failure,) = report.failures
    assert failure["part"] == "lowering"
    assert report.sites["rms_norm"].reasons == {"lowering failed, see failures": 1}
    assert not ops.failed_providers()
