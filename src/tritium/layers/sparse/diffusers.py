"""Sparse attention in stock diffusers models; layers and steps are counted while the model runs.

handle = tritium.set_sparse_attention(
    pipe.transformer, tritium.SparseLayout((1, 64, 64), txt_len=512), sparsity=0.5, dense_steps=4, reuse_steps=4
)
pipe(prompt)
handle.density()      # the computed share of dense attention's work
handle.remove()
"""

from __future__ import annotations

import functools
import inspect
import warnings
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn, overrides

from tritium import compat, device
from tritium.errors import ArgumentError
from tritium.layers.arguments import checked
from tritium.layers.attention.diffusers import AttentionHandle, change_layers
from tritium.layers.sparse.layout import SparseLayout
from tritium.layers.sparse.masks import SparseType
from tritium.layers.sparse.schedule import SparseAttention

# The names of the timestep in models' signatures.
TIMES = ("timestep", "timesteps", "t")


class SparseHandle(AttentionHandle):
    """The changes of `set_sparse_attention`; `remove()`, or the end of a `with` block, undoes them."""

    def __init__(self, counter: _Counter) -> None:
        super().__init__()
        self.attention = counter.attention
        self._counter = counter

    @property
    def around(self) -> Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]:
        """Return a function that counts a call in place of the forwards in it: some calls are answered without one."""
        return self._counter.around

    def density(self) -> float:
        """Return the share of dense attention's work that was computed since the last reset."""
        return self.attention.density()

    def reset(self) -> None:
        """Restart the counts: the next forward is step 0 of an image, and the density starts from there."""
        self._counter.forwards, self._counter.images = 0, _Images()
        self.attention.reset()


@dataclass
class _Images:
    """Detect the start of another image from the timesteps of forwards.

    Within an image, timesteps decrease in most models and increase in some. A reversal starts another image, unless it is
    smaller than half a step or a twentieth of the range: some schedulers go back that far between steps.
    """

    first: float | None = None
    last: float = 0.0
    # The last change of the timestep, with its sign.
    move: float = 0.0

    def begins(self, now: float, *, whole_step: bool) -> bool:
        """Return whether a forward starts another image; `whole_step`: the last step is complete."""
        begins = self.first is not None and self._is_reversal(now, self.first, whole_step=whole_step)
        if begins or self.first is None:
            self.first, self.last, self.move = now, now, 0.0
        elif now != self.last and (self.move == 0 or (now > self.last) == (self.move > 0)):
            self.last, self.move = now, now - self.last
        return begins

    def _is_reversal(self, now: float, first: float, *, whole_step: bool) -> bool:
        if now == first:
            # Almost no scheduler uses the first timestep in two steps.
            return whole_step
        back = self.last - now if self.move > 0 else now - self.last
        return self.move != 0 and back > max(abs(self.move) / 2, abs(self.last - first) / 20)


# The arguments of a forward, by position and by name.
Timestep = Callable[[Sequence[Any], Mapping[str, Any]], float | None]


def timestep_of(module: nn.Module) -> Timestep | None:
    """Return a function that reads the timestep from the arguments of a module's forward, or None if it has none."""
    # The forward of an instance may be wrapped, and the class of a compiled module has a forward of `*args`.
    original: Any = type(compat.modules.unwrapped(module))
    names = list(inspect.signature(original.forward).parameters)[1:]
    name = next((name for name in TIMES if name in names), None)
    return None if name is None else functools.partial(_read_timestep, name, names.index(name))


