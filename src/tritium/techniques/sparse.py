"""Compute only the blocks of attention that matter, in layers over the tokens of a latent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from tritium.errors import ArgumentError, ConfigError, nearest
from tritium.layers.attention.diffusers import attention_layers
from tritium.layers.sparse.diffusers import SparseHandle, set_sparse_attention
from tritium.layers.sparse.layout import SparseLayout
from tritium.layers.sparse.masks import SparseType
from tritium.techniques.attention import Attention
from tritium.techniques.choice import Choice
from tritium.techniques.technique import Note, Part, Technique


@dataclass(frozen=True, kw_only=True)
class Sparse:
    """Sparse attention, as `tritium.set_sparse_attention`; it is lossy.

    Args:
        latent: Frames, height and width of the latent, in tokens.
        text: The number of text tokens in the stream.
        method: `rf_v2`, `ada_bsa` or `radial`.
        sparsity: The share of blocks that are left out.
        dense_steps: The number of steps at the start of an image that are dense.
        reuse_steps: The number of steps for which a mask is used.
        calls_per_step: The calls of the model in a step: 2 if guidance calls it twice.
    """

    latent: tuple[int, int, int]
    text: int = 0
    method: SparseType = "rf_v2"
    sparsity: float = 0.5
    dense_steps: int = 0
    reuse_steps: int = 1
    calls_per_step: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "latent", tuple(self.latent))
        if self.method not in get_args(SparseType):
            raise ConfigError(f"there is no method {self.method!r}; {nearest(str(self.method), get_args(SparseType))}")
        if not 0 <= self.sparsity <= 1:
            raise ConfigError(f"sparsity is a share from 0 to 1, got {self.sparsity!r}")
        for name, least in (("dense_steps", 0), ("reuse_steps", 1), ("calls_per_step", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} is {least} or more, got {getattr(self, name)!r}")
        try:
            self.layout()
        except ArgumentError as error:
            raise ConfigError(str(error)) from error

    def __str__(self) -> str:
        return f"sparse {self.method} {self.sparsity:g}"

    def layout(self) -> SparseLayout:
        return SparseLayout(self.latent, self.text)


def applies_to(part: Part, _config: Sparse) -> str | None:
    return None if attention_layers(part.module) else "it has no attention layers of diffusers"


def conflicts(_config: Sparse, choice: Choice) -> str | None:
    if choice.how != "eager":
        return (
            "sparse attention counts layers and steps in Python, so its part cannot be compiled; give it to that part: "
            "Plan(components={'transformer': Choice(how='eager', sparse=...)})"
        )
    if choice.get(Attention) is not None:
        return "sparse attention and another provider of attention exclude each other; leave one of them out"
    return None


def apply(part: Part, config: Sparse) -> SparseHandle:
    handle = set_sparse_attention(
        part.module,
        config.layout(),
        sparse_type=config.method,
        sparsity=config.sparsity,
        dense_steps=config.dense_steps,
        reuse_steps=config.reuse_steps,
        calls_per_step=config.calls_per_step,
    )
    # Calls that other techniques answer are steps, too.
    part.around(handle.around, outside=True)
    return handle


def remove(_part: Part, handle: SparseHandle) -> None:
    handle.remove()


def report(_part: Part, config: Sparse, handle: SparseHandle) -> Note:
    row = handle.attention.summary()
    density = None if row is None else row["density"]
    text = f"sparse attention by {config.method}" + ("" if density is None else f", density {density:.3f}")
    return Note(text, {"method": config.method, "layers": handle.layers, "density": density})


TECHNIQUE = Technique(
    name="sparse",
    config=Sparse,
    applies_to=applies_to,
    apply=apply,
    remove=remove,
    conflicts=conflicts,
    report=report,
    is_lossy=True,
)
