"""Processes that begin with torch and its compiler loaded, which takes longer than most programs do that compile something.

Each is forked from one that has loaded them and has done nothing else: it has memory, counters and caches of its own.
Two of these take turns, with different seeds of Python's hashes, so that no key which depends on the order of a set goes
unnoticed from one process to the next.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

_MOTHER = """
import json, os, sys, traceback
import torch, torch._dynamo, torch._inductor.compile_fx, torch._inductor.lowering

def live(job):
    os.environ.clear()
    os.environ.update(job["environment"])
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(job[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    code = 1
    try:
        exec(compile(job["program"], "<string>", "exec"), {"__name__": "__main__"})
        code = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)

for line in sys.stdin:
    child = os.fork()
    if child == 0:
        live(json.loads(line))
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


class Nursery:
    """Where processes come from; made when the first is asked for."""

    def __init__(self) -> None:
        self._mothers: list[subprocess.Popen[str]] = []
        self._born = 0

    def run(self, program: str, environment: dict[str, str], folder: Path) -> str:
        """What a program prints; its error if it fails."""
        if not self._mothers:
            self._mothers = [self._mother(seed) for seed in (1, 2)]
        mother = self._mothers[self._born % 2]
        self._born += 1
        out, err = (folder / f"{name}-{self._born}.txt" for name in ("out", "err"))
        job = {"program": program, "environment": environment, "out": str(out), "err": str(err)}
        assert mother.stdin is not None
        assert mother.stdout is not None
        mother.stdin.write(json.dumps(job) + "\n")
        mother.stdin.flush()
        answer = mother.stdout.readline()
        assert answer == "0\n", f"exit code {answer.strip() or 'unknown'}: {err.read_text()}"
        return out.read_text()

    def close(self) -> None:
        for mother in self._mothers:
            mother.communicate()
        self._mothers = []

    @staticmethod
    def _mother(seed: int) -> subprocess.Popen[str]:
        # A pool of processes that compile would be shared by all that are forked.
        environment = {**os.environ, "PYTHONHASHSEED": str(seed), "TORCH_WARM_POOL": "0"}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        return subprocess.Popen([sys.executable, "-c", _MOTHER], text=True, env=environment, **pipes)  # type: ignore[call-overload]
