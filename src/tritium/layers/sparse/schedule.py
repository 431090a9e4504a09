"""Sparse attention over the layers and steps of a model: where it stays dense, and how long a mask serves.

handle = tritium.set_sparse_attention(
    pipe.transformer, tritium.SparseLayout((1, 64, 64), txt_len=512), sparsity=0.5, dense_steps=4, reuse_steps=4
)
pipe(prompt)
handle.density()      # the share of dense attention's work that was done
handle.remove()
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from tritium.errors import ArgumentError, ArgumentTypeError
from tritium.layers.attention.forward import attention_forward
from tritium.layers.attention.stock import AttentionHandle, forget_attention_backend, serve
from tritium.layers.sparse import masks
from tritium.layers.sparse.attend import attend, lists_of
from tritium.layers.sparse.forward import ADA_BSA, RF_V2, Method
from tritium.layers.sparse.layout import SparseLayout
from tritium.report import LEDGER


@dataclass
class _Kept:
    """The mask of one layer, as lists, and the step it was made at."""

    lists: tuple[torch.Tensor, torch.Tensor]
    density: torch.Tensor
    step: int
    shape: tuple[int, ...]


class SparseAttention:
    """Attention [B, S, N, D] of numbered layers and steps.

    Args:
        layout: The order of the stream's tokens.
        sparse_type: As in `sparse_attention`.
        sparsity: As in `sparse_attention`.
        dense_steps: The first steps, in which everything is dense: they decide what a picture is of.
        dense_layers: Layers that are always dense.
        reuse_steps: For how many steps a mask serves before it is made anew.
        permuted: Whether the streams come in the order of `layout.permute` already. Then nothing is reordered here.
        by: Who computes: `triton`, `flex` or `reference`; None for the fastest.
    """

    def __init__(
        self,
        layout: SparseLayout,
        *,
        sparse_type: str = RF_V2,
        sparsity: float = 0.5,
        dense_steps: int = 0,
        dense_layers: Collection[int] = (),
        reuse_steps: int = 1,
        permuted: bool = False,
        by: str | None = None,
        cdf_threshold: float = 1.0,
    ) -> None:
        if not isinstance(layout, SparseLayout):
            raise ArgumentTypeError(f"layout must be a SparseLayout, got {type(layout).__name__}")
        for name, least, value in (("dense_steps", 0, dense_steps), ("reuse_steps", 1, reuse_steps)):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ArgumentError(f"{name} must be a whole number, {least} or more, got {value!r}")
        self.method = Method(sparse_type, sparsity, cdf_threshold=cdf_threshold)
        if sparse_type == ADA_BSA:
            # An estimate is made over the order as it is, and knows no text.
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
        # What all calls did, in units of one dense attention, and how many calls there were.
        self._done: torch.Tensor | float = 0.0
        self._calls = 0
        LEDGER.watch_sparse(self)

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
        """`stream` tells runs of one step apart whose masks differ, such as those of a guidance."""
        if step < self.dense_steps or layer in self.dense_layers or self.method.is_dense:
            self._count(1.0)
            return attention_forward(q, k, v, None, scale, enable_gqa=True)
        factor = q.shape[-1] ** -0.5 if scale is None else float(scale)
        # Without tiles and text the order is the stream's own.
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
        fresh = kept is not None and 0 <= step - kept.step < self.reuse_steps and kept.shape == tuple(q.shape)
        if kept is None or not fresh:
            mask = self.method.mask(q, k, self.layout, self.layout, scale)
            edges = self.layout.edges(q.device)
            lists = lists_of(mask, edges, edges, self.layout.block_size, q.shape[0], causal=False)
            share = masks.density(mask, self.layout, self.layout)
            kept = self._kept[place] = _Kept(lists, share, step, tuple(q.shape))
        return kept

    def _count(self, share: torch.Tensor | float) -> None:
        # On the device: reading it would wait for it.
        self._done = self._done + share
        self._calls += 1

    def density(self) -> float:
        """The share of dense attention's work that was done since the beginning or the last reset, over all calls."""
        if not self._calls:
            raise ArgumentError("nothing was computed yet: there is no density")
        return float(self._done) / self._calls

    def summary(self) -> dict[str, Any] | None:
        """What a report says of it; None before it computed anything."""
        if not self._calls:
            return None
        share = self.density()
        what = f"sparse by {self.method.sparse_type}, {self.layout.tokens} tokens: density {share:.3f} over {self._calls} calls"
        return {"graph": "-", "by": self.by or "the fastest", "what": what, "density": share}

    def reset(self) -> None:
        """Forget masks and densities: another picture begins."""
        self._kept.clear()
        self._done, self._calls = 0.0, 0


