"""Sparse attention over a model's layers and steps: which are dense, and the reuse of masks."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import torch

from tritium.errors import ArgumentError
from tritium.layers.arguments import check_at_least, checked
from tritium.layers.attention.forward import attention_forward, check_streams, with_positive_scale
from tritium.layers.autocast import under_autocast
from tritium.layers.sparse import masks
from tritium.layers.sparse.choose import attend, check_provider
from tritium.layers.sparse.forward import ADA_BSA, Method, SparseType, lists_of
from tritium.layers.sparse.layout import SparseLayout
from tritium.report.ledger import LEDGER


@dataclass
class _Kept:
    """The mask of one layer, as lists, and the step and shape of the queries for which it was computed."""

    lists: tuple[torch.Tensor, torch.Tensor]
    density: torch.Tensor
    step: int
    shape: torch.Size
    device: torch.device


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
        by: The implementation: `triton`, `flex` or `reference`; None for the fastest.
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
        check_at_least("reuse_steps", reuse_steps, 1)
        check_provider(by)
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
        check_streams(("q", "k", "v"), q, k, v, heads_first=False)
        for name, tensor in (("q", q), ("k", k)):
            # Kernels read the layout's blocks without bounds checks against the tensor.
            if tensor.shape[1] != self.layout.tokens:
                raise ArgumentError(
                    f"{name} has {tensor.shape[1]} tokens, and the layout {self.layout.tokens}: {tuple(tensor.shape)}"
                )
        if step < self.dense_steps or layer in self.dense_layers or self.method.is_dense:
            self._count(1.0)
            return attention_forward(q, k, v, None, scale, enable_gqa=True)
        q, factor = with_positive_scale(q, (q.shape[-1] or 1) ** -0.5 if scale is None else float(scale))
        # Without tiles and without leading text, the permutation is the identity.
        moved = self.layout.tile > 1 or (self.layout.txt_len > 0 and self.layout.text_first)
        reordered = moved and not self.permuted
        if reordered:
            q, k, v = (self.layout.permute(tensor) for tensor in (q, k, v))
        kept = self._lists(q, k, step, (layer, stream), factor)
        edges = self.layout.edges(q.device)
        out = attend(q, k, v, kept.lists, edges, edges, self.layout.block_size, factor, by=self.by)
        self._count(kept.density)
        return self.layout.unpermute(out) if reordered else out

    def _lists(self, q: torch.Tensor, k: torch.Tensor, step: int, place: tuple[int, int], scale: float) -> _Kept:
        kept = self._kept.get(place)
        serves = kept is not None and kept.shape == q.shape and kept.device == q.device
        if kept is None or not serves or not 0 <= step - kept.step < self.reuse_steps:
            mask = self.method.mask(q, k, self.layout, self.layout, scale)
            edges = self.layout.edges(q.device)
            lists = lists_of(mask, edges, edges, self.layout.block_size, q.shape[0], causal=False)
            share = masks.density(mask, self.layout, self.layout)
            kept = self._kept[place] = _Kept(lists, share, step, q.shape, q.device)
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

    def forget_masks(self) -> None:
        """Drop the masks, as at the start of another image."""
        self._kept.clear()

    def reset(self) -> None:
        """Drop masks and reset the density."""
        self.forget_masks()
        self._done, self._calls = 0.0, 0
