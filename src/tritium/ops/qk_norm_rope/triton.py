"""`qk_norm_rope` on a GPU."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeVar

import torch

from tritium import compat
from tritium.ops.op import Arguments
from tritium.ops.qk_norm_rope.reference import NONE
from tritium.ops.rope import COMPLEX, HALF
from tritium.ops.triton_launch import contiguous, decline_tensors, dynamic_width, launch, with_dense_rows

T = TypeVar("T")

# A table has one value per element, one per pair, or the cosine and sine of each pair as adjacent values.
ELEMENT, PAIR = "element", "pair"

# The widest head: 32 elements for each thread of one warp.
WIDEST_HEAD = 1024
# The most elements of a token: one program holds them all in registers.
WIDEST_TOKEN = 32_768

WARPS = (1, 2, 4, 8, 16)


def launch_options(heads: int, width: int, itemsize: int, *, halves: bool) -> tuple[dict[str, int], dict[str, int]]:
    """Return the heads per round and the number of rounds of a program, and Triton's options.

    In a round a thread loads 16 bytes: with more it would hold two heads, and two copies of the table. The number of warps
    leaves each thread four loads, issued together and rotated by one copy of the table, with at most an eighth of the
    threads idle. More warps are used if a thread would otherwise hold more than sixteen loads.
    """
    lanes = _power_of_2(width) // 2 if halves else _power_of_2(width)
    heads_a_warp = max(1, 32 * 16 // itemsize // lanes)
    loads = 2 if halves else 1

    def rounds(warps: int) -> int:
        return -(-heads // (heads_a_warp * warps))

    def idle(warps: int) -> float:
        return 1 - heads / (rounds(warps) * heads_a_warp * warps)

    busy = [warps for warps in WARPS if loads * rounds(warps) >= 4 and idle(warps) <= 1 / 8]
    enough = [warps for warps in WARPS if loads * rounds(warps) <= 16]
    warps = max(busy[-1] if busy else WARPS[0], enough[0] if enough else WARPS[-1])
    return {"HEADS": heads_a_warp * warps, "ROUNDS": rounds(warps)}, {"num_warps": warps}


def _power_of_2(number: int) -> int:
    return 1 << (number - 1).bit_length()


def results(given: Arguments) -> tuple[torch.Tensor, torch.Tensor]:
    return _joined(given.q, given.heads_first), _joined(given.k, given.heads_first)


def _joined(parts: list[torch.Tensor], heads_first: bool) -> torch.Tensor:
    """Allocate the concatenation of parts along tokens."""
    first = parts[0]
    batch, _, heads, width = first.shape
    tokens = sum(part.shape[1] for part in parts)
    shape = (batch, heads, tokens, width) if heads_first else (batch, tokens, heads, width)
    return torch.empty(shape, dtype=first.dtype, device=first.device)


def run_triton(given: Arguments) -> tuple[torch.Tensor, torch.Tensor]:
    from tritium.ops.kernels.qk_norm_rope import qk_norm_rope_kernel

    q, k, rope = given.q, given.k, given.rope
    batch, first_tokens, heads, width = q[0].shape
    tokens = sum(part.shape[1] for part in q)
    q_out, k_out = results(given)
    if compat.traced.statically_known(batch * tokens == 0):
        return q_out, k_out
    rows = [None if part is None else with_dense_rows(part) for part in (*_two(q), *_two(k))]
    weights = [contiguous(weight) for weight in (*_two(given.q_weights), *_two(given.k_weights))]
    rotations = [None if rope == NONE else _rotation(*angles) for angles in zip(given.tables, given.sines, strict=True)]
    turned = [(None, None) if angles is None else angles for angles in _ends(rotations)]
    x_unit, x_strides = _in_units([_steps(row, 3) for row in rows])
    table_unit, table_strides = _in_units([_steps(cosines, 2) for cosines, _ in turned])
    halves = rope == HALF
    cut, options = launch_options(max(heads, k[0].shape[2]), width, q[0].element_size(), halves=halves)
    launch(
        qk_norm_rope_kernel,
        (2 * batch * tokens,),
        *rows,
        *weights,
        *(cosines for cosines, _ in turned),
        *(sine for _, sine in turned),
        q_out,
        k_out,
        tokens,
        first_tokens,
        *x_strides,
        *table_strides,
        EPS=float(given.eps),
        Q_HEADS=heads,
        K_HEADS=k[0].shape[2],
        WIDTH=width,
        PARTS=len(q),
        TABLES=len(given.tables),
        NORM=given.norm,
        WEIGHTED=given.q_weights[0] is not None,
        TABLE=table_kind(given.tables, rope, width),
        FIRST_TURNS=rotations[0] is not None,
        SECOND_TURNS=rotations[-1] is not None,
        HALVES=halves,
        HEADS_FIRST=given.heads_first,
        BLOCK=_power_of_2(width),
        X_UNIT=x_unit,
        TABLE_UNIT=table_unit,
        options=options,
        **cut,
    )
    return q_out, k_out


def _two(given: Sequence[T | None]) -> tuple[T | None, T | None]:
    """Return the first value, and the second or None: passing the first twice could make Inductor compute it twice."""
    return given[0], given[1] if len(given) == 2 else None


def _ends(given: Sequence[T | None]) -> tuple[T | None, T | None]:
    """Return two tables for the kernel; a missing one is replaced by the other, for a valid address."""
    first, last = _two(given)
    return (last if first is None else first), (first if last is None and len(given) == 2 else last)


def _steps(x: torch.Tensor | None, dims: int) -> list[int]:
    """Return the strides of the first dims; 0 without a tensor, and for size 1 (arbitrary stride)."""
    if x is None:
        return [0] * dims
    sizes = zip(x.shape[:dims], x.stride()[:dims], strict=True)
    return [0 if compat.traced.statically_known(size == 1) else stride for size, stride in sizes]


def _in_units(strides: list[list[int]]) -> tuple[int, list[int]]:
    """Return the largest power of 2, up to 16, that divides all strides, and the strides in this unit.

    The unit is a constant in the kernel, so the compiler can prove alignment. It must divide all values of dynamic strides.
    """
    flat = [stride for steps in strides for stride in steps]
    unit = math.gcd(16, *(stride for stride in flat if isinstance(stride, int)))
    while not all(compat.traced.statically_known(stride % unit == 0) for stride in flat):
        unit //= 2
    return unit, [stride // unit for stride in flat]


def _rotation(table: torch.Tensor | None, sine: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None] | None:
    """Return cosines and sines with equal strides; a complex table alone, as adjacent real pairs."""
    if table is None:
        return None
    cosines = with_dense_rows(real(table).flatten(2))
    if sine is None:
        return cosines, None
    sines = with_dense_rows(sine)
    same = zip(_steps(cosines, 3), _steps(sines, 3), strict=True)
    if not all(compat.traced.statically_known(one == other) for one, other in same):
        return cosines.contiguous(), sines.contiguous()
    return cosines, sines


def real(table: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(table.resolve_conj()) if table.is_complex() else table


def table_kind(tables: Sequence[torch.Tensor | None], rope: str, width: int) -> str:
    widths = {table.shape[-1] for table in tables if table is not None}
    if rope == NONE or not widths:
        return NONE
    if rope == COMPLEX:
        return COMPLEX
    return ELEMENT if widths == {width} else PAIR


def decline_triton(given: Arguments) -> str | None:
    q, k, weights = given.q, given.k, [*given.q_weights, *given.k_weights]
    angles = [] if given.rope == NONE else [real(table) for table in (*given.tables, *given.sines) if table is not None]
    dynamic = dynamic_width(*(part.shape[dim] for part in (*q, *k) for dim in (2, 3)))
    return dynamic or _decline_form(q, k, weights, angles) or decline_tensors(*q, *k, *weights, *angles)


def _decline_form(
    q: list[torch.Tensor], k: list[torch.Tensor], weights: list[torch.Tensor | None], angles: list[torch.Tensor]
) -> str | None:
    """Return why the kernel does not take parts, weights and tables of these shapes and dtypes, or None."""
    if len(q) > 2:
        return f"the kernel takes one or two parts, got {len(q)}"
    width = q[0].shape[-1]
    if any(part.shape[-1] != width for part in (*q, *k)) or width % 2:
        return "the kernel takes heads of one even width"
    sizes = [math.prod(table.shape[2:]) for table in angles]
    if any(size != sizes[0] or size not in (width, width // 2) for size in sizes):
        return f"the kernel takes tables of {width // 2} or {width} numbers a token, the same for all parts"
    for group in ((*q, *k), weights, angles):
        dtypes = {str(tensor.dtype) for tensor in group if tensor is not None}
        if len(dtypes) > 1:
            return f"the kernel takes one dtype for all parts, got {', '.join(sorted(dtypes))}"
    if width > WIDEST_HEAD:
        return f"the kernel takes heads of a width up to {WIDEST_HEAD}"
    if max(q[0].shape[2], k[0].shape[2]) * width > WIDEST_TOKEN:
        return f"the kernel takes tokens of up to {WIDEST_TOKEN:,} numbers"
    if len({weight is None for weight in weights}) > 1:
        return "some parts have a norm weight and some have none"
    return None
