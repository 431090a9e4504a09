"""Route tokens to experts, group their rows by expert, multiply the groups, and combine the results.

    indices, weights = route(logits, top_k=2)                       # [S, k] of each token
    rows, slots, offsets = group_rows(indices, experts=4)           # which tokens the sorted rows are
    out = grouped_linear(x[rows], expert_weights, offsets)          # [S * k, N]
    y = combine_rows(out, slots, weights)                           # [S, N]

`routed_swiglu` is all of it for experts that are SwiGLU feed-forwards. No function reads a number back from the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F  # noqa: N812 - the conventional name

from tritium import compat, ops
from tritium.errors import ArgumentError, ArgumentTypeError
from tritium.layers.arguments import check_rank, check_shape, checked, checked_with_stored
from tritium.ops import grouped_linear as product


@checked
def route(logits: torch.Tensor, top_k: int, *, normalize: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the experts of each token and their weights, both [S, k]: the largest of the softmax of logits.

    Args:
        logits: [S, E].
        top_k: The number of experts of a token.
        normalize: Divide the weights of a token by their sum.
    """
    check_rank("logits", logits, 2)
    if not 1 <= top_k <= logits.shape[1]:
        raise ArgumentError(f"top_k must be 1 to {logits.shape[1]}, the number of experts; got {top_k}")
    weights, indices = logits.softmax(dim=-1).topk(top_k, dim=-1, sorted=False)
    if normalize and top_k > 1:
        weights = weights / weights.sum(-1, keepdim=True)
    return indices, weights


@checked_with_stored("indices")
def group_rows(indices: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the token of each row sorted by expert [M], the row of each choice [S, k], and the ends of the groups [E].

    A choice of -1 has no row: its place in the second result is -1 too, and as many of the last rows belong to no group.

    Args:
        indices: The experts of each token, [S, k], as `route` returns them. A token chooses an expert at most once.
        experts: The number of experts.
    """
    _check_integers("indices", indices, 2)
    places, counts = ranked(indices, experts)
    offsets = counts.cumsum(0)
    is_chosen = indices >= 0
    slots = torch.where(is_chosen, places + (offsets - counts)[indices.clamp(min=0)], -1)
    count, top_k = indices.shape
    most = count * min(top_k, experts)
    tokens = torch.arange(slots.numel(), device=slots.device) // top_k
    # Rows without a choice write to one more row.
    rows = tokens.new_zeros(most + 1).scatter(0, torch.where(is_chosen, slots, most).flatten(), tokens)
    return rows[:most], slots, offsets.to(torch.int32)


def ranked(indices: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the place of each choice among those of the same expert, in the shape of indices, and each expert's count."""
    # A running count for each expert: cheaper than sorting where there are few.
    numbers = torch.arange(experts, device=indices.device)
    is_chosen = indices.flatten() == numbers[:, None]
    counts = is_chosen.to(torch.int32).cumsum(1)
    places = (counts * is_chosen).sum(0) - 1
    return places.view(indices.shape), is_chosen.sum(1)


@checked_with_stored("offsets")
def grouped_linear(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor] | torch.Tensor,
    offsets: torch.Tensor,
    *,
    zero_rest: bool = True,
    fused: bool = True,
) -> torch.Tensor:
    """Return `linear` of groups of rows, each with another weight.

    Args:
        x: [M, K], the rows of the first expert, then those of the second, and so on.
        weights: [E, N, K], or a weight [N, K] for each expert.
        offsets: The ends of the groups, [E] in int32.
        zero_rest: False leaves rows beyond the last offset undefined, which saves a pass over the result.
        fused: Whether a library's grouped product may compute it; False multiplies all rows with all weights.
    """
    each = _weights("weights", weights)
    check_rank("x", x, 2)
    _check_integers("offsets", offsets, 1)
    check_shape("offsets", offsets, (len(each),))
    if x.shape[1] != each[0].shape[1]:
        raise ArgumentError(f"x must be [M, {each[0].shape[1]}] as the weights are, got shape {tuple(x.shape)}")
    provider = "grouped_mm" if fused and is_grouped(x, *each) else ops.REFERENCE
    return _multiply(x, each, offsets, provider, zero_rest=zero_rest)


