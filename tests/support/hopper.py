"""Compile Triton kernels for a Hopper GPU, which need not be there, instead of launching them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

_TYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.int8: "i8",
    torch.int32: "i32",
    torch.int64: "i64",
}


def compile_instead_of_launching(monkeypatch: pytest.MonkeyPatch) -> dict[Any, Any]:
    """Let every launch compile its kernel once per form; return the code by form."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    compiled: dict[Any, Any] = {}

    def compile_instead(kernel: Any, *arguments: Any, grid: Any, warmup: Any, **options: Any) -> None:
        values = dict(zip(kernel.arg_names, arguments, strict=False))
        values |= {name: options.pop(name) for name in list(options) if name in kernel.arg_names}
        # What the launcher says of its arguments: which are one, and which a multiple of 16.
        constants = {param.name for param in kernel.params if param.is_constexpr}
        constants |= {
            name for name, value in values.items() if value is None or (isinstance(value, int) and value == 1)
        }
        types = {name: "constexpr" if name in constants else _type_of(values[name]) for name in kernel.arg_names}
        attributes = {
            (place,): [["tt.divisibility", 16]]
            for place, name in enumerate(kernel.arg_names)
            if name not in constants and _is_aligned(values[name])
        }
        places = {(kernel.arg_names.index(name),): values[name] for name in constants}
        form = (kernel.__name__, *types.values(), *attributes, *places.values())
        if form not in compiled:
            source = ASTSource(kernel, signature=types, constexprs=places, attrs=attributes)
            compiled[form] = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm

    monkeypatch.setattr(triton.JITFunction, "run", compile_instead)
    return compiled


def _type_of(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"*{_TYPES[value.dtype]}"
    return "fp32" if isinstance(value, float) else "i32" if -(2**31) <= value < 2**31 else "i64"


def _is_aligned(value: Any) -> bool:
    return isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0)
