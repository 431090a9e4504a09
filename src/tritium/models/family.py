"""The types of this folder's declarations: facts about denoisers and VAEs, without logic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

# In a `Cut`: tokens that are on every rank.
REST = ""


@dataclass(frozen=True)
class Cut:
    """How a tensor is split between ranks: the streams along one of its dims, in order; `REST` is on every rank.

    With `rank`, a tensor of another rank stays whole, such as a timestep for all tokens; so does a dim of size 1.
    """

    streams: tuple[str, ...] = ("hidden_states",)
    dim: int = 1
    rank: int | None = None


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """A list of blocks over streams of tokens, by the names of the arguments of a block.

    `streams` are arguments that a block returns for the next one: they are split before the first block and joined after
    the last. `tables` are arguments that are whole for every block, such as RoPE tables; a tuple has the cut of each item.
    `masks` are arguments that attention alone reads, over the tokens of all ranks.
    `outputs` are the streams that a block returns, by position. `opaque` are modules in a block that compute each token
    alone, in ways that cannot be seen in their operators. `eager` is the reason why the blocks cannot be compiled.
    """

    path: str
    streams: Mapping[str, Cut]
    tables: Mapping[str, Cut | tuple[Cut | None, ...]] = field(default_factory=dict)
    masks: Mapping[str, Cut] = field(default_factory=dict)
    outputs: tuple[str | None, ...] = ("hidden_states",)
    opaque: tuple[str, ...] = ()
    eager: str = ""


@dataclass(frozen=True, kw_only=True)
class ParallelFacts:
    """How the tokens of a denoiser are split over ranks.

    `sections` are lists of blocks: within a section, streams pass from list to list, and are whole before and behind it.
    `arguments` of the denoiser are split when it is called: values that are added between blocks. `unsplit` is the reason
    why tokens cannot be split, or empty; without sections they are not. `whole` are classes of blocks in some models of
    the family that cannot be split, with the reasons.
    """

    sections: tuple[tuple[Blocks, ...], ...] = ()
    arguments: Mapping[str, Cut] = field(default_factory=dict)
    unsplit: str = ""
    whole: Mapping[str, str] = field(default_factory=dict)


# The parts of a linear's features that are split one by one: numbers in proportion, or attributes of the module around
# the linear. No parts are one part.
Parts = tuple[int | str, ...]


@dataclass(frozen=True, kw_only=True)
class TensorFacts:
    """How the weights of a denoiser's blocks are split over ranks, by regular expressions of names in a block.

    `columns` are linears that are split by their outputs, `rows` those that are split by their inputs, whose results are
    added up over the ranks. `norms` are RMS norms over the features of all heads. `tables` are arguments of attention
    modules with a dim of all heads, or of the features of all heads. `counts` are numbers of attention modules, of which each rank
    has its share.
    """

    columns: Mapping[str, Parts]
    rows: Mapping[str, Parts]
    norms: tuple[str, ...] = ()
    tables: Mapping[str, int] = field(default_factory=dict)
    counts: tuple[str, ...] = ("heads", "inner_dim")


@dataclass(frozen=True, kw_only=True)
class Family:
    """A denoiser's classes and its repeated blocks.

    `blocks` are the classes of its repeated blocks: equal blocks share one compilation. A family without blocks is
    compiled as a whole. `left` are children that are not compiled, each with the reason. `precise` are patterns of the names
    of linears in blocks for which float8 is too coarse: quantization computes them in int8, rotated. `branches` are the
    branches of guidance in a step, as its pipelines run by default.
    """

    name: str
    denoisers: tuple[str, ...]
    blocks: tuple[str, ...]
    left: Mapping[str, str] = field(default_factory=dict)
    precise: tuple[str, ...] = ()
    branches: int = 2
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
