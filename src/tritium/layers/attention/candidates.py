"""The candidates for attention: how each computes, and why it declines a request.

All take heads-first tensors, a mask of rank 4 or None, a scale and causality aligned to the first key. A candidate
declines if it cannot apply one of these. Packages add candidates under the entry point group `tritium.attention`.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the conventional name

from tritium import catalog, device
from tritium.compat import attention as compat_attention
from tritium.compat.products import wide_product_obstacle
from tritium.layers.attention import mathematics
from tritium.layers.attention.request import Request
from tritium.ops import wide_attention

HALF = (torch.float16, torch.bfloat16)

# Scores of 4608 tokens and 24 heads are 1.9 GiB, those of video 160 GiB, which would exhaust the model's memory.
MOST_SCORES = 2 << 30

# (q, k, v, mask, scale, causal) -> [B, N, Sq, D]
Run = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, float, bool], torch.Tensor]


@dataclass(frozen=True)
class Candidate:
    """One way to compute an attention."""

    name: str
    run: Run
    # Returns why it cannot compute a request, or None.
    decline: Callable[[Request], str | None]
    # The memory layouts that it reads without a copy.
    layouts: tuple[str, ...] = ("BNSD", "BSND", "BSH")
    # Whether a compiler sees one opaque operator instead of what `run` calls.
    opaque: bool = False
    # Whether `run` starts a compiler, which is impossible while another function is being compiled.
    compiles: bool = False
    # The devices on which it is measured; elsewhere it is used only by name.
    measured_on: tuple[str, ...] = ("cpu", "cuda")
    # The most bytes of scores (all heads, float32) for which it is measured: beyond, it takes too much memory or time.
    most_scores: float = math.inf
    # The devices on which that limit applies.
    limited_on: tuple[str, ...] = ("cuda", "cpu")


def _by_pytorch(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float, causal: bool
) -> torch.Tensor:
    # Head counts may be symbolic; an earlier check has already added the guard.
    grouped = bool(q.shape[1] != k.shape[1])
    if not q.is_cuda:
        return F.scaled_dot_product_attention(q, k, v, mask, 0.0, causal, scale=scale, enable_gqa=grouped)
    # `only_kernel` disables the other kernels globally, possibly in another thread: wait for it.
    with compat_attention.SWITCHES:
        return F.scaled_dot_product_attention(q, k, v, mask, 0.0, causal, scale=scale, enable_gqa=grouped)


def _by_kernel(name: str) -> Run:
    def run(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float, causal: bool
    ) -> torch.Tensor:
        with compat_attention.only_kernel(name):
            return _by_pytorch(q, k, v, mask, scale, causal)

    return run


def _never(request: Request) -> str | None:
    del request
    return None


def _decline_pytorch(request: Request) -> str | None:
    if request.device == "cuda" and request.wide_mask:
        return "on a GPU it takes an added mask in the dtype of the query, not in float32"
    return None


def _decline_form(request: Request) -> str | None:
    """Return why kernels on a GPU cannot take a request, or None."""
    if elsewhere := _decline_on_gpu_alone(request):
        return elsewhere
    if not request.packed:
        return "it takes heads whose numbers lie side by side in memory"
    return _decline_pytorch(request)


def _decline_on_gpu_alone(request: Request) -> str | None:
    return None if request.device == "cuda" else f"it runs on a GPU, the tensors are on {request.device}"


def _decline_half(request: Request, widest: int) -> str | None:
    """Return why kernels for half precision on a GPU cannot take a request, or None."""
    if reason := _decline_form(request):
        return reason
    if request.dtype not in HALF:
        return f"it takes float16 and bfloat16, not {request.dtype}"
    if request.width > widest or request.width % 8 or request.value_width != request.width:
        return f"it takes heads of one width, a multiple of 8 up to {widest}"
    if request.causal and not request.square:
        return "its causality is aligned to the last key where queries and keys differ in number"
    return None


def _decline_cudnn(request: Request) -> str | None:
    return _decline_half(request, 256)


def _decline_flash(request: Request) -> str | None:
    return "it takes no mask" if request.mask is not None else _decline_half(request, 256)


def _decline_efficient(request: Request) -> str | None:
    if reason := _decline_form(request):
        return reason
    if request.grouped:
        return "it takes as many heads of keys as of queries"
    return None if request.dtype in (*HALF, torch.float32) else f"it does not take {request.dtype}"


def _decline_chunked(request: Request) -> str | None:
    return "it loops over queries, whose number is symbolic in this graph" if request.symbolic else None


def _decline_products(request: Request) -> str | None:
    if elsewhere := _decline_on_gpu_alone(request):
        return elsewhere
    if request.dtype not in HALF:
        return f"it takes float16 and bfloat16, not {request.dtype}"
    if request.mask is not None or request.causal:
        return "it takes no mask, and no causality"
    if request.grouped:
        return "it takes as many heads of keys as of queries"
    if request.grad:
        return "it computes no gradients here"
    return wide_product_obstacle() if device.has_triton() else "triton is not installed"


def _products(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float, causal: bool
) -> torch.Tensor:
    assert mask is None
    assert not causal
    out = q.new_empty((*q.shape[:3], v.shape[3]))
    wide_attention.attend(q, k, v, scale, out)
    return out


def _decline_package(module: str, request: Request, widest: int) -> str | None:
    if not compat_attention.installed(module):
        return f"the package {module!r} is not installed"
    if request.mask is not None:
        return "it takes no mask"
    if request.grad:
        return "it computes no gradients here"
    return _decline_half(request, widest)


def _flash3(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float, causal: bool
) -> torch.Tensor:
    assert mask is None
    function = importlib.import_module("flash_attn_interface").flash_attn_func
    out = function(*(t.transpose(1, 2) for t in (q, k, v)), softmax_scale=scale, causal=causal)
    # Some versions also return the log-sum-exp.
    first: torch.Tensor = out[0] if isinstance(out, tuple) else out
    return first.transpose(1, 2)


def _sage(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float, causal: bool
) -> torch.Tensor:
    assert mask is None
    function = importlib.import_module("sageattention").sageattn
    out: torch.Tensor = function(q, k, v, tensor_layout="HND", is_causal=causal, sm_scale=scale)
    return out


# Tiles for additive masks in float32, fastest first: queries, keys, stages, warps. FlexAttention's default tiles leave no
# shared memory for such a mask if heads are 64 wide.
TILES = ((128, 64, 3, 8), (64, 64, 3, 4), (64, 32, 3, 4), (64, 32, 2, 4), (32, 32, 2, 4), (32, 16, 2, 4))
# For heads narrower than this the first tile is slower.
LARGE_FROM = 128


def tile_for_a_wide_mask(width: int, value_width: int, element: int, room: int) -> tuple[int, int, int, int]:
    """Return the first tile that fits `room` bytes of shared memory, or the last one.

    >>> tile_for_a_wide_mask(128, 128, 2, 232448), tile_for_a_wide_mask(64, 64, 2, 232448)
    ((128, 64, 3, 8), (64, 64, 3, 4))
    """
    # Shared memory pads rows to the next power of two.
    own, other = (1 << (size - 1).bit_length() for size in (width, value_width))

    def fits(queries: int, keys: int, stages: int, warps: int) -> bool:
        del warps
        streamed = keys * (own + other) * element + queries * keys * 4
        return queries * own * element + stages * streamed <= room

    tiles = TILES if min(width, value_width) >= LARGE_FROM else TILES[1:]
    return next((tile for tile in tiles if fits(*tile)), TILES[-1])


def _tile_options(q: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> dict[str, int | bool] | None:
    if mask is None or mask.dtype in (torch.bool, q.dtype):
        return None
    room = device.shared_memory(q.device)
    if room is None:
        return None
    queries, keys, stages, warps = tile_for_a_wide_mask(q.shape[3], v.shape[3], q.element_size(), room)
    return {
        "BLOCK_M": queries,
        "BLOCK_N": keys,
        "num_stages": stages,
        "num_warps": warps,
        # For few queries FlexAttention would use another kernel, with different tiles.
        "FORCE_USE_FLEX_ATTENTION": True,
    }


def _decline_flex(request: Request) -> str | None:
    if request.device == "cuda" and not device.has_triton():
        return "triton is not installed"
    if request.grad:
        return "it computes no gradients here"
    if request.dtype not in (*HALF, torch.float32):
        return f"it does not take {request.dtype}"
    if not 16 <= request.width <= 256 or not 16 <= request.value_width <= 256:
        return "it takes heads from 16 to 256 wide"
    return None


def _flex(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float, causal: bool
) -> torch.Tensor:
    score = None
    if mask is not None:
        bias = mask.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
        score = _kept_score(bias) if mask.dtype == torch.bool else _added_score(bias)
    blocks = _causal_blocks(q.shape[2], k.shape[2], str(q.device)) if causal else None
    grouped = bool(q.shape[1] != k.shape[1])
    out: torch.Tensor = compat_attention.flex_attention(
        q,
        k,
        v,
        score_mod=score,
        block_mask=blocks,
        scale=scale,
        enable_gqa=grouped,
        kernel_options=_tile_options(q, v, mask),
    )
    return out


def _kept_score(mask: torch.Tensor) -> Callable[..., torch.Tensor]:
    def kept(score: Any, b: Any, h: Any, q: Any, k: Any) -> torch.Tensor:
        return torch.where(mask[b, h, q, k], score, -float("inf"))

    return kept


def _added_score(mask: torch.Tensor) -> Callable[..., torch.Tensor]:
    def added(score: Any, b: Any, h: Any, q: Any, k: Any) -> torch.Tensor:
        return score + mask[b, h, q, k]  # type: ignore[no-any-return]

    return added


@functools.lru_cache(maxsize=16)
def _causal_blocks(queries: int, keys: int, device: str) -> Any:
    def seen(b: Any, h: Any, q: Any, k: Any) -> Any:
        del b, h
        return q >= k

    # In a separate thread: vmap, which create_block_mask uses, does not work inside an operator.
    with ThreadPoolExecutor(1) as pool:
        make = functools.partial(compat_attention.create_block_mask, seen, None, None, queries, keys, device=device)
        return pool.submit(make).result()


OWN = (
    Candidate("sdpa", _by_pytorch, _decline_pytorch),
    Candidate("cudnn", _by_kernel("cudnn"), _decline_cudnn),
    Candidate("flash", _by_kernel("flash"), _decline_flash),
    Candidate("efficient", _by_kernel("efficient"), _decline_efficient),
    Candidate("math", _by_kernel("math"), _never, most_scores=MOST_SCORES),
    # On a GPU it takes eight seconds for video, where kernels take 40 ms.
    Candidate("chunked", mathematics.chunked, _decline_chunked, most_scores=MOST_SCORES, limited_on=("cuda",)),
    # Two matrix products on tensor cores with stored scores: for heads that are too wide for other kernels.
    Candidate(
        "products",
        _products,
        _decline_products,
        opaque=True,
        measured_on=("cuda",),
        most_scores=MOST_SCORES,
        limited_on=("cuda",),
    ),
    Candidate("flex", _flex, _decline_flex, opaque=True, compiles=True, measured_on=("cuda",)),
    Candidate(
        "flash3",
        _flash3,
        functools.partial(_decline_package, "flash_attn_interface", widest=256),
        opaque=True,
    ),
    Candidate("sage", _sage, functools.partial(_decline_package, "sageattention", widest=128), opaque=True),
)


@functools.cache
def candidates() -> dict[str, Candidate]:
    """Return every candidate by name, those of installed packages last."""
    own = [catalog.Entry(candidate, Path(__file__), __name__) for candidate in OWN]
    entries = catalog.unique([*own, *catalog.plugins("tritium.attention", Candidate)], "attention candidate")
    return {name: entry.value for name, entry in entries.items()}


def able(request: Request) -> list[str]:
    """Return the names of the candidates that take a request."""
    return [name for name, candidate in candidates().items() if candidate.decline(request) is None]
