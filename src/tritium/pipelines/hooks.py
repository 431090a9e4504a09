"""Find hooks and wrappers of other libraries that prevent a module from being compiled.

A hook on a whole component, such as model offloading, runs outside of compiled code. A hook inside a compiled module
would be traced: it moves weights or replaces the call, and compiled code would do neither.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from tritium import compat
from tritium.errors import PipelineError
from tritium.pipelines.call import Call
from tritium.pipelines.parts import PartSpec

_BUDGET = "give a budget, as Plan(memory='16GB'), which loads weights under compiled code"

# Dynamo cannot trace the kernels that these packages use for quantized weights.
_OPAQUE_QUANTIZATION = ("bitsandbytes", "gguf", "optimum.quanto")


def check(part: PartSpec) -> None:
    """Raise a `PipelineError` that names the first of them in a part."""
    for where, found, advice in _found(part):
        path = ".".join(piece for piece in (part.name, where) if piece)
        raise PipelineError(
            f"{path} has {found}, which stands in the way of compiling it: {advice}, or leave it alone with "
            f"Plan(components={{{part.name!r}: 'eager'}})"
        )


def _found(part: PartSpec) -> Iterator[tuple[str, str, str]]:
    # Check all modules: a compiled call around a block would bypass the compiled calls inside it.
    for path, module in part.module.named_modules():
        if _is_compiled(module):
            yield path, "a compiled call already (torch.compile)", "optimize a pipeline that is not compiled"
    for block in part.blocks:
        for inner_path, inner in block.module.named_modules():
            path = ".".join(piece for piece in (block.path, inner_path) if piece)
            yield from ((path, found, advice) for found, advice in _on(inner))


def _is_compiled(module: nn.Module) -> bool:
    call = compat.modules.compiled_call(module)
    # A `Call` is Tritium's and allowed, but the call that it replaced may be compiled.
    return compat.modules.is_wrapped(module) or (call.before if isinstance(call, Call) else call) is not None


def _on(module: nn.Module) -> Iterator[tuple[str, str]]:
    hook = compat.modules.accelerate_hook(module)
    if hook is not None:
        yield f"an accelerate hook ({_names(hook)})", f"remove it, and {_BUDGET}"
    names = compat.modules.diffusers_hooks(module)
    if names:
        advice = (
            f"remove it, and {_BUDGET}" if any("offload" in name for name in names) else "remove it before optimizing"
        )
        yield f"a diffusers hook ({', '.join(names)})", advice
    package = type(module).__module__
    if package.startswith(_OPAQUE_QUANTIZATION) or "quantizers.gguf" in package:
        yield f"quantized weights ({type(module).__module__}.{type(module).__name__})", "dequantize it"


def _names(hook: Any) -> str:
    """Return the class of a hook, or of each hook in a sequential one."""
    inner = getattr(hook, "hooks", None)
    return ", ".join(type(one).__name__ for one in inner) if inner else type(hook).__name__
