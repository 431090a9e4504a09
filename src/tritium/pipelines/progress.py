"""What a first call is doing: a bar on a terminal, log lines everywhere else."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Iterator
from typing import Any

from tritium import envs
from tritium.report import LEDGER


class Progress:
    """Says which graphs of which part are compiled, and for how long. Silent unless something is."""

    def __init__(self, expected: int, *, shown: bool = True) -> None:
        self.shown = shown
        # Graphs that first calls should need: one for each class that is compiled.
        self._expected = expected
        self._graphs = 0
        self._on_terminal = shown and _on_terminal()

    @contextlib.contextmanager
    def during(self, part: str) -> Iterator[None]:
        """Watch a call of a part."""
        if not self.shown:
            yield
            return
        live = _LiveLine() if self._on_terminal else None

        def observe(function: str, seconds: float | None) -> None:
            if seconds is None:
                self._graphs += 1
                if live is not None:
                    live.show(f"{part}: compiling {function}", self._graphs - 1, max(self._expected, self._graphs))
                return
            if live is not None:
                live.hide()
            say(f"{part}: compiled {function} in {seconds:.1f} s")

        with LEDGER.observed(observe):
            try:
                yield
            finally:
                if live is not None:
                    live.hide()

    def tell(self, text: str) -> None:
        if self.shown:
            say(text)


def say(text: str) -> None:
    sys.stderr.write(f"tritium: {text}\n")
    sys.stderr.flush()


def _on_terminal() -> bool:
    return sys.stderr.isatty() and not envs.in_terminal_free_ci() and importlib.util.find_spec("rich") is not None


class _LiveLine:
    """A bar over the graphs, with the seconds so far; gone when hidden, because a denoising loop draws its own there."""

    def __init__(self) -> None:
        self._bar: Any = None

    def show(self, text: str, done: int, expected: int) -> None:
        self.hide()
        console: Any = importlib.import_module("rich.console")
        bars: Any = importlib.import_module("rich.progress")
        columns = (
            bars.SpinnerColumn(),
            bars.BarColumn(),
            bars.MofNCompleteColumn(),
            bars.TextColumn("{task.description}"),
            bars.TimeElapsedColumn(),
        )
        self._bar = bars.Progress(*columns, console=console.Console(stderr=True), transient=True)
        self._bar.add_task(text, total=expected, completed=done)
        self._bar.start()

    def hide(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
