"""Show the progress of a first call or a warm-up: a bar on a terminal, log lines otherwise."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from tritium import envs
from tritium.report.ledger import LEDGER


class Progress:
    """Report which graphs of which part are compiled, and how long that takes; silent otherwise."""

    def __init__(self, expected: int, *, shown: bool = True) -> None:
        self.shown = shown
        # Expected graphs of first calls: one for each compiled class.
        self._expected = expected
        self._graphs = 0
        self._on_terminal = shown and _on_terminal()
        # The bar over several calls, in which compilation is shown.
        self._outer: _LiveLine | None = None

    @contextlib.contextmanager
    def during(self, part: str) -> Iterator[None]:
        if not self.shown:
            yield
            return
        live = _LiveLine() if self._on_terminal and self._outer is None else None

        thread = threading.get_ident()

        def observe(function: str, seconds: float | None) -> None:
            if threading.get_ident() != thread:
                # Another thread is compiling another part.
                return
            if seconds is None:
                self._graphs += 1
                if live is not None:
                    live.show(f"{part}: compiling {function}", self._graphs - 1, max(self._expected, self._graphs))
                elif self._outer is not None:
                    self._outer.detail(f"{part}: compiling {function}")
                return
            if live is not None:
                live.hide()
            elif self._outer is not None:
                self._outer.detail("")
            newest = next((record for record in reversed(LEDGER.records()) if record.function == function), None)
            failed = newest is not None and newest.lowering_failed
            say(f"{part}: {'could not compile' if failed else 'compiled'} {function} in {seconds:.1f} s")

        with LEDGER.observed(observe):
            try:
                yield
            finally:
                if live is not None:
                    live.hide()

    @contextlib.contextmanager
    def over(self, what: str, total: int) -> Iterator[Callable[[str], None]]:
        """Show a bar over several calls; yield a function to call with the name of each one before it starts."""
        start, begun = time.perf_counter(), 0
        self._outer = _LiveLine() if self._on_terminal else None

        def next_one(name: str) -> None:
            nonlocal begun
            text = f"{what} {name}{estimate(time.perf_counter() - start, begun, total)}"
            if self._outer is not None:
                self._outer.show(text, begun, total)
            else:
                self.tell(f"{text} ({begun + 1} of {total})")
            begun += 1

        try:
            yield next_one
        finally:
            if self._outer is not None:
                self._outer.hide()
            self._outer = None

    def tell(self, text: str) -> None:
        if self.shown:
            say(text)


def estimate(seconds: float, done: int, total: int) -> str:
    """Return the estimated remaining time, or an empty string before the first call is done.

    >>> estimate(30.0, 2, 12)
    ', about 150 s left'
    >>> estimate(0.0, 0, 12)
    ''
    """
    return f", about {seconds / done * (total - done):.0f} s left" if done else ""


def say(text: str) -> None:
    sys.stderr.write(f"tritium: {text}\n")
    sys.stderr.flush()


def _on_terminal() -> bool:
    return sys.stderr.isatty() and not envs.in_terminal_free_ci() and importlib.util.find_spec("rich") is not None


class _LiveLine:
    """A bar with the elapsed seconds; hiding removes it, as the denoising loop shows a bar there."""

    def __init__(self) -> None:
        self._bar: Any = None
        self._text = ""

    def show(self, text: str, done: int, expected: int) -> None:
        if self._bar is None:
            self._start()
        self._text = text
        self._bar.update(self._bar.task_ids[0], description=text, completed=done, total=expected)

    def detail(self, text: str) -> None:
        """Add a detail to the bar's text; an empty one removes it."""
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], description=f"{self._text}; {text}" if text else self._text)

    def hide(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _start(self) -> None:
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
        self._bar.add_task("")
        self._bar.start()
