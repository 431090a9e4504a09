"""What is known of a piece when it is compiled."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Spec:
    """What is known of a piece when it is compiled: the names of its inputs, which are weights, and which it writes to."""

    names: tuple[str, ...]
    weights: tuple[int, ...] = ()
    written: frozenset[int] = frozenset()
    # Which piece of its graph; None for all of it.
    piece: int | None = None

    def first(self, count: int) -> Spec:
        """Without the last inputs: folded values, where lowering them failed and the graph was lowered as it came."""
        kept = tuple(index for index in self.weights if index < count)
        return Spec(self.names[:count], kept, frozenset(index for index in self.written if index < count), self.piece)

    @property
    def inputs(self) -> tuple[int, ...]:
        weights = set(self.weights)
        return tuple(index for index in range(len(self.names)) if index not in weights)
