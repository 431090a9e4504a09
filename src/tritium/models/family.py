"""What a file of this folder declares: the facts of one family of denoisers, and no logic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Family:
    """A denoiser's classes and where it repeats itself.

    `blocks` are the classes of its repeated blocks: equal blocks share one compilation. A family without blocks is compiled
    as a whole. `left` are children that stay as they are, each with the reason.
    """

    name: str
    denoisers: tuple[str, ...]
    blocks: tuple[str, ...]
    left: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Codec:
    """A VAE's classes. Its decoder and encoder are what is compiled.

    `decoder` and `encoder` name the dims of their arguments that change from picture to picture, as `dynamic_dims` does.
    `cache` are the arguments that a call changes in place for the next one.
    """

    name: str
    classes: tuple[str, ...]
    decoder: Mapping[str, tuple[int, ...]]
    encoder: Mapping[str, tuple[int, ...]]
    cache: tuple[str, ...] = ()
