"""Generated code that launches ops' kernels, run: what it passes to them gives the op's results.

The code is generated here for a GPU that need not be there. Another process runs it on tensors of this machine, each launch
in Triton's interpreter; and each kernel is compiled for Hopper as Inductor would.
"""

import contextlib
import functools
import inspect
import json
import math
import re
import tempfile
import types
from pathlib import Path

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from ops.test_contract import exact, numbers, parts, tensors_of
from ops.test_generated import CALL, DYNAMIC, TRACED, call_of
from support import codegen
from support.fidelity import assert_no_worse
from support.interpreter import interpreted
from tritium import compat, device, envs, ops

pytestmark = pytest.mark.skipif(not device.has_triton(), reason="triton is not installed")

KERNELS = [op for op, provider in TRACED if provider.name == "triton"]

# Every way to compute the op, and arguments that are views, missing or of another dtype.
SAMPLES = {
    "channel_norm": ["channels last", "video, channels last", "an offset, three tiles, channels last"],
    "group_norm_silu": [
        "image",
        "odd sizes, channels last",
        "video, channels last",
        "groups over several programs",
        "groups over several programs, channels last",
        "an offset, several programs",
        "an offset, several programs, channels last",
    ],
    "norm_quantize": [
        "rms, 7 tokens of 7",
        "rms, no residual",
        "rms, kept as well",
        "rms, by step",
        "layer, rotated by 16",
    ],
    "qk_norm_rope": [
        "interleaved, heads of 72",
        "half, one part rotated",
        "interleaved, no norm",
        "no weights",
        "fewer k heads",
        "tables a sample",
        "SD3: no rotation",
        "Qwen-Image: real pairs",
        "one table for both parts",
    ],
    "quantize_parts": [
        "int8, rows of 100",
        "int8, gated silu",
        "int8, a FLUX single block",
        "int8, heads and a gate",
        "int8, rotated by 16",
    ],
    "quantize_rows": ["int8, rows of 100", "int8, a step of three", "int8, rotated by 64"],
    "residual_norm_modulate": [
        "layer, 63 tokens of 100",
        "a plain residual and norm",
        "everything",
        "one value a token",
        "chunks of one modulation",
        "tokens of a longer sequence",
        "residual in float32",
        "rms, wider than one program",
    ],
    "scaled_linear": ["int8, awkward", "int8, GELU", "int8, one column", "int8, float32"],
    "rms_norm": ["rows of 100", "no weight", "every second row", "wider than one program"],
}


def sample_of(op, label):
    (sample,) = [sample for sample in op.samples(torch.float32, "cpu") if sample.label == label]
    return sample


@pytest.fixture(autouse=True)
def _willing(monkeypatch):
    monkeypatch.setattr(envs, "triton_interpreted", lambda: True)


@pytest.mark.parametrize("op", KERNELS, ids=lambda op: op.name)
def test_its_results_are_the_op_s(op, tmp_path):
    for number, label in enumerate(SAMPLES[op.name]):
        call, tensors = call_of(op, "triton", sample_of(op, label).arguments)
        codegen.generated(call, *tensors)
        (wrapper,) = codegen.WRAPPERS
        (tmp_path / f"{number}.json").write_text(json.dumps({"label": label, "wrapper": wrapper}))
    assert interpreted("ops.test_generated_runs", "check", f"{op.name!r}, {str(tmp_path)!r}") == len(SAMPLES[op.name])


def kernel_in(source):
    """The kernel in a source as Triton has it, and what Inductor knows of it."""
    found = {}

    def user_autotune(**known):
        def taken(kernel):
            found.update(known, kernel=kernel)
            return kernel

        return taken

    lines = [line for line in source.splitlines() if not re.match(r"\s*from torch\._inductor\.runtime", line)]
    space = {"__name__": "kernel", "triton_heuristics": types.SimpleNamespace(user_autotune=user_autotune)}
    space["DeviceProperties"] = types.SimpleNamespace
    # Triton reads the text of a function in its file.
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.py"
        file.write_text("\n".join(lines))
        space["__file__"] = str(file)
        exec(compile(file.read_text(), file, "exec"), space)
        return types.SimpleNamespace(**found)


