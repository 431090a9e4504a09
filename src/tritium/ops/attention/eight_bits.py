"""The provider `int8` of `attention`: a kernel for Hopper GPUs that multiplies in 8 bits, as `rounded_attention` defines.

Two launches store q, k and v in 8 bits, and one computes. Generated code calls the op as an operator: Inductor launches
Triton kernels, and these are CUDA C++. On a CPU `rounded_attention` computes, which is slow: it shows on any machine what
the rounding does to images.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from tritium import compat, device
from tritium.errors import ProviderError
from tritium.ops import cuda_launch, nvrtc
from tritium.ops.attention.reference import Sizes
from tritium.ops.attention.rounded import LINES, TILE, rounded_attention
from tritium.ops.cuda_launch import Kernel, Loaded
from tritium.ops.op import Arguments
from tritium.ops.wide_attention import empty_result

SOURCE = Path(__file__).parent.parent / "kernels" / "eight_bit_attention.cu"

# The width of heads in the kernels.
WIDTH = 128

HALF = (torch.float16, torch.bfloat16)

# CUDA's limit for the second dim of a grid.
MOST_HEADS = 65_535

# The major compute capability of Hopper, whose instructions the kernels use; later GPUs do not have them.
HOPPER = 9

# Kernels read 8 elements, 16 bytes, at a time.
ALIGNED, ALIGNED_BYTES = 8, 16

# The blocks of `prepare` among which the keys of a head are divided.
PARTS = 16

# The shared memory of `attend`: queries, four stages of keys and values with 8 rows of ones, sums in float32, barriers, and
# what aligning them to 1,024 bytes takes.
SHARED_BYTES = TILE * WIDTH + 4 * (2 * TILE * WIDTH + 8 * TILE) + 66 * 4 * 256 + 17 * 8 + 1024

STORING = (
    Kernel("prepare", "P" * 8 + "iii" + "q" * 9, threads=512),
    Kernel("store_keys_and_values", "P" * 9 + "ii" + "q" * 6, threads=512),
)
ATTEND = "P" * 7 + "i" * 4 + "f" + "qqq"
KERNELS = (*STORING, Kernel("attend", ATTEND, threads=384, shared_bytes=SHARED_BYTES))

# With lists of tiles: counts, indices, edges of queries and of keys, columns.
LISTED_KERNELS = (*STORING, Kernel("attend", ATTEND + "PPPPi", threads=384, shared_bytes=SHARED_BYTES))

# Constants of the kernels that are not those in their text. POLY is part of the definition.
DEFINES = (f"POLY={LINES}",)


@functools.cache
def text() -> str:
    return SOURCE.read_text(encoding="utf-8")


def loaded(where: torch.device, dtype: torch.dtype, *, listed: bool = False) -> Mapping[str, Loaded]:
    """Return the kernels for a dtype on a GPU, compiled at the first call; raise a `ProviderError`."""
    macros = (*DEFINES, *(("LISTED",) if listed else ()), *(("FLOAT16",) if dtype == torch.float16 else ()))
    return cuda_launch.load(SOURCE.name, text(), where, LISTED_KERNELS if listed else KERNELS, macros)


def aligned(x: torch.Tensor) -> torch.Tensor:
    """Return heads as kernels read them, copied if they have other strides or begin at an odd address."""
    strides = [stride for stride, size in zip(x.stride(), x.shape, strict=True) if size > 1]
    is_dense = x.stride(-1) == 1 and all(stride % ALIGNED == 0 for stride in strides[:-1])
    return x if is_dense and x.data_ptr() % ALIGNED_BYTES == 0 else x.clone(memory_format=torch.contiguous_format)


def run(given: Arguments) -> torch.Tensor:
    if not given.q.is_cuda:
        return rounded_attention(given.q, given.k, given.v, given.scale)
    return attend(given.q, given.k, given.v, given.scale)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """Launch the kernels for heads-first tensors on a GPU."""
    kernels = loaded(q.device, q.dtype)
    tiles = -(-q.shape[2] // TILE), -(-k.shape[2] // TILE)
    out = empty_result(q, v)
    stored = store(kernels, q, k, v, tiles)
    kernels["attend"].launch((stored.blocks, 1, 1), *stored.arguments(out, scale))
    return out


class Stored(NamedTuple):
    """q, k and v in 8 bits, in tiles of TILE tokens, as the kernel `attend` reads them."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    q_scales: torch.Tensor
    k_scales: torch.Tensor
    v_scales: torch.Tensor
    queries: int
    keys: int
    heads: int

    @property
    def query_tiles(self) -> int:
        return self.q.shape[1] // TILE

    @property
    def blocks(self) -> int:
        return self.q.shape[0] * self.query_tiles

    def arguments(self, out: torch.Tensor, scale: float) -> tuple[torch.Tensor | float, ...]:
        """Return the first arguments of the kernel for a heads-first result."""
        tensors = (self.q, self.q_scales, self.k, self.k_scales, self.v, self.v_scales, out)
        sizes = (self.queries, self.keys, self.heads, self.query_tiles)
        # GPUs compute exponentials in base 2.
        return *tensors, *sizes, scale / math.log(2), *out.stride()[:3]


