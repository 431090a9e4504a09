"""Marks in a graph: where streams of tokens are split, and where they are joined.

Forwards of blocks put them there while Dynamo traces; `sequence_graph` replaces them. A graph that still has one raises when
it runs: its attention would see the tokens of one rank alone.
"""

from __future__ import annotations

from typing import Any

import torch

from tritium.errors import PipelineError
from tritium.techniques.parallel.exchange import Segment, Segments

# A whole tensor that is split; one that has local tokens already; local tokens that are joined; a tensor that goes into
# a module without rules for its operators, and one that comes out;
# a mask over the tokens of all ranks, which is traced with the size of a rank's, as attention checks sizes.
SPLIT, LOCAL, JOIN, OPEN, CLOSE, WHOLE = KINDS = ("split", "local", "join", "open", "close", "whole")

_LIBRARY = torch.library.Library("tritium", "FRAGMENT")
_LIBRARY.define("stream_mark(Tensor x, str kind, int dim, int[] lengths, bool[] is_split, int ranks) -> Tensor")


@torch.library.register_fake("tritium::stream_mark", lib=_LIBRARY)  # type: ignore[untyped-decorator]
def _fake(x: torch.Tensor, kind: str, dim: int, lengths: list[int], is_split: list[bool], ranks: int) -> torch.Tensor:
    if kind not in (SPLIT, JOIN, WHOLE):
        return torch.empty_like(x)
    segments = segments_of(lengths, is_split)
    sizes: list[Any] = list(x.shape)
    if kind == WHOLE:
        whole, local = (sum(each) for each in ((s.length for s in segments), (s.share(ranks) for s in segments)))
        return x.new_empty([sizes[0], *(local if size == whole else size for size in sizes[1:])])
    sizes[dim] = sum(segment.share(ranks) if kind == SPLIT else segment.length for segment in segments)
    return x.new_empty(sizes)


def _raised(x: torch.Tensor, kind: str, *_: Any) -> torch.Tensor:
    raise PipelineError(
        f"a graph with split tokens was not rewritten (mark {kind!r} of {tuple(x.shape)}): compile the part by Tritium "
        "without gradients and not with graphs='only', or run it eagerly"
    )


_LIBRARY.impl("stream_mark", _raised, "CompositeExplicitAutograd")

OPERATOR = torch.ops.tritium.stream_mark.default


def mark(x: torch.Tensor, kind: str, dim: int, segments: Segments, ranks: int) -> torch.Tensor:
    """Mark a tensor in the graph that is traced."""
    lengths, is_split = [segment.length for segment in segments], [segment.is_split for segment in segments]
    marked: torch.Tensor = OPERATOR(x, kind, dim, lengths, is_split, ranks)
    return marked


def segments_of(lengths: list[int], is_split: list[bool]) -> Segments:
    return tuple(Segment(length, split) for length, split in zip(lengths, is_split, strict=True))