class Launched:
    """Stands for what Inductor makes of a kernel's source: launches it in the interpreter."""

    def __init__(self, source):
        self.known = kernel_in(source)

    def run(self, *given, stream):
        del stream
        *arguments, x, y, z = given
        kernel = self.known.kernel
        declared = inspect.signature(kernel.fn).parameters
        names = [name for name in kernel.arg_names if "constexpr" not in str(declared[name].annotation)]
        values = dict(zip(names, arguments, strict=True)) | self.known.triton_meta["constants"]
        kernel[x, y, z](**values)


def empty(size, stride, dtype):
    """Memory in which nothing is written yet shows."""
    made = torch.empty_strided(size, stride, dtype=dtype)
    return made.fill_(math.nan) if dtype.is_floating_point else made


def run_wrapper(wrapper, arguments):
    """Run generated code on tensors of this machine."""
    launcher = types.SimpleNamespace(
        triton=lambda name, source, **_: Launched(source), wait=lambda space: None, __name__="async"
    )
    text = re.sub(r"^async_compile = .*$", "async_compile = LAUNCHER", wrapper, flags=re.M)
    text = re.sub(r"^from torch\._C import _cuda_getCurrentRawStream.*$", "", text, flags=re.M)
    text = re.sub(r"^empty_strided_cuda = .*$", "empty_strided_cuda = EMPTY", text, flags=re.M)
    text = text.replace("torch.cuda._DeviceGuard(0)", "NOTHING").replace("torch.cuda.set_device(0)", "pass")
    space = {"__name__": "generated", "LAUNCHER": launcher, "NOTHING": contextlib.nullcontext(), "EMPTY": empty}
    space["get_raw_stream"] = lambda index: index
    exec(compile(text, "generated", "exec"), space)
    return space["call"](arguments)


def check(name: str, folder: str) -> int:
    op, checked = ops.catalog()[name], 0
    for file in sorted(Path(folder).iterdir()):
        found = json.loads(file.read_text())
        sample = sample_of(op, found["label"])
        made = parts(run_wrapper(found["wrapper"], tensors_of(sample)))
        plain = parts(op.reference(**sample.arguments))
        assert [one.shape for one in made] == [one.shape for one in plain]
        given = numbers(op, tuple(made)), numbers(op, plain), exact(op, sample.arguments)
        for actual, eager, truth in zip(*given, strict=True):
            assert_no_worse(actual, eager, truth, found["label"])
        checked += 1
    return checked


def tokens(provider, x, y, gate):
    parts = gate, None, None, gate, gate
    return CALL.residual_norm_modulate(x, y, *parts, 1e-6, "layer", None, None, provider=provider)


def heads(provider, q, text_q, k, text_k, weight, cos, sin):
    given = [text_q, q], [text_k, k], [weight, weight], [weight, weight], [cos], [sin]
    return CALL.qk_norm_rope(*given, 1e-6, "row", "half", True, provider=provider)


def image(provider, x, weight):
    return CALL.group_norm_silu(x, 8, weight, weight, 1e-6, None, weight, provider=provider)


def video(provider, x, weight):
    return CALL.channel_norm(x, weight, 8.0, 0.5, 1, 1e-12, True, None, provider=provider)


# Functions, the place of their inputs in DYNAMIC, and what else differs there.
RUNS = {
    "batch and tokens": tokens,
    "a batch of text and image": heads,
    "images": image,
    "images, channels last": image,
    "videos": video,
}


def called(name):
    """The inputs of each call in float32; norm weights of all heads are as wide as a token."""
    calls = [[tensor.float() for tensor in given] for given in DYNAMIC[name][1]]
    if RUNS[name] is heads:
        for given in calls:
            given[4] = given[4].repeat(given[0].shape[2])
    return calls


