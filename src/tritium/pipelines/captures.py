"""The captures of a pipeline's parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from tritium.report.records import Capture, GraphRecord


class Captures:
    """`handle.captures`: iterate over the buckets, or `clear()` them to free their memory."""

    def __init__(self, records: Callable[[], Sequence[GraphRecord]]) -> None:
        self._records = records

    def __iter__(self) -> Iterator[Capture]:
        return iter([entry for record in self._records() for entry in record.captures])

    def __len__(self) -> int:
        """Return the number of captures; buckets that were declined are not counted."""
        return sum(entry.declined is None for entry in self)

    @property
    def bytes(self) -> int:
        return sum(entry.bytes for entry in self)

    def clear(self) -> None:
        """Free the memory of every capture; the next call of a bucket captures it again."""
        for record in self._records():
            for reference in record.regions:
                region = reference()
                if region is not None:
                    region.clear()
