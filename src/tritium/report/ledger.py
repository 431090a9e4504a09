"""The records of this process, and who is told when a graph is compiled."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tritium import compat
from tritium.report.records import GraphRecord

# Told the function of a graph when its compilation begins (None) and when it ends (the seconds it took).
CompilationObserver = Callable[[str, float | None], None]

# Graphs of this process that keep a drawing, at most about 200 KB each; later ones are counted, not drawn.
MOST_DRAWINGS = 16


class Ledger:
    """The records of this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._records: list[GraphRecord] = []
        self._limits: list[compat.LimitReached] = []
        self._observers: list[CompilationObserver] = []
        # By the graph that was traced: who computes which attention.
        self._attention: dict[str, dict[tuple[str, str], None]] = {}
        self._sparse: weakref.WeakSet[Any] = weakref.WeakSet()

    @contextlib.contextmanager
    def observed(self, observer: CompilationObserver) -> Iterator[None]:
        """Tell an observer what is compiled inside."""
        self._observers.append(observer)
        try:
            yield
        finally:
            self._observers.remove(observer)

    def begin(self, record: GraphRecord) -> None:
        """A graph is about to be compiled."""
        for observer in self._observers:
            observer(record.function, None)

    def add(self, record: GraphRecord) -> None:
        """A graph was compiled."""
        with self._lock:
            # A restarted analysis compiles the same graph again: the later record is the true one.
            self._records = [
                kept for kept in self._records if not (kept.graph == record.graph and kept.code == record.code)
            ]
            if sum(kept.drawing is not None for kept in self._records) >= MOST_DRAWINGS:
                record.drawing = None
            self._records.append(record)
        for observer in list(self._observers):
            observer(record.function, record.seconds)

    def limit_reached(self, limit: compat.LimitReached) -> None:
        with self._lock:
            self._limits.append(limit)

    def attention_chosen(self, graph: str, by: str, what: str) -> None:
        """While a graph was traced, this was chosen to compute an attention; a graph is traced several times."""
        with self._lock:
            self._attention.setdefault(graph, {})[by, what] = None

    def watch_sparse(self, attention: Any) -> None:
        """Show a sparse attention's `summary()` in reports, for as long as it lives."""
        self._sparse.add(attention)

    def attention_of(self, records: Sequence[GraphRecord]) -> list[dict[str, Any]]:
        """Who computes the attentions of some graphs, and how sparse those are that this process computes sparsely."""
        with self._lock:
            chosen = [(record.graph, *pair) for record in records for pair in self._attention.get(record.graph, ())]
        found: list[dict[str, Any]] = [{"graph": graph, "by": by, "what": what} for graph, by, what in chosen]
        sparse = [attention.summary() for attention in list(self._sparse)]
        return found + [summary for summary in sparse if summary is not None]

    def records(self) -> list[GraphRecord]:
        """Records whose code is still alive, oldest first."""
        with self._lock:
            self._records = [kept for kept in self._records if kept.code is None or kept.code() is not None]
            return list(self._records)

    def limits(self) -> list[compat.LimitReached]:
        """Every recompile limit that was reached, oldest first."""
        with self._lock:
            return list(self._limits)

    def limits_of(self, records: Sequence[GraphRecord]) -> list[compat.LimitReached]:
        places = set()
        for record in records:
            code = record.code() if record.code is not None else None
            if code is not None:
                places.add((code.co_name, code.co_filename, code.co_firstlineno))
        with self._lock:
            return [limit for limit in self._limits if (limit.function, limit.file, limit.line) in places]

    def clear(self) -> None:
        with self._lock:
            self._records.clear()
            self._limits.clear()
            self._attention.clear()


LEDGER = Ledger()
