"""Sparse attention over a model's layers and steps: which are dense, and the reuse of masks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any

import torch

from tritium.errors import ArgumentError
from tritium.layers.arguments import checked, under_autocast
from tritium.layers.attention.forward import attention_forward, check_streams, with_positive_scale
from tritium.layers.choose import LOSSY, SPARSE, check_name
from tritium.layers.sparse import masks
from tritium.layers.sparse.forward import attend, lists_of
from tritium.layers.sparse.layout import SparseLayout
from tritium.layers.sparse.masks import ADA_BSA, Method, SparseType
from tritium.report.ledger import LEDGER


@dataclass
class _Kept:
    """The mask of one layer, as lists, and the step and the queries for which it was computed."""

    lists: tuple[torch.Tensor, torch.Tensor]
    density: torch.Tensor
    step: int
    queries: tuple[torch.Size, torch.device]


class SparseAttention:
    """Compute sparse attention [B, S, N, D] by layer and step number.

    Args:
        layout: The order of the stream's tokens.
        sparse_type: As in `sparse_attention`.
        sparsity: As in `sparse_attention`.
        dense_steps: The number of dense steps at the start: they determine the composition of an image.
        dense_layers: Layers that are always dense.
        reuse_steps: The number of steps for which a mask is used before it is computed again.
        permuted: Whether the streams are already in the order of `layout.permute`; then they are not reordered.
        by: The implementation: `triton`, `flex`, `int8` or `reference`; None for the fastest of the exact ones.
        cdf_threshold: As in `sparse_attention`.
    """

    @checked
    def __init__(
        self,
        layout: SparseLayout,
        *,
        sparse_type: SparseType = "rf_v2",
        sparsity: float = 0.5,
        dense_steps: int = 0,
        dense_layers: Collection[int] = (),
        reuse_steps: int = 1,
        permuted: bool = False,
        by: str | None = None,
        cdf_threshold: float = 1.0,
    ) -> None:
        if reuse_steps < 1:
            raise ArgumentError(f"reuse_steps must be 1 or more, got {reuse_steps}")
        check_name(SPARSE, by)
        self.method = Method(sparse_type, sparsity, cdf_threshold=cdf_threshold)
        if sparse_type == ADA_BSA:
            # The estimate uses the stream's order and does not distinguish text.
            layout = SparseLayout.plain(layout.tokens, layout.block_size)
        elif layout.tile != self.method.tile:
            layout = replace(layout, tile=self.method.tile)
        self.layout = layout
        self.dense_steps = dense_steps
        self.dense_layers = frozenset(dense_layers)
        self.reuse_steps = reuse_steps
        self.permuted = permuted
        self.by = by
        # What computes steps and layers that are dense.
        self.dense: Callable[..., torch.Tensor] = attention_forward
        self._kept: dict[tuple[int, int], _Kept] = {}
        # The work of all calls, in units of one dense attention, and the number of calls.
        self._done: torch.Tensor | float = 0.0
        self._calls = 0
        LEDGER.watch_sparse(self)

    @checked
    @under_autocast
    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        step: int,
        layer: int,
        scale: float | None = None,
        stream: int = 0,
    ) -> torch.Tensor:
        """Compute one attention; `stream` numbers the calls of a step, such as guidance's, for the masks."""
        check_streams({"q": q, "k": k, "v": v})
        for name, tensor in (("q", q), ("k", k)):
            # Kernels read the layout's blocks without bounds checks against the tensor.
            if tensor.shape[1] != self.layout.tokens:
                raise ArgumentError(
                    f"{name} has {tensor.shape[1]} tokens, and the layout {self.layout.tokens}: {tuple(tensor.shape)}"
                )
        if step < self.dense_steps or layer in self.dense_layers or self.method.is_dense:
            self._count(1.0)
            return self.dense(q, k, v, None, scale, enable_gqa=True)
        q, factor = with_positive_scale(q, scale)
        reordered = not (self.permuted or self.layout.keeps_order)
        if reordered:
            q, k, v = (self.layout.permute(tensor) for tensor in (q, k, v))
        kept = self._blocks(q, k, step, (layer, stream), factor)
        out = attend(q, k, v, kept.lists, self.layout, self.layout, factor, by=self.by)
        self._count(kept.density)
        return self.layout.unpermute(out) if reordered else out

    def _blocks(self, q: torch.Tensor, k: torch.Tensor, step: int, place: tuple[int, int], scale: float) -> _Kept:
        kept, queries = self._kept.get(place), (q.shape, q.device)
        if kept is None or kept.queries != queries or not 0 <= step - kept.step < self.reuse_steps:
            mask = self.method.mask(q, k, self.layout, self.layout, scale)
            lists = lists_of(mask, self.layout, self.layout, q.shape[0])
            density = masks.density(mask, self.layout, self.layout)
            kept = self._kept[place] = _Kept(lists, density, step, queries)
        return kept

    def _count(self, share: torch.Tensor | float) -> None:
        # Sum on the device: reading the value would synchronize.
        self._done = self._done + share
        self._calls += 1

    def density(self) -> float:
        """Return the computed share of dense attention's work over all calls since the last reset."""
        if not self._calls:
            raise ArgumentError("nothing was computed yet: there is no density")
        return float(self._done) / self._calls

    def summary(self) -> dict[str, Any] | None:
        """Return the entry for a report, or None before the first call."""
        if not self._calls:
            return None
        share = self.density()
        what = f"sparse by {self.method.sparse_type}, {self.layout.tokens} tokens: density {share:.3f} over {self._calls} calls"
        return {"graph": "-", "by": self.by or "the fastest", "what": what, "density": share}

    def use_lossy(self, provider: str) -> Callable[[], None]:
        """Compute by a lossy provider wherever it can, sparse and dense; return a function that undoes this."""
        before = self.by, self.dense
        self.by = f"{LOSSY}:{provider}"
        self.dense = functools.partial(attention_forward, opt_mode="lossy", op_type=provider)

        def undo() -> None:
            self.by, self.dense = before

        return undo

    def forget_masks(self) -> None:
        """Drop the masks, as at the start of another image."""
        self._kept.clear()

    def reset(self) -> None:
        """Drop masks and reset the density."""
        self.forget_masks()
        self._done, self._calls = 0.0, 0
