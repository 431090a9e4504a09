"""The recordings of a pipeline's parts, to look at and to let go."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from tritium.report import Capture, GraphRecord


class Captures:
    """`handle.captures`: iterate over the buckets, or `clear()` them to give their memory back."""

    def __init__(self, records: Callable[[], Sequence[GraphRecord]]) -> None:
        self._records = records

    def __iter__(self) -> Iterator[Capture]:
        return iter([entry for record in self._records() for entry in record.captures])

    def __len__(self) -> int:
        """Recordings, without the buckets that are not captured."""
        return sum(entry.declined is None for entry in self)

    @property
    def bytes(self) -> int:
        return sum(entry.bytes for entry in self)

    def clear(self) -> None:
        """Give the memory of every recording back; a bucket is recorded again when it is called again."""
        for record in self._records():
            for reference in record.regions:
                region = reference()
                if region is not None:
                    region.clear()