def store(
    kernels: Mapping[str, Loaded],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tiles: tuple[int, int],
    edges: tuple[torch.Tensor | int, torch.Tensor | int] = (0, 0),
) -> Stored:
    """Store heads-first tensors in 8 bits; `edges` are the first tokens of the tiles of queries and of keys, and the end."""
    q, k, v = map(aligned, (q, k, v))
    batch, heads, queries, _ = q.shape
    keys, all_heads = k.shape[2], batch * heads

    def empty(*sizes: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty((all_heads, *sizes), dtype=dtype, device=q.device)

    sums, largest = empty(PARTS, WIDTH), empty(PARTS, WIDTH)
    tokens = (tiles[0] * TILE, tiles[1] * TILE, tiles[1] * TILE)
    q_stored, k_stored, v_stored = (empty(count, WIDTH, dtype=torch.uint8) for count in tokens)
    scales = empty(tokens[0]), empty(tiles[1]), empty(WIDTH)
    of_k, of_v = k.stride()[:3], v.stride()[:3]
    kernels["prepare"].launch(
        (PARTS + tiles[0], all_heads, 1),
        *(q, k, v, sums, largest, q_stored, scales[0], edges[0]),
        *(queries, keys, heads, *q.stride()[:3], *of_k, *of_v),
    )
    kernels["store_keys_and_values"].launch(
        (tiles[1], all_heads, 2),
        *(k, v, sums, largest, k_stored, v_stored, *scales[1:], edges[1], keys, heads, *of_k, *of_v),
    )
    return Stored(q_stored, k_stored, v_stored, *scales, queries, keys, heads)


def decline_form(given: Arguments) -> str | None:
    """Return why attention in 8 bits cannot take a call on any device, or None."""
    sizes = Sizes.of(given)
    if given.mask is not None or given.causal:
        return "it takes no mask, and no causality"
    if sizes.heads != sizes.kv_heads:
        return "it takes as many heads of keys as of queries"
    if 0 in sizes:
        return "there is nothing to compute"
    if not given.q.dtype == given.k.dtype == given.v.dtype:
        return f"it takes tensors of one dtype, got {given.q.dtype}, {given.k.dtype} and {given.v.dtype}"
    if not given.scale > 0:
        return f"it takes a scale above 0, got {given.scale}"
    if compat.dynamo.needs_gradients(given.q, given.k, given.v):
        return "it computes no gradients here"
    return None


def decline_on_a_gpu(given: Arguments, *, listed: bool = False) -> str | None:
    """Return why the kernels cannot take a call, or None: then they are loaded, so that captures can contain the call."""
    sizes = Sizes.of(given)
    if given.q.dtype not in HALF:
        return f"it takes float16 and bfloat16, not {given.q.dtype}"
    if (sizes.width, sizes.value_width) != (WIDTH, WIDTH):
        return f"it takes heads {WIDTH} wide, got {sizes.width} and {sizes.value_width}"
    if sizes.batch * sizes.heads > MOST_HEADS:
        return f"it takes up to {MOST_HEADS:,} heads of all samples, got {sizes.batch * sizes.heads:,}"
    capability = device.capability(given.q.device)
    if capability is None or capability[0] != HOPPER:
        return "it needs a Hopper GPU" + (
            f", this one has capability {capability[0]}.{capability[1]}" if capability else ""
        )
    if reason := nvrtc.decline():
        return reason
    try:
        loaded(given.q.device, given.q.dtype, listed=listed)
    except ProviderError as error:
        return str(error)
    return None


def decline(given: Arguments) -> str | None:
    if reason := decline_form(given):
        return reason
    if given.q.is_cuda:
        return decline_on_a_gpu(given)
    if given.q.device.type != "cpu":
        return f"it runs on a GPU, the tensors are on {given.q.device.type}"
    if any(not isinstance(size, int) for tensor in (given.q, given.k) for size in tensor.shape):
        return "on a CPU it loops over keys, whose number is symbolic in this graph"
    return None if given.q.dtype in (*HALF, torch.float32) else f"it does not take {given.q.dtype}"
