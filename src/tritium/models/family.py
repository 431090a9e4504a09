"""The types of this folder's declarations: facts about denoisers and VAEs, without logic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class ParallelFacts:
    """How a denoiser is split over ranks.

    `streams` are the arguments of a block whose dim 1 are tokens that are split at the first block. `unsplit` is the reason
    why the tokens cannot be split, or empty.
    """

    streams: tuple[str, ...] = ("hidden_states",)
    unsplit: str = ""


# The parts of a linear's features that are split one by one: numbers in proportion, or attributes of the module around
# the linear. No parts are one part.
Parts = tuple[int | str, ...]


@dataclass(frozen=True, kw_only=True)
class TensorFacts:
    """How the weights of a denoiser's blocks are split over ranks, by regular expressions of names in a block.

    `columns` are linears that are split by their outputs, `rows` those that are split by their inputs, whose results are
    added up over the ranks. `norms` are RMS norms over the features of all heads. `tables` are arguments of attention
    modules whose last dim holds the features of all heads. `counts` are numbers of attention modules, of which each rank
    has its share.
    """

    columns: Mapping[str, Parts]
    rows: Mapping[str, Parts]
    norms: tuple[str, ...] = ()
    tables: tuple[str, ...] = ()
    counts: tuple[str, ...] = ("heads", "inner_dim")


@dataclass(frozen=True, kw_only=True)
class Family:
    """A denoiser's classes and its repeated blocks.

    `blocks` are the classes of its repeated blocks: equal blocks share one compilation. A family without blocks is
    compiled as a whole. `left` are children that are not compiled, each with the reason. `precise` are patterns of the names
    of linears in blocks for which float8 is too coarse: quantization computes them in int8, rotated.
    """

    name: str
    denoisers: tuple[str, ...]
    blocks: tuple[str, ...]
    left: Mapping[str, str] = field(default_factory=dict)
    precise: tuple[str, ...] = ()
    parallel: ParallelFacts = ParallelFacts()
    tensor: TensorFacts | None = None


@dataclass(frozen=True, kw_only=True)
class Codec:
    """A VAE's classes. Its decoder and encoder are compiled.

    `decoder` and `encoder` name the dims of their arguments that change between images, in the form of `dynamic_dims`.
    `cache` are the arguments that a call changes in place for the next call.
    """

    name: str
    classes: tuple[str, ...]
    decoder: Mapping[str, tuple[int, ...]]
    encoder: Mapping[str, tuple[int, ...]]
    cache: tuple[str, ...] = ()
