"""The providers of `attention`: how each computes, and why it declines a call.

A provider declines if it cannot apply a mask, the scale, causality aligned to the first key, or groups of heads.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the conventional name

from tritium import compat, device
from tritium.compat import attention as compat_attention
from tritium.ops import wide_attention
from tritium.ops.attention import eight_bits
from tritium.ops.attention.reference import Sizes, arranged, chunked
from tritium.ops.op import Arguments, Provider, present
from tritium.ops.triton_launch import decline_tensors

HALF = (torch.float16, torch.bfloat16)


def tensors(given: Arguments) -> list[torch.Tensor]:
    return [tensor for tensor in (given.q, given.k, given.v, given.mask) if tensor is not None]


def is_packed(given: Arguments) -> bool:
    """Return whether the elements of a head are contiguous."""
    return all(present(t.stride(3)) == 1 or present(t.shape[3]) == 1 for t in (given.q, given.k, given.v))


def has_heads_first_in_memory(given: Arguments) -> bool:
    return present(given.q.stride(1)) >= present(given.q.stride(2))


def has_wide_mask(given: Arguments) -> bool:
    """Return whether an added mask has another dtype than the query: rounding would change the mask."""
    return given.mask is not None and given.mask.dtype not in (torch.bool, given.q.dtype)


def needs_gradients(given: Arguments) -> bool:
    return compat.dynamo.needs_gradients(*tensors(given))


def words(given: Arguments) -> str:
    """Return a description for error messages and reports."""
    q, mask, sizes = given.q, given.mask, Sizes.of(given)
    parts = [f"{q.dtype} on {q.device.type}", f"{sizes.queries} queries, {sizes.keys} keys"]
    parts.append(f"{sizes.heads} heads of {sizes.width}")
    if sizes.heads != sizes.kv_heads:
        parts.append(f"{sizes.kv_heads} heads of keys")
    if mask is not None:
        kind = "a boolean" if mask.dtype == torch.bool else "an additive"
        parts.append(f"{kind} mask {tuple(map(present, mask.shape))}")
    if given.causal:
        parts.append("causal")
    return ", ".join(parts)


Run = Callable[[Arguments], torch.Tensor]


def _provider(
    name: str,
    function: Run,
    decline: Callable[[Arguments], str | None],
    *,
    inlined: bool = False,
    lossy: bool = False,
) -> Provider:
    def run(given: Arguments) -> torch.Tensor:
        if compat.traced.statically_known(given.q.numel() == 0):
            # Some of PyTorch's kernels return no tensor for an empty batch.
            return arranged(given.q.new_empty((*given.q.shape[:3], given.v.shape[3])))
        out = function(given)
        # The operators of a trace may return any strides.
        return out if compat.traced.is_traced(out) else arranged(out)

    return Provider(name, "attention", run, decline, inlined=inlined, lossy=lossy)


def sdpa(given: Arguments) -> torch.Tensor:
    q, k, v, mask, scale, causal = vars(given).values()
    # Head counts may be symbolic; an earlier check has already added the guard.
    grouped = bool(q.shape[1] != k.shape[1])
    # `only_kernel` disables the other kernels globally, possibly in another thread: wait for it.
    with compat_attention.SWITCHES if q.is_cuda else contextlib.nullcontext():
        return F.scaled_dot_product_attention(q, k, v, mask, 0.0, causal, scale=scale, enable_gqa=grouped)


def _kernel(name: str) -> Run:
    def run(given: Arguments) -> torch.Tensor:
        with compat_attention.only_kernel(name):
            return sdpa(given)

    return run


def decline_math(given: Arguments) -> str | None:
    # Kernels take the largest score before they scale it, and mask keys with -inf.
    return None if given.scale > 0 else f"it takes a scale above 0, got {given.scale}"


def decline_sdpa(given: Arguments) -> str | None:
    if given.q.is_cuda and has_wide_mask(given):
        return "on a GPU it takes an added mask in the dtype of the query, not in float32"
    return decline_math(given)


def _decline_form(given: Arguments) -> str | None:
    """Return why kernels on a GPU cannot take a call, or None."""
    if not given.q.is_cuda:
        return f"it runs on a GPU, the tensors are on {given.q.device.type}"
    if not is_packed(given):
        return "it takes heads whose elements are contiguous"
    return decline_sdpa(given)


def _decline_half(given: Arguments, widest: int = 256) -> str | None:
    """Return why kernels for half precision on a GPU cannot take a call, or None."""
    if reason := _decline_form(given):
        return reason
    if given.q.dtype not in HALF:
        return f"it takes float16 and bfloat16, not {given.q.dtype}"
    sizes = Sizes.of(given)
    if sizes.width > widest or sizes.width % 8 or sizes.value_width != sizes.width:
        return f"it takes heads of one width, a multiple of 8 up to {widest}"
    if given.causal and sizes.queries != sizes.keys:
        return "its causality is aligned to the last key where queries and keys differ in number"
    return None


def decline_flash(given: Arguments) -> str | None:
    return "it takes no mask" if given.mask is not None else _decline_half(given)


def _decline_groups(given: Arguments) -> str | None:
    sizes = Sizes.of(given)
    return None if sizes.heads == sizes.kv_heads else "it takes as many heads of keys as of queries"


def decline_cudnn(given: Arguments) -> str | None:
    if reason := _decline_half(given):
        return reason
    return None if Sizes.of(given).keys > 1 else "it takes more than one key"


def decline_efficient(given: Arguments) -> str | None:
    if reason := _decline_form(given) or _decline_groups(given):
        return reason
    if given.q.dtype not in (*HALF, torch.float32):
        return f"it does not take {given.q.dtype}"
    sizes, side = Sizes.of(given), 16 // given.q.element_size()
    return (
        f"it takes heads whose widths are multiples of {side}"
        if (sizes.width % side or sizes.value_width % side)
        else None
    )


def decline_chunked(given: Arguments) -> str | None:
    if any(not isinstance(size, int) for tensor in tensors(given) for size in tensor.shape):
        return "it loops over queries, whose number is symbolic in this graph"
    return decline_math(given)


def products(given: Arguments) -> torch.Tensor:
    out = wide_attention.empty_result(given.q, given.v)
    wide_attention.attend(given.q, given.k, given.v, given.scale, out)
    return out


def decline_products(given: Arguments) -> str | None:
    if given.q.dtype not in HALF:
        return f"it takes float16 and bfloat16, not {given.q.dtype}"
    if given.mask is not None or given.causal:
        return "it takes no mask, and no causality"
    reason = _decline_groups(given) or _decline_gradients(given)
    return reason or decline_tensors(given.q, given.k, given.v)


def _decline_gradients(given: Arguments) -> str | None:
    return "it computes no gradients here" if needs_gradients(given) else None


def flash3(given: Arguments) -> torch.Tensor:
    function = importlib.import_module("flash_attn_interface").flash_attn_func
    sides = (side.transpose(1, 2) for side in (given.q, given.k, given.v))
    out = function(*sides, softmax_scale=given.scale, causal=given.causal)
    # Some versions also return the log-sum-exp.
    first: torch.Tensor = out[0] if isinstance(out, tuple) else out
    return first.transpose(1, 2)


def sage(given: Arguments) -> torch.Tensor:
    options = {"tensor_layout": "HND", "is_causal": given.causal, "sm_scale": given.scale}
    out: torch.Tensor = importlib.import_module("sageattention").sageattn(given.q, given.k, given.v, **options)
    return out


def _decline_package(given: Arguments, module: str, widest: int) -> str | None:
    if not compat_attention.installed(module):
        return f"the package {module!r} is not installed"
    if given.mask is not None:
        return "it takes no mask"
    return _decline_gradients(given) or _decline_half(given, widest)


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
    tile = {"BLOCK_M": queries, "BLOCK_N": keys, "num_stages": stages, "num_warps": warps}
    # For few queries FlexAttention would use another kernel, with different tiles.
    return {**tile, "FORCE_USE_FLEX_ATTENTION": True}


def decline_flex(given: Arguments) -> str | None:
    if given.q.is_cuda and not device.has_triton():
        return "triton is not installed"
    if reason := _decline_gradients(given):
        return reason
    if given.q.dtype not in (*HALF, torch.float32):
        return f"it does not take {given.q.dtype}"
    sizes = Sizes.of(given)
    if not 16 <= sizes.width <= 256 or not 16 <= sizes.value_width <= 256:
        return "it takes heads from 16 to 256 wide"
    return decline_math(given)


def flex(given: Arguments) -> torch.Tensor:
    q, k, v, mask, scale, causal = vars(given).values()
    return compat_attention.flex_attention(
        q,
        k,
        v,
        score_mod=None if mask is None else _masked(mask.expand(*q.shape[:3], k.shape[2])),
        block_mask=_causal_blocks(q.shape[2], k.shape[2], str(q.device)) if causal else None,
        scale=scale,
        enable_gqa=bool(q.shape[1] != k.shape[1]),
        kernel_options=_tile_options(q, v, mask),
    )


def _masked(mask: torch.Tensor) -> Callable[..., torch.Tensor]:
    """Return the function of FlexAttention that applies a mask to a score."""

    def kept(score: Any, b: Any, h: Any, q: Any, k: Any) -> torch.Tensor:
        return torch.where(mask[b, h, q, k], score, -float("inf"))

    def added(score: Any, b: Any, h: Any, q: Any, k: Any) -> torch.Tensor:
        return score + mask[b, h, q, k]  # type: ignore[no-any-return]

    return kept if mask.dtype == torch.bool else added


@functools.lru_cache(maxsize=16)
def _causal_blocks(queries: int, keys: int, device: str) -> Any:
    # Import late: it imports the compiler.
    from torch.nn.attention.flex_attention import create_block_mask

    def seen(b: Any, h: Any, q: Any, k: Any) -> Any:
        del b, h
        return q >= k

    # In a separate thread: vmap, which create_block_mask uses, does not work inside an operator.
    with ThreadPoolExecutor(1) as pool:
        make = functools.partial(create_block_mask, seen, None, None, queries, keys, device=device)
        return pool.submit(make).result()


PROVIDERS = (
    _provider("sdpa", sdpa, decline_sdpa, inlined=True),
    _provider("cudnn", _kernel("cudnn"), decline_cudnn, inlined=True),
    _provider("flash", _kernel("flash"), decline_flash, inlined=True),
    _provider("efficient", _kernel("efficient"), decline_efficient, inlined=True),
    _provider("math", _kernel("math"), decline_math, inlined=True),
    _provider("chunked", lambda given: chunked(**vars(given)), decline_chunked, inlined=True),
    # Two matrix products on tensor cores with stored scores: for heads that are too wide for other kernels.
    _provider("products", products, decline_products),
    _provider("flex", flex, decline_flex),
    _provider("flash3", flash3, functools.partial(_decline_package, module="flash_attn_interface", widest=256)),
    # These two multiply in 8 bits.
    _provider("sage", sage, functools.partial(_decline_package, module="sageattention", widest=128), lossy=True),
    _provider("int8", eight_bits.run, eight_bits.decline, lossy=True),
)