def _read_timestep(name: str, place: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> float | None:
    """Return the timestep as one number, or None if it cannot be read."""
    value = args[place] if place < len(args) else kwargs.get(name)
    if not isinstance(value, torch.Tensor):
        return float(value) if isinstance(value, (int, float)) else None
    if value.numel() == 0 or (value.is_cuda and device.is_capturing()):
        return None
    # Tokens may have separate timesteps, as for an image that is partly known: use the largest.
    return float(value.max())


@dataclass
class _Counter:
    """The index of the current forward within an image, and of the current attention within the forward."""

    attention: SparseAttention
    calls_per_step: int = 1
    # None if the timestep is not needed.
    timestep: Timestep | None = None
    images: _Images = field(default_factory=_Images)
    forwards: int = 0
    layer: int = 0
    # Whether the current call of the model was counted by `around`.
    _is_counted: bool = False
    # Whether an attention of this forward was sparse, and descriptions of the dense ones.
    is_sparse: bool = False
    dense: set[str] = field(default_factory=set)
    _warned: bool = False

    def around(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Count a call of the model, whether a technique inside skips it or runs the model several times."""
        self._count(args, kwargs)
        self._is_counted = True
        try:
            return call(*args, **kwargs)
        finally:
            self._is_counted = False

    def begin(self, _: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        if not self._is_counted:
            self._count(args, kwargs)
        self.layer = 0
        self.is_sparse = False
        self.dense.clear()

    def _count(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        if self.timestep is not None:
            self._look(self.timestep, args, kwargs)
        self.forwards += 1

    # Untraced: it reads the timestep's value, which a graph cannot do.
    @compat.dynamo.untraced
    def _look(self, timestep: Timestep, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        now = timestep(args, kwargs)
        if now is not None and self.images.begins(now, whole_step=self.forwards % self.calls_per_step == 0):
            self.forwards = 0
            self.attention.forget_masks()

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        scale: float | None = None,
        *,
        is_causal: bool = False,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        """Compute the next attention of the forward, of q, k and v as [B, S, N, D]."""
        q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
        return self.counted_attention(q, k, v, attn_mask, scale, is_causal, enable_gqa).transpose(1, 2)

    def counted_attention(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        attn_mask: torch.Tensor | None,
        scale: float | None,
        is_causal: bool,
        enable_gqa: bool,
    ) -> torch.Tensor:
        """Compute the next attention of the forward, of q, k and v as [B, N, S, D].

        Modes of PyTorch get it as one function: with split tokens, they call it with the tokens of all ranks.
        """
        if not torch.compiler.is_compiling() and overrides.has_torch_function((q, k, v)):
            given = (q, k, v, attn_mask, scale, is_causal, enable_gqa)
            result: torch.Tensor = overrides.handle_torch_function(self.counted_attention, (q, k, v), *given)
            return result
        layer = self.layer
        self.layer += 1
        masked = attn_mask is not None or is_causal
        if masked or not q.shape[2] == k.shape[2] == self.attention.layout.tokens:
            self.dense.add(f"{q.shape[2]} queries and {k.shape[2]} keys{' with a mask' if masked else ''}")
            return self.attention.dense(
                q, k, v, attn_mask, scale, head_first=True, is_causal=is_causal, enable_gqa=enable_gqa
            )
        self.is_sparse = True
        # A block called outside of its model is in step 0.
        step, stream = divmod(max(0, self.forwards - 1), self.calls_per_step)
        q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
        return self.attention(q, k, v, step=step, layer=layer, scale=scale, stream=stream).transpose(1, 2)

    def end(self, *_: Any) -> None:
        # `dense` is empty in forwards in which a cache of diffusers skipped all attentions.
        if self.is_sparse or self._warned or not self.dense:
            return
        self._warned = True
        _warn(
            f"the layout has {self.attention.layout.tokens} tokens, and no attention of this model without a mask "
            f"has as many, so all stay dense. There are: {'; '.join(sorted(self.dense))}"
        )


# The sparse attention of modules that have it.
_HANDLES: weakref.WeakKeyDictionary[nn.Module, SparseHandle] = weakref.WeakKeyDictionary()


def sparse_handle(module: nn.Module) -> SparseHandle | None:
    """Return what `set_sparse_attention` changed in a module, or None if it has no sparse attention."""
    return _HANDLES.get(module)


def _forget(module: weakref.ref[nn.Module]) -> None:
    if (owner := module()) is not None:
        _HANDLES.pop(owner, None)


def _warn(message: str) -> None:
    warnings.warn(f"tritium: {message}", RuntimeWarning, stacklevel=3)


@checked
def set_sparse_attention(
    module: nn.Module,
    layout: SparseLayout,
    *,
    sparse_type: SparseType = "rf_v2",
    sparsity: float = 0.5,
    dense_steps: int = 0,
    dense_layers: Collection[int] = (),
    reuse_steps: int = 1,
    calls_per_step: int = 1,
    by: str | None = None,
    cdf_threshold: float = 1.0,
) -> SparseHandle:
    """Make the attention layers of a stock diffusers model sparse if they are over the tokens of a layout.

    Steps and layers are counted while the model runs, so it runs eagerly. Another image begins when the timestep goes back
    or restarts; if it does neither, as after an inversion, call `handle.reset()`. Attentions of other tokens, such as
    those to a prompt, stay dense, as do attentions with a mask, which no sparse method applies.

    `module` is a transformer whose stream is text and then the latent, such as FLUX's, or the latent alone, such as Wan's.
    `dense_layers` are attentions by their index in the order in which they run. `calls_per_step` is 2 if guidance runs the
    model twice. The other options are those of `SparseAttention`.
    """
    if calls_per_step < 1:
        raise ArgumentError(f"calls_per_step must be 1 or more, got {calls_per_step}")
    attention = SparseAttention(
        layout,
        sparse_type=sparse_type,
        sparsity=sparsity,
        dense_steps=dense_steps,
        dense_layers=dense_layers,
        reuse_steps=reuse_steps,
        by=by,
        cdf_threshold=cdf_threshold,
    )
    counter = _Counter(attention, calls_per_step)
    handle = SparseHandle(counter)
    name = f"tritium:sparse:{id(counter)}"
    change_layers(handle, module, name, counter.attend)
    handle.callback(compat.diffusers.remove_backend, name)
    _HANDLES[module] = handle
    handle.callback(_forget, weakref.ref(module))
    handle.callback(module.register_forward_pre_hook(counter.begin, with_kwargs=True).remove)
    handle.callback(module.register_forward_hook(counter.end).remove)
    if dense_steps > 0 or reuse_steps > 1:
        # Read the timestep only if step numbers matter: on a GPU this synchronizes.
        counter.timestep = timestep_of(module)
        if counter.timestep is None:
            _warn(
                f"{type(module).__name__} has no parameter {' or '.join(TIMES)} that separates images: call "
                "handle.reset() before each but the first"
            )
    return handle
