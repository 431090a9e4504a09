"""Static facts about a piece."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Spec:
    """Static facts about a piece: the names of its inputs, which are weights, and which ones it writes to."""

    names: tuple[str, ...]
    weights: tuple[int, ...] = ()
    written: frozenset[int] = frozenset()
    # The number of the piece in its graph; None for the whole graph.
    piece: int | None = None

    def first(self, count: int) -> Spec:
        """Drop the last inputs: frozen values, if lowering failed and the original graph was lowered."""
        kept = tuple(index for index in self.weights if index < count)
        return Spec(self.names[:count], kept, frozenset(index for index in self.written if index < count), self.piece)

    @property
    def inputs(self) -> tuple[int, ...]:
        weights = set(self.weights)
        return tuple(index for index in range(len(self.names)) if index not in weights)
