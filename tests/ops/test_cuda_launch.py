"""Kernels of CUDA C++: how they are compiled and cached, and how their parameters are passed. No GPU is needed."""

import ctypes
import re
import struct

import pytest
import torch

from tritium import compat
from tritium.errors import ProviderError
from tritium.ops import cuda_launch, nvrtc
from tritium.ops.attention import eight_bits

needs_nvrtc = pytest.mark.skipif(nvrtc.decline() is not None, reason="NVRTC was not found")

SMALL = 'extern "C" __global__ void fill(float* x, float value) { x[threadIdx.x] = value; }'

# A letter of a signature by C type.
LETTERS = {"int": "i", "long": "q", "float": "f"}


@pytest.fixture
def cache(monkeypatch, tmp_path):
    monkeypatch.setattr(compat.inductor, "cache_dir", lambda: tmp_path)
    return tmp_path / "tritium" / "cubin"


def test_parameters_are_aligned_as_in_c():
    content, offsets = cuda_launch.packed("PiPfq", (1, 2, 3, 0.5, -4))
    assert offsets == (0, 8, 16, 24, 32)
    assert struct.unpack_from("q", content, 0) == (1,)
    assert struct.unpack_from("i", content, 8) == (2,)
    assert struct.unpack_from("q", content, 16) == (3,)
    assert struct.unpack_from("f", content, 24) == (0.5,)
    assert struct.unpack_from("q", content, 32) == (-4,)

    class Same(ctypes.Structure):
        _fields_ = [
            ("a", ctypes.c_void_p),
            ("b", ctypes.c_int),
            ("c", ctypes.c_void_p),
            ("d", ctypes.c_float),
            ("e", ctypes.c_int64),
        ]

    assert tuple(getattr(Same, name).offset for name in "abcde") == offsets


def test_a_tensor_is_passed_by_its_address():
    tensor = torch.empty(3)[1:]
    assert cuda_launch.packed("P", (tensor,))[0] == struct.pack("P", tensor.data_ptr())


def test_a_wrong_number_of_arguments_is_an_error():
    with pytest.raises(ProviderError, match="'Pi' takes 2 arguments"):
        cuda_launch.packed("Pi", (1,))


@pytest.mark.parametrize("kernels", [eight_bits.KERNELS, eight_bits.LISTED_KERNELS])
def test_signatures_are_those_of_the_text(kernels):
    macros = ("LISTED",) if kernels is eight_bits.LISTED_KERNELS else ()
    text = re.sub(
        r"#ifdef (\w+)\n(.*?)#endif\n", lambda part: part[2] if part[1] in macros else "", eight_bits.text(), flags=re.S
    )
    for kernel in kernels:
        found = re.search(rf"__global__[^{{;]*\b{kernel.name}\(([^)]*)\)\s*{{", text)
        assert found, kernel.name
        parameters = [re.sub(r"\s+", " ", parameter).strip() for parameter in found[1].split(",")]
        letters = ["P" if "*" in parameter else LETTERS[parameter.rpartition(" ")[0]] for parameter in parameters]
        assert "".join(letters) == kernel.signature, kernel.name


def test_without_nvrtc_there_is_a_reason(monkeypatch, cache):
    monkeypatch.setattr(nvrtc, "library", lambda: None)
    assert "libnvrtc" in nvrtc.decline()
    with pytest.raises(ProviderError, match=r"fill\.cu cannot be compiled: NVRTC"):
        nvrtc.cubin("fill.cu", SMALL)


def test_the_library_of_torch_s_cuda_is_first(monkeypatch):
    for built, first in (("12.8", "libnvrtc.so.12"), ("13.0", "libnvrtc.so.13"), (None, "libnvrtc.so.13")):
        monkeypatch.setattr(torch.version, "cuda", built)
        names = [path for path in nvrtc.paths() if "/" not in path]
        assert names[0] == first
        assert set(names) == {"libnvrtc.so.12", "libnvrtc.so.13"}


def test_code_is_compiled_once_for_each_text_and_version(monkeypatch, cache):
    calls = []
    monkeypatch.setattr(nvrtc, "library", object)
    monkeypatch.setattr(nvrtc, "version", lambda: "13.0")
    monkeypatch.setattr(nvrtc, "compiled", lambda name, text, options: calls.append(options) or b"code")
    for _ in range(2):
        assert nvrtc.cubin("fill.cu", SMALL) == b"code"
    assert calls == [list(nvrtc.OPTIONS)]
    nvrtc.cubin("fill.cu", SMALL, ["FLOAT16"])
    assert calls[1][-1] == "-DFLOAT16"
    nvrtc.cubin("fill.cu", SMALL + " ")
    monkeypatch.setattr(nvrtc, "version", lambda: "13.1")
    nvrtc.cubin("fill.cu", SMALL)
    assert len(calls) == 4
    assert [path.suffix for path in cache.iterdir()] == [".cubin"] * 4


@needs_nvrtc
def test_the_kernels_compile(cache):
    for macros in ((), ("FLOAT16",)):
        code = nvrtc.cubin(eight_bits.SOURCE.name, eight_bits.text(), macros)
        assert code.startswith(b"\x7fELF")
        assert all(kernel.name.encode() in code for kernel in eight_bits.KERNELS)


@needs_nvrtc
def test_errors_of_the_compiler_are_one_line(cache):
    with pytest.raises(ProviderError, match=r"cannot compile fill\.cu: .*unknown") as raised:
        nvrtc.cubin("fill.cu", SMALL.replace("threadIdx", "unknown"))
    assert "\n" not in str(raised.value)
    assert not cache.exists()
