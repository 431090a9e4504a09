"""Differences in attention between torch versions and installed packages."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from tritium import compat

# Kernels behind F.scaled_dot_product_attention, by candidate name.
_KERNELS = {
    "cudnn": "CUDNN_ATTENTION",
    "flash": "FLASH_ATTENTION",
    "efficient": "EFFICIENT_ATTENTION",
    "math": "MATH",
}

# Packages with attention kernels: the imported module, and its distribution.
PACKAGES = {"flash_attn_interface": "flash_attn_3", "sageattention": "sageattention"}


# The dispatch keys that vmap needs.
_FUNCTORCH = (
    "FuncTorchDynamicLayerBackMode",
    "FuncTorchDynamicLayerFrontMode",
    "FuncTorchBatched",
    "FuncTorchVmapMode",
    "FuncTorchGradWrapper",
)


# The kinds of causality of PyTorch's kernel.
_NOT_CAUSAL, _TO_THE_LAST_KEY = 0, 2


# PyTorch's kernel switches are global to the process. Without the lock, two threads that change them at the same time
# would each restore the other's setting, permanently.
SWITCHES = threading.RLock()


@contextmanager
def only_kernel(name: str) -> Iterator[None]:
    """Restrict `F.scaled_dot_product_attention` to one kernel, which raises an error if it cannot run."""
    with SWITCHES, sdpa_kernel([getattr(SDPBackend, _KERNELS[name])]):
        yield


@functools.cache
def installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


@functools.cache
def versions() -> dict[str, str]:
    """Return the versions on which a measured choice depends, in addition to the device."""
    found = {"torch": compat.versions.version_text(), "triton": compat.versions.versions()["triton"] or "none"}
    for module, distribution in PACKAGES.items():
        if installed(module):
            try:
                found[module] = importlib.metadata.version(distribution)
            except importlib.metadata.PackageNotFoundError:
                found[module] = "unknown"
    return found


@functools.cache
def _compiled_flex() -> Callable[..., Any]:
    module = importlib.import_module("torch.nn.attention.flex_attention")
    return torch.compile(module.flex_attention, dynamic=False)


def flex_attention(*arguments: Any, **options: Any) -> torch.Tensor:
    """Call FlexAttention compiled by Inductor; the uncompiled function would hold all scores in memory.

    It must be compiled for every shape, so Dynamo's limits are raised: beyond them it would run uncompiled.
    """
    with compat.cached_code.recompile_limit(4096), _functorch_dispatched():
        out: torch.Tensor = _compiled_flex()(*arguments, **options)
    return out


@contextmanager
def _functorch_dispatched() -> Iterator[None]:
    """Enable vmap, which Dynamo calls while it traces FlexAttention.

    In the first call of a compiled graph AOTAutograd's dispatch mode intercepts every operator. Calls inside such an
    operator are dispatched without functorch, as under any dispatch mode.
    """
    keys = [getattr(torch._C.DispatchKey, name) for name in _FUNCTORCH if hasattr(torch._C.DispatchKey, name)]
    with torch._C._PreserveDispatchKeyGuard():
        for key in keys:
            torch._C._dispatch_tls_set_dispatch_key_excluded(key, False)
        yield


@functools.cache
def _varlen() -> Callable[..., Any] | None:
    try:
        module = importlib.import_module("torch.nn.attention.varlen")
    except ImportError:
        return None
    return getattr(module, "varlen_attn", None)


def varlen_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_q: torch.Tensor,
    cu_k: torch.Tensor,
    longest: tuple[int, int],
    scale: float,
    causal: bool,
) -> torch.Tensor | None:
    """Call torch's attention over segments; return None if this version does not support the arguments."""
    function = _varlen()
    if function is None:
        return None
    options: dict[str, Any] = {"scale": scale, "window_size": (-1, 0) if causal else (-1, -1)}
    if q.shape[1] != k.shape[1]:
        if "enable_gqa" in inspect.signature(function).parameters:
            options["enable_gqa"] = True
        elif torch.is_grad_enabled() and any(stream.requires_grad for stream in (q, k, v)):
            # torch 2.11 has no such parameter: grouped heads are accepted, but gradients may be wrong.
            return None
    out = function(q, k, v, cu_q, cu_k, *longest, **options)
    return out if isinstance(out, torch.Tensor) else out[0]


def nested_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_q: torch.Tensor,
    cu_k: torch.Tensor,
    longest: tuple[int, int],
    scale: float,
    causal: bool,
) -> torch.Tensor | None:
    """Call the kernel behind PyTorch's attention of nested tensors, which also supports float32.

    Returns None if this version lacks it. It has no gradients, and rows that see no key contain uninitialised memory.
    Causality is aligned to the last key.
    """
    operator = getattr(torch.ops.aten, "_efficient_attention_forward", None)
    if operator is None:
        return None
    group = q.shape[1] // k.shape[1]
    if group > 1:
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    # With a head stride of 0 the kernel reads rows of several heads as one.
    streams = (stream if stream.stride(1) else stream.contiguous() for stream in (q, k, v))
    aligned = _TO_THE_LAST_KEY if causal else _NOT_CAUSAL
    try:
        given = (stream.unsqueeze(0) for stream in streams)
        out = operator(*given, None, cu_q, cu_k, *longest, 0.0, aligned, False, scale=scale)
    except RuntimeError as error:
        # The GPU is newer than this version, or the build has no kernel for it.
        if any(words in str(error) for words in ("no kernel found", "not enabled for build")):
            return None
        raise
    return out[0].squeeze(0)  # type: ignore[no-any-return]
