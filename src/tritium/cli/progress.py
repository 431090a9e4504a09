"""Show progress: a bar on a terminal, log lines otherwise."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from tritium import envs
from tritium.bench.settings import Notify, silent


@contextlib.contextmanager
def shown(console: Console | None = None, *, is_first: bool = True) -> Iterator[Notify]:
    """Yield a function that shows the current step on stderr; stdout is reserved for results.

    Of several ranks only the first one shows it.
    """
    if not is_first:
        yield silent
        return
    console = console or Console(stderr=True)
    if console.is_terminal and not envs.in_terminal_free_ci():
        yield from _bar(console)
    else:
        yield _log(console)


def _bar(console: Console) -> Iterator[Notify]:
    columns = (SpinnerColumn(), BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=1.0)

        def notify(what: str, share: float) -> None:
            progress.update(task, description=what, completed=share)

        yield notify


def _log(console: Console) -> Notify:
    said: list[str] = []

    def notify(what: str, share: float) -> None:
        # Timing reports after each round; log each step once.
        if not said or said[-1] != what:
            said.append(what)
            console.print(f"[{share:4.0%}] {what}", markup=False, highlight=False, soft_wrap=True)

    return notify
