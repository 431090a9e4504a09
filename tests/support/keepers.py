"""Keepers in processes of their own, that start in a fraction of a second."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from support.ranks import PRELOADED


@contextlib.contextmanager
def runtime_folder() -> Iterator[Path]:
    """Give this process another folder for sockets; its path is short, as those of sockets must be."""
    before = os.environ.get("XDG_RUNTIME_DIR")
    folder = tempfile.mkdtemp(prefix="tritium-test-", dir="/tmp")
    os.environ["XDG_RUNTIME_DIR"] = folder
    try:
        yield Path(folder)
    finally:
        os.environ.pop("XDG_RUNTIME_DIR")
        os.environ.update({} if before is None else {"XDG_RUNTIME_DIR": before})
        shutil.rmtree(folder)


class KeeperProcess:
    """A process that keeps the pipeline that a function at the top level of `support` makes."""

    def __init__(self, name: str, make: Callable[..., Any], *arguments: Any) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(
            target=_keep, args=(theirs, os.environ["XDG_RUNTIME_DIR"], name, make, arguments), daemon=True
        )
        self.process.start()
        theirs.close()
        assert self.pipe.recv() == 1

    def ask(self, question: str) -> Any:
        self.pipe.send(question)
        return self.pipe.recv()

    def kill(self) -> None:
        self.process.kill()
        self.process.join()


def _keep(pipe: Any, runtime: str, name: str, make: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    import torch

    from tritium.pipelines import sharing

    os.environ["XDG_RUNTIME_DIR"] = runtime
    torch.set_num_threads(1)
    with sharing.keeper(name) as keeper:
        pipe.send(keeper.publish(make(*arguments)))
        with contextlib.suppress(EOFError):
            while True:
                pipe.send(getattr(keeper, pipe.recv()))


def until(condition: Callable[[], bool], seconds: float = 5.0) -> bool:
    """Wait for a condition; return whether it became true in time."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True