@dataclass
class SparseHandle:
    """What `set_sparse_attention` changed, and the way back."""

    attention: SparseAttention
    layers: int
    _name: str
    _served: AttentionHandle
    _hook: Any
    _counter: _Counter

    def density(self) -> float:
        """The share of dense attention's work that was done since the last reset."""
        return self.attention.density()

    def reset(self) -> None:
        """Another picture begins: the next forward is step 0."""
        self._counter.forwards = 0
        self.attention.reset()

    def remove(self) -> None:
        """Give every layer back what it had."""
        self._hook.remove()
        self._served.remove()
        forget_attention_backend(self._name)

    def __enter__(self) -> SparseHandle:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()


@dataclass
class _Counter:
    """Which forward and which of its attentions is under way."""

    calls_per_step: int
    forwards: int = 0
    layer: int = 0

    def begin(self, *_: Any) -> None:
        self.forwards += 1
        self.layer = 0

    @property
    def step(self) -> int:
        return (self.forwards - 1) // self.calls_per_step

    @property
    def stream(self) -> int:
        return (self.forwards - 1) % self.calls_per_step


def set_sparse_attention(
    module: nn.Module,
    layout: SparseLayout,
    *,
    sparse_type: str = RF_V2,
    sparsity: float = 0.5,
    dense_steps: int = 0,
    dense_layers: Collection[int] = (),
    reuse_steps: int = 1,
    calls_per_step: int = 1,
    by: str | None = None,
) -> SparseHandle:
    """Let the attention layers of a stock diffusers model that are over the tokens of a layout be sparse.

    Steps and layers are counted as the model runs, so it runs eagerly. Attentions of other tokens, such as those to a
    prompt, stay dense; so does one with a mask, which no method honours.

    Args:
        module: A transformer whose stream is text and then the latent, such as FLUX's, or the latent alone, such as Wan's.
        layout: The order of its tokens.
        sparse_type: As in `sparse_attention`.
        sparsity: As in `sparse_attention`.
        dense_steps: The first steps, in which everything is dense.
        dense_layers: Attentions that are always dense, by their number in the order in which they run.
        reuse_steps: For how many steps a mask serves.
        calls_per_step: How often a step runs the model: 2 where guidance runs it twice.
        by: Who computes: `triton`, `flex` or `reference`; None for the fastest.
    """
    attention = SparseAttention(
        layout,
        sparse_type=sparse_type,
        sparsity=sparsity,
        dense_steps=dense_steps,
        dense_layers=dense_layers,
        reuse_steps=reuse_steps,
        by=by,
    )
    counter = _Counter(calls_per_step)
    tokens = layout.tokens

    def attend_in_turn(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        scale: float | None = None,
        *,
        is_causal: bool = False,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        layer = counter.layer
        counter.layer += 1
        if attn_mask is not None or is_causal or not q.shape[1] == k.shape[1] == tokens:
            return attention_forward(q, k, v, attn_mask, scale, is_causal=is_causal, enable_gqa=enable_gqa)
        return attention(q, k, v, step=counter.step, layer=layer, scale=scale, stream=counter.stream)

    name = f"tritium:sparse:{id(counter)}"
    served = serve(module, name, attend_in_turn)
    hook = module.register_forward_pre_hook(counter.begin)
    return SparseHandle(attention, served.layers, name, served, hook, counter)
