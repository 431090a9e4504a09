"""The user's request for parallelism: a degree for every axis of the mesh."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any, Literal

from tritium.config import keywords_only
from tritium.errors import ConfigError

# The axes of the mesh, outermost first: ranks of the axes at the end are neighbours and exchange the most.
AXES = ("cfg", "ring", "gather", "ulysses", "experts", "tensor")
# The axes that split the tokens of one image.
SEQUENCE = ("ring", "gather", "ulysses")


@keywords_only
@dataclass(frozen=True, kw_only=True)
class Parallel:
    """Run one pipeline on several ranks.

    The product of the degrees is the number of ranks. If all are None, a cost model chooses them when the pipeline is
    optimized, and `Plan(measure=True)` measures the best three; if any is given, the others are 1.

    Args:
        cfg: Ranks that share the branches of guidance.
        ulysses: Ranks that split the tokens, and exchange them for heads in attention.
        ring: Ranks that split the tokens, and pass keys and values around a ring.
        gather: Ranks that split the tokens, and gather keys and values.
        tensor: Ranks that split the weights of linear layers, to save memory.
        experts: Ranks that split the experts of routed mixtures.
        vae: Ranks that share the tiles of the VAE; "auto" uses all ranks where the VAE can be split, None uses one.
        exchange: How `ulysses` exchanges: "split" in four collectives, of which some run beside products; "packed" in two;
            "chunks N" some heads at a time, beside the attention of others; "auto" chooses by size.

    >>> Parallel(cfg=2, ulysses=4).size
    8
    """

    cfg: int | None = None
    ulysses: int | None = None
    ring: int | None = None
    gather: int | None = None
    tensor: int | None = None
    experts: int | None = None
    vae: Literal["auto"] | int | None = "auto"
    exchange: str = "auto"

    def __post_init__(self) -> None:
        for axis in (*AXES, "vae"):
            degree: Any = getattr(self, axis)
            if degree is None or (axis == "vae" and degree == "auto"):
                continue
            if isinstance(degree, bool) or not isinstance(degree, int) or degree < 1:
                words = '"auto", None or a number of ranks' if axis == "vae" else "None or a number of ranks"
                raise ConfigError(f"parallel {axis}={degree!r} is no degree; give {words} from 1")
        if not re.fullmatch(r"auto|packed|split|chunks [1-9]\d*", self.exchange):
            raise ConfigError(
                f"there is no exchange {self.exchange!r}; use 'auto', 'packed', 'split', or 'chunks 2' for two chunks"
            )

    def __str__(self) -> str:
        named = [f"{axis}={degree}" for axis, degree in self.degrees.items() if degree > 1]
        return f"parallel {', '.join(named) or ('auto' if self.is_auto else 'on one rank')}"

    @property
    def is_auto(self) -> bool:
        """True if no axis is named, so that a cost model chooses the degrees."""
        return all(getattr(self, axis) is None for axis in AXES)

    @property
    def degrees(self) -> dict[str, int]:
        """Return the degree of every axis; 1 for those that are not named."""
        return {axis: getattr(self, axis) or 1 for axis in AXES}

    @property
    def size(self) -> int:
        """Return the number of ranks that the named degrees need."""
        return math.prod(self.degrees.values())
