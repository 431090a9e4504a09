"""`qk_norm_rope` on a CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tritium.ops import cpp
from tritium.ops import rope as rotation
from tritium.ops.launch import call
from tritium.ops.qk_norm_rope.arguments import COMPLEX, ELEMENT, PAIR, angles, decline_form, table_kind
from tritium.ops.qk_norm_rope.reference import HEAD, NONE, ROW, fake

SOURCE = Path(__file__).with_name("kernel.cpp")
# The struct `Given`.
LAYOUT = 49 * "q" + "d"

# The numbers of the kernel's enumerations.
NORM = {NONE: 0, HEAD: 1, ROW: 2}
PAIRS = {NONE: 0, rotation.INTERLEAVED: 1, rotation.COMPLEX: 1, rotation.HALF: 2}
TABLE = {NONE: 0, ELEMENT: 0, PAIR: 1, COMPLEX: 2}


def run_cpu(
    q: list[torch.Tensor],
    k: list[torch.Tensor],
    q_weights: list[torch.Tensor | None],
    k_weights: list[torch.Tensor | None],
    tables: list[torch.Tensor | None],
    sines: list[torch.Tensor | None],
    eps: float,
    norm: str,
    rope: str,
    heads_first: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    q_out, k_out = fake(q, k, q_weights, k_weights, tables, sines, eps, norm, rope, heads_first)
    batches, first_tokens, _, width = q[0].shape
    tokens = sum(part.shape[1] for part in q)
    if batches * tokens == 0:
        return q_out, k_out
    turning = [(None, None) if rope == NONE else given for given in zip(tables, sines, strict=True)]
    call(
        cpp.packed(SOURCE, "qk_norm_rope", LAYOUT),
        *_side(q, q_weights, q_out),
        *_side(k, k_weights, k_out),
        *(number for index in range(2) for number in _angles(*turning[min(index, len(turning) - 1)])),
        batches,
        tokens,
        first_tokens,
        width,
        NORM[norm],
        PAIRS[rope],
        TABLE[table_kind(tables, rope, width)],
        len(tables),
        heads_first,
        *(_narrow(group) for group in (q, [*q_weights, *k_weights], [*tables, *sines])),
        cpp.threads(q_out.numel() + k_out.numel()),
        eps,
    )
    return q_out, k_out


def _side(parts: list[torch.Tensor], weights: list[torch.Tensor | None], out: torch.Tensor) -> list[Any]:
    numbers: list[Any] = []
    for x, weight in zip(parts, weights, strict=True):
        row = x if x.stride(-1) == 1 else x.contiguous()
        numbers += (row, *row.stride()[:3], 0 if weight is None else weight.contiguous())
    return [*numbers, *(0,) * (10 - len(numbers)), out, parts[0].shape[2]]


def _angles(table: torch.Tensor | None, sine: torch.Tensor | None) -> tuple[Any, ...]:
    return *_table(table), *_table(sine)


def _table(table: torch.Tensor | None) -> tuple[Any, ...]:
    """Where a table's numbers lie, and how far apart in real numbers those of samples and tokens are."""
    if table is None:
        return 0, 0, 0
    unit = 2 if table.is_complex() else 1
    # Two numbers that lie together count as one for what follows.
    dense = table.stride(-1) == 1 and (table.dim() == 3 or table.stride(2) == table.shape[3])
    table = (table if dense else table.contiguous()).resolve_conj()
    batch = 0 if table.shape[0] == 1 else table.stride(0)
    return table, batch * unit, table.stride(1) * unit


def _narrow(group: list[torch.Tensor | None] | list[torch.Tensor]) -> bool:
    return any(tensor is not None and tensor.dtype == torch.bfloat16 for tensor in group)


def decline_cpu(
    q: list[torch.Tensor],
    k: list[torch.Tensor],
    q_weights: list[torch.Tensor | None],
    k_weights: list[torch.Tensor | None],
    tables: list[torch.Tensor | None],
    sines: list[torch.Tensor | None],
    eps: float,
    norm: str,
    rope: str,
    heads_first: bool,
) -> str | None:
    del eps, norm, heads_first
    weights, turning = [*q_weights, *k_weights], angles(tables, sines, rope)
    tensors = [tensor for tensor in (*q, *k, *weights, *turning) if tensor is not None]
    return (
        decline_form(q, k, weights, turning)
        or cpp.cannot_read(*(tensor.dtype for tensor in tensors))
        or cpp.cannot_run(*tensors)
    )