# Others cover the same paths in the interpreter, which takes ten seconds and more for each of these.
LONG = ("a batch of text and image", "images")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.thorough) if name in LONG else name for name in RUNS]
)
def test_one_graph_computes_all_sizes(name, tmp_path):
    passed = []
    (wrapper,) = codegen.generations(functools.partial(RUNS[name], "triton"), called(name), DYNAMIC[name][2], passed)
    assert len(passed) == len(called(name))
    torch.save((wrapper, passed), tmp_path / "calls")
    assert interpreted("ops.test_generated_runs", "check_sizes", f"{name!r}, {str(tmp_path)!r}") == len(passed)


def check_sizes(name: str, folder: str) -> int:
    wrapper, passed = torch.load(Path(folder) / "calls")
    for given, arguments in zip(called(name), passed, strict=True):
        made = run_wrapper(wrapper, arguments)
        plain = parts(RUNS[name]("reference", *given))
        truth = parts(RUNS[name]("reference", *(tensor.double() for tensor in given)))
        for actual, eager, wide in zip(made, plain, truth, strict=True):
            assert actual.stride() == eager.stride()
            assert_no_worse(actual, eager, wide, f"{name}, {[tuple(tensor.shape) for tensor in given]}")
    return len(passed)


@pytest.mark.parametrize("name", DYNAMIC)
def test_its_kernels_compile_for_hopper(name):
    """With the types, constants and options that Inductor gives them, where sizes are dynamic."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function, calls, dynamic = DYNAMIC[name]
    observer = codegen.generated(function, *calls[0], dynamic=dynamic)
    owned = {kernel.name for kernel in observer.kernels if kernel.kind == "owned"}
    assert owned
    for kernel in owned:
        text = rf"^{kernel} = async_compile\.triton\('\w+', '''(.*?)'''"
        (source,) = re.findall(text, codegen.WRAPPERS[0], re.MULTILINE | re.DOTALL)
        known = kernel_in(source)
        (options,), meta = known.configs, known.triton_meta
        (attributes,) = meta["configs"]
        asked = ASTSource(known.kernel, signature=meta["signature"], constexprs=meta["constants"], attrs=attributes)
        code = triton.compile(asked, target=GPUTarget("cuda", 90, 32), options=options)
        assert "f64" not in code.asm["ttir"]
        if "maxnreg" in options:
            assert f".maxnreg {options['maxnreg']}" in code.asm["ptx"]


@pytest.mark.gpu
@pytest.mark.parametrize("op", KERNELS, ids=lambda op: op.name)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_compiled_on_a_gpu(op, dtype):
    for sample in op.samples(dtype, "cuda"):
        if sample.label not in SAMPLES[op.name]:
            continue
        call, tensors = call_of(op, "triton", sample.arguments)
        torch._dynamo.reset()
        with torch.inference_mode():
            made = parts(torch.compile(call, fullgraph=True, dynamic=False)(*tensors))
            plain = parts(op.reference(**sample.arguments))
        for actual, eager in zip(made, plain, strict=True):
            assert actual.stride() == eager.contiguous().stride() or op.keeps_strides
        given = numbers(op, tuple(made)), numbers(op, plain), exact(op, sample.arguments)
        for actual, eager, truth in zip(*given, strict=True):
            assert_no_worse(actual, eager, truth, f"{op.name}, {sample.label}")


@pytest.mark.gpu
@pytest.mark.parametrize("name", RUNS)
def test_all_sizes_compiled_once_on_a_gpu(name):
    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(functools.partial(RUNS[name], "triton"), backend=counter, fullgraph=True)
    for given in called(name):
        tensors = [tensor.cuda() for tensor in given]
        marks = [(tensors[index], dim) for index, dims in DYNAMIC[name][2].items() for dim in dims]
        with torch.inference_mode(), compat.dynamo.marked_dynamic(marks):
            made = parts(compiled(*tensors))
            plain = parts(RUNS[name]("reference", *tensors))
            truth = parts(RUNS[name]("reference", *(tensor.double() for tensor in tensors)))
        for actual, eager, wide in zip(made, plain, truth, strict=True):
            assert_no_worse(actual, eager, wide, name)
    assert counter.frame_count == 1
