"""Processes that start with torch and its compiler imported, which takes longer than most programs that compile something.

Each is forked from a server that has imported them and done what `prepared` does, so it has separate memory, counters and caches.
Two servers take turns, with different seeds of Python's hashes: a cache key that depends on the order of a set then
differs between processes.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

_SERVER = """
import json, os, sys, traceback
import torch, torch._dynamo, support.prepared

def run(job):
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
        run(json.loads(line))
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


class Forks:
    """Runs programs in forked processes; the servers, one for each seed, start with the first program."""

    def __init__(self, seeds: Sequence[int] = (1, 2), **environment: str) -> None:
        self._seeds, self._environment = seeds, environment
        self._servers: list[subprocess.Popen[str]] = []
        self._number = itertools.count()

    def run(self, program: str, environment: dict[str, str], folder: Path) -> str:
        """Return what a program prints; raise an `AssertionError` with its stderr if it fails."""
        if not self._servers:
            self._servers = [_start_server(seed, self._environment) for seed in self._seeds]
        number = next(self._number)
        server = self._servers[number % len(self._servers)]
        out, err = (folder / f"{name}-{number}.txt" for name in ("out", "err"))
        job = {"program": program, "environment": environment, "out": str(out), "err": str(err)}
        server.stdin.write(json.dumps(job) + "\n")
        server.stdin.flush()
        code = server.stdout.readline()
        assert code == "0\n", f"exit code {code.strip() or 'unknown'}: {err.read_text()}"
        return out.read_text()

    def close(self) -> None:
        for server in self._servers:
            server.communicate()


def _start_server(seed: int, environment: dict[str, str]) -> subprocess.Popen[str]:
    # Without Inductor's pool of compile processes, which all forks would share.
    environment = {**os.environ, "PYTHONHASHSEED": str(seed), "TORCH_WARM_POOL": "0", **environment}
    command = [sys.executable, "-c", _SERVER]
    return subprocess.Popen(command, text=True, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def copy_tests_of_instructions(cache: Path) -> None:
    """Copy what Inductor has compiled here to test the instructions of this machine into another cache folder."""
    for file in _tests_of_instructions():
        target = cache / file.parent.name / file.name
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.exists():
            shutil.copy2(file, target)


@functools.cache
def _tests_of_instructions() -> list[Path]:
    from torch._inductor import cpu_vec_isa
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    # Compiles them unless this cache has them.
    cpu_vec_isa.valid_vec_isa_list()
    sources = [path for path in Path(cache_dir()).glob("*/*.cpp") if "_chk_kernel" in path.read_text()]
    return [file for source in sources for file in (source, source.with_suffix(".so")) if file.exists()]
