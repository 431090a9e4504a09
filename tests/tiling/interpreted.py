"""Run generated Triton kernels on the CPU, in Triton's interpreter. A separate process: TRITON_INTERPRET=1 from the start.

Usage: python interpreted.py [pattern ...]. Each pattern is compiled once with dynamic sizes and called with two shapes.
"""

from __future__ import annotations

import contextlib
import re
import sys
import tempfile
from types import SimpleNamespace
from unittest import mock

import torch
import torch._inductor.config as inductor_config
import torch.utils._triton
import triton
from torch._inductor.graph import GraphLowering

import tritium
from tiling.patterns import ALL

BLOCKS = {"XBLOCK": 1024, "YBLOCK": 32, "ZBLOCK": 2, "R0_BLOCK": 64}

# Other sizes for a pattern's second call: every dynamic dim gets longer by so much.
GROWTH = {"patchify": 4, "windows": 8, "unpatchify": None}


class Kernel:
    """What the generated wrapper calls, without a device."""

    def __init__(self, name: str, source: str) -> None:
        # Triton reads the source of a kernel from its file; heuristics would look for a device.
        start = source.index("@triton.jit")
        body = "import triton\nimport triton.language as tl\n"
        body += "from torch._inductor.runtime import triton_helpers\n"
        body += "from torch._inductor.runtime.triton_helpers import libdevice, math as tl_math\n" + source[start:]
        with tempfile.NamedTemporaryFile("w", suffix=".py", delete=False) as file:
            file.write(body)
        space: dict = {"__name__": name}
        exec(compile(body, file.name, "exec"), space)
        self.function = space[name]
        self.signature = re.search(r"\ndef \w+\((.*)\):", source)[1].split(", ")

    def run(self, *arguments, stream):
        names = [name.split(" ")[0] for name in self.signature]
        given = dict(zip(names, arguments, strict=False))
        blocks = {name: BLOCKS[name] for name in names if name in BLOCKS}
        grid = tuple(
            triton.cdiv(given[f"{dim}numel"], blocks[f"{dim.upper()}BLOCK"]) if f"{dim}numel" in given else 1
            for dim in "xyz"
        )
        self.function[grid](*arguments, **blocks)


class Compiler:
    def triton(self, name, source, **_):
        return Kernel(name, source)

    def wait(self, scope):
        pass


@contextlib.contextmanager
def interpreted():
    def compile_to_module(self):
        wrapper = self.codegen()[0].value.replace("AsyncCompile()", "Compiler()")
        space = {"Compiler": Compiler, "__name__": "wrapper"}
        exec(compile(wrapper, "wrapper", "exec"), space)
        self.cache_key, self.cache_path, self.cache_linemap = "none", None, []
        return SimpleNamespace(call=space["call"])

    settings = {"cpu_backend": "triton", "fx_graph_cache": False, "compile_threads": 1}
    with (
        mock.patch.object(torch.utils._triton, "triton_hash_with_backend", return_value="none"),
        mock.patch.object(GraphLowering, "compile_to_module", compile_to_module),
        inductor_config.patch(settings),
        torch.no_grad(),
    ):
        yield


def shrunk(pattern, growth):
    """The pattern's inputs with less of everything static, and dynamic dims longer by `growth`."""
    inputs = []
    for position, tensor in enumerate(pattern.inputs()):
        dims = pattern.dynamic.get(position, ())
        shape = [size // 4 + growth if dim in dims else size for dim, size in enumerate(tensor.shape)]
        made = torch.randn(shape)
        if tensor.ndim == 4 and tensor.is_contiguous(memory_format=torch.channels_last) and not tensor.is_contiguous():
            made = made.contiguous(memory_format=torch.channels_last)
        inputs.append(made)
    return inputs


def check(name: str) -> list[str]:
    """Compile one pattern, compare two shapes with eager, and return the tilings."""
    torch._dynamo.reset()
    pattern = ALL[name]
    tritium.autofuse.enable()
    compiled = torch.compile(pattern.function, fullgraph=True)
    for growth in (0, GROWTH.get(name, 3)):
        if growth is None:
            continue
        inputs = shrunk(pattern, growth)
        for position, dims in pattern.dynamic.items():
            torch._dynamo.mark_dynamic(inputs[position], list(dims))
        torch.testing.assert_close(compiled(*inputs), pattern.function(*inputs), rtol=1e-4, atol=1e-4)
    made = tritium.autofuse.decisions()
    tritium.autofuse.disable()
    assert not made["retries"], made["retries"]
    return [f"{kernel['choice']}/{kernel['sizes']}" for kernel in made["kernels"]]


def check_all(names: list[str]) -> int:
    """Check some patterns; return how many."""
    with interpreted():
        for name in names:
            print(name, check(name), flush=True)
    return len(names)


if __name__ == "__main__":
    check_all(sys.argv[1:])
