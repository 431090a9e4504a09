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


def with_log_sum_exp(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return attention of [B, H, S, D] and the logarithm of the sum of each query's scores, as [B, H, S] in float32.

    Parts of an attention over different keys are merged by it. A query that sees no key gets zeros and minus infinity.
    """
    if k.shape[1] != q.shape[1]:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    added = mask
    if mask is not None and mask.dtype == torch.bool:
        added = torch.zeros_like(mask, dtype=q.dtype).masked_fill(~mask, -torch.inf)
    if added is None:
        return _kernel_with_log_sum_exp(q, k, v, None, scale)
    out, lse = _kernel_with_log_sum_exp(q, k, v, added.expand(*q.shape[:3], k.shape[2]), scale)
    # Kernels differ in what they return for these queries.
    sees_none = (added == -torch.inf).all(-1)
    return out.masked_fill(sees_none.unsqueeze(-1), 0.0), lse.masked_fill(sees_none, -torch.inf)


def _kernel_with_log_sum_exp(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    aten: Any = torch.ops.aten
    width = q.shape[-1]
    alike = v.shape[-1] == width and width % 8 == 0 and width <= 256
    if q.device.type == "cpu" and v.shape[-1] == width:
        mask = None if mask is None else mask.to(q.dtype)
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, False, attn_mask=mask, scale=scale)
        return out, lse.to(torch.float32) if lse.dtype != torch.float64 else lse
    if q.device.type == "cuda" and alike and mask is None and q.dtype in (torch.float16, torch.bfloat16):
        out, lse, *_ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, False, False, scale=scale)
        return out, lse
    if q.device.type == "cuda" and alike and q.dtype != torch.float64:
        bias = None if mask is None else _aligned(mask.to(q.dtype))
        out, lse, *_ = aten._scaled_dot_product_efficient_attention(q, k, v, bias, True, 0.0, False, scale=scale)
        # The kernel writes rows in groups of 32.
        return out, lse.narrow(2, 0, q.shape[2])
    scores = (q @ k.transpose(2, 3)) * scale
    scores = scores.to(torch.promote_types(q.dtype, torch.float32))
    scores = scores if mask is None else scores + mask
    lse = scores.logsumexp(-1)
    weights = (scores - lse.masked_fill(lse == -torch.inf, 0.0).unsqueeze(-1)).exp()
    return weights.to(v.dtype) @ v, lse


def _aligned(mask: torch.Tensor) -> torch.Tensor:
    """Return a mask whose rows begin at multiples of 16 bytes, as the kernel needs."""
    return torch.nn.functional.pad(mask, (0, -mask.shape[3] % 8))[..., : mask.shape[3]]
