"""What the ranks of a process group do together while they compile and capture. One rank alone decides by itself."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import Protocol


class Ranks(Protocol):
    """The other ranks, as `tritium.techniques.parallel` reaches them."""

    def all(self, own: bool) -> bool:
        """Return True if the argument is true on all ranks, which call it alike."""

    def turn(self, key: str) -> AbstractContextManager[None]:
        """Let one rank of a machine run the context first; the others wait, and find what it stored."""


# Set while this process is a rank.
RANKS: list[Ranks] = []

OTHER_RANK = "another rank cannot capture it, and captures contain collectives"


def all_ranks(own: bool) -> bool:
    return all(ranks.all(own) for ranks in RANKS)


def turn(key: str) -> AbstractContextManager[None]:
    return RANKS[0].turn(key) if RANKS else contextlib.nullcontext()