@checked_with_stored("slots")
def combine_rows(rows: torch.Tensor, slots: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the weighted sum of each token's rows, [S, N].

    Args:
        rows: The results of the experts, [M, N].
        slots: The row of each choice, [S, k], as `group_rows` returns it; choices of -1 are left out.
        weights: The weights of the choices, [S, k].
    """
    check_rank("rows", rows, 2)
    _check_integers("slots", slots, 2)
    check_shape("weights", weights, tuple(slots.shape))
    chosen = rows[slots.clamp(min=0)] * weights[..., None]
    # Rows that no group has are undefined.
    return torch.where((slots >= 0)[..., None], chosen, 0.0).sum(1)


@checked_with_stored("indices")
def routed_swiglu(
    x: torch.Tensor,
    indices: torch.Tensor,
    weights: torch.Tensor,
    gate: Sequence[torch.Tensor] | torch.Tensor,
    up: Sequence[torch.Tensor] | torch.Tensor,
    down: Sequence[torch.Tensor] | torch.Tensor,
    *,
    fused: bool = True,
) -> torch.Tensor:
    """Return the weighted sum of `down(silu(gate(x)) * up(x))` over the experts of each token, [S, D].

    Without a grouped product for this device and dtype every expert computes all tokens.

    Args:
        x: [S, D].
        indices: The experts of each token, [S, k]; choices of -1 are left out. A token chooses an expert at most once.
        weights: Their weights, [S, k].
        gate: [E, N, D], or a weight [N, D] for each expert.
        up: Like gate.
        down: [E, D, N], or a weight [D, N] for each expert.
        fused: Whether a library's grouped product may compute it.
    """
    sides = [_weights(name, value) for name, value in (("gate", gate), ("up", up), ("down", down))]
    check_rank("x", x, 2)
    _check_integers("indices", indices, 2)
    check_shape("weights", weights, tuple(indices.shape))
    if len({len(side) for side in sides}) > 1:
        raise ArgumentError(f"gate, up and down must have as many experts, got {', '.join(str(len(s)) for s in sides)}")
    if indices.shape[0] != x.shape[0]:
        raise ArgumentError(f"indices must be [{x.shape[0]}, k] as x has rows, got shape {tuple(indices.shape)}")
    first, second, third = sides
    if not fused or not is_grouped(x, *first, *second, *third):
        return every_expert(x, indices, weights, [_swiglu(*three) for three in zip(*sides, strict=True)])
    rows, slots, offsets = group_rows(indices, len(first))
    grouped = x[rows]
    hidden = F.silu(_multiply(grouped, first, offsets, zero_rest=False))
    hidden = hidden * _multiply(grouped, second, offsets, zero_rest=False)
    return combine_rows(_multiply(hidden, third, offsets, zero_rest=False), slots, weights)


def every_expert(
    x: torch.Tensor,
    indices: torch.Tensor,
    weights: torch.Tensor,
    experts: Sequence[Callable[[torch.Tensor], torch.Tensor]],
) -> torch.Tensor:
    """Return the weighted sum over the experts of each token, by computing all tokens with every expert."""
    out = None
    for number, expert in enumerate(experts):
        is_chosen = indices == number
        share = torch.where(is_chosen, weights, 0.0).sum(-1, keepdim=True)
        # Zero times infinity is NaN.
        term = torch.where(is_chosen.any(-1, keepdim=True), expert(x) * share, 0.0)
        out = term if out is None else out + term
    assert out is not None
    return out


def is_grouped(x: torch.Tensor, *weights: torch.Tensor) -> bool:
    """Return True if a library has the grouped product, which has no gradients, for rows and weights like these."""
    if compat.dynamo.needs_gradients(x, *weights):
        return False
    # The product of a group has its own number of rows, and columns of x or of other weights.
    return all(
        product.decline_kind(x.device, x.dtype) is None
        and weight.dtype == x.dtype
        and all(size % (product.ALIGNED // x.element_size()) == 0 for size in weight.shape)
        for weight in weights
    )


def _multiply(
    x: torch.Tensor,
    weights: list[torch.Tensor],
    offsets: torch.Tensor,
    provider: str = "grouped_mm",
    *,
    zero_rest: bool,
) -> torch.Tensor:
    return product.OP.overload(x, weights, offsets, zero_rest, provider=provider)  # type: ignore[no-any-return]


def _swiglu(gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


def _weights(name: str, value: Sequence[torch.Tensor] | torch.Tensor) -> list[torch.Tensor]:
    """Return the weight of each expert, or raise."""
    if isinstance(value, torch.Tensor):
        check_rank(name, value, 3)
        return list(value.unbind())
    each = list(value)
    if not each or any(not isinstance(one, torch.Tensor) or one.shape != each[0].shape for one in each):
        raise ArgumentError(f"{name} must be weights [N, K] of one shape, one for each expert")
    check_rank(name, each[0], 2)
    return each


def _check_integers(name: str, value: torch.Tensor, rank: int) -> None:
    check_rank(name, value, rank)
    if value.dtype not in (torch.int32, torch.int64):
        raise ArgumentTypeError(f"{name} must be int32 or int64, got {value.dtype}")


# Register the operator that graphs contain.
ops.catalog()
