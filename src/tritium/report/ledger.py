"""The compilation records of this process, and observers of compilations."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import CodeType
from typing import Any

from tritium import compat
from tritium.report.records import GraphRecord

# Called with a graph's function and None when its compilation begins, and with the seconds it took when it ends.
CompilationObserver = Callable[[str, float | None], None]

# Graphs with a stored diagram, at most about 200 KB each; later graphs are only counted.
MOST_DIAGRAMS = 16


# Providers of ops that failed while running, by op and provider, with the reason. Their references replace them.
FAILED_PROVIDERS: dict[tuple[str, str], str] = {}


class Ledger:
    """The records of this process, with a lock."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._records: list[GraphRecord] = []
        self._limits: list[compat.dynamo.LimitReached] = []
        self._observers: list[CompilationObserver] = []
        # Attention choices by traced graph.
        self._attention: dict[str, dict[tuple[str, str], None]] = {}
        self._sparse: weakref.WeakSet[Any] = weakref.WeakSet()

    @contextlib.contextmanager
    def observed(self, observer: CompilationObserver) -> Iterator[None]:
        """Call an observer for every compilation inside."""
        self._observers.append(observer)
        try:
            yield
        finally:
            self._observers.remove(observer)

    def begin(self, record: GraphRecord) -> None:
        """Notify observers that a graph is about to be compiled."""
        for observer in self._observers:
            observer(record.function, None)

    def add(self, record: GraphRecord) -> None:
        """Store the record of a compiled graph and notify observers."""
        with self._lock:
            # Dynamo may restart its analysis and compile the same graph again: keep only the latest record.
            self._records = [
                kept for kept in self._records if not (kept.graph == record.graph and kept.code == record.code)
            ]
            if sum(kept.diagram is not None for kept in self._records) >= MOST_DIAGRAMS:
                record.diagram = None
            self._records.append(record)
        for observer in list(self._observers):
            observer(record.function, record.seconds)

    def limit_reached(self, limit: compat.dynamo.LimitReached) -> None:
        with self._lock:
            self._limits.append(limit)

    def attention_chosen(self, graph: str, by: str, what: str) -> None:
        """Record an attention choice during tracing; a graph may be traced several times."""
        with self._lock:
            self._attention.setdefault(graph, {})[by, what] = None

    def watch_sparse(self, attention: Any) -> None:
        """Include a sparse attention's `summary()` in reports while the object is alive."""
        self._sparse.add(attention)

    def attention_of(self, records: Sequence[GraphRecord]) -> list[dict[str, Any]]:
        """Return the attention choices of some graphs, and summaries of all sparse attentions of this process."""
        with self._lock:
            chosen = [(record.graph, *pair) for record in records for pair in self._attention.get(record.graph, ())]
        found: list[dict[str, Any]] = [{"graph": graph, "by": by, "what": what} for graph, by, what in chosen]
        sparse = [attention.summary() for attention in list(self._sparse)]
        return found + [summary for summary in sparse if summary is not None]

    def records(self) -> list[GraphRecord]:
        """Return the records whose code is still alive, oldest first."""
        with self._lock:
            self._records = [kept for kept in self._records if kept.code is None or kept.code() is not None]
            return list(self._records)

    def limits(self) -> list[compat.dynamo.LimitReached]:
        """Return every recompile limit that was reached, oldest first."""
        with self._lock:
            return list(self._limits)

    def limits_of(
        self, records: Iterable[GraphRecord], codes: Iterable[CodeType] = ()
    ) -> list[compat.dynamo.LimitReached]:
        """Return the recompile limits reached by the code of some graphs, and by other code."""
        known = [*codes, *(record.code() for record in records if record.code is not None)]
        places = {(code.co_name, code.co_filename, code.co_firstlineno) for code in known if code is not None}
        return [limit for limit in self.limits() if (limit.function, limit.file, limit.line) in places]

    def clear(self) -> None:
        with self._lock:
            self._records.clear()
            self._limits.clear()
            self._attention.clear()


LEDGER = Ledger()
