"""Measure both sides of a workload in two processes: compile in parallel, then time in turn.

    python benchmarks/processes.py wan-decode --regime dynamic --json results/h200-wan-decode-dynamic.json

`tritium bench` runs both sides in one process and compiles one after the other, which takes ten minutes for a video
decoder with dynamic sizes. Here timing starts when both are ready, and then one process at a time uses the device.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from tritium import device, envs, measure
from tritium.bench import run, workloads
from tritium.bench.results import OURS, YARDSTICK, Results, Row
from tritium.bench.workload import label

SIDES = (YARDSTICK, OURS)
ROUNDS = 8
# Consecutive calls of a side, after one uncounted call.
BURST = 3
# The second call compiles again if the first could not detect which sizes vary.
FIRST_CALLS = 3


def child(name: str, regime: str, side: str, folder: Path) -> None:
    """Compile one side, signal that it is ready, and measure whenever it has the turn."""
    (workload,) = workloads.find(name)
    settings = run.Settings(device_type=device.default(), cold=False, regime=regime)
    built = run.build(workload, settings)
    with torch.inference_mode():
        reference = run.tensor_of(run.compiled(built, run.EAGER, settings).call(**built.inputs), name)
        made = run.compiled(built, side, settings, regime)  # type: ignore[arg-type]
        call = run.call_of(made.call, built.marked() if regime == "dynamic" else built.inputs)
        first = [measure.first_call(call, settings.device_type) for _ in range(FIRST_CALLS)]
        l2 = measure.relative_l2(run.tensor_of(call(), name), reference)
        peak = measure.peak_memory(call, settings.device_type)
        (folder / side).touch()
        other = SIDES[1 - SIDES.index(side)]
        taken: list[float] = []
        for _ in range(ROUNDS):
            _wait_for(lambda: _turn(folder) == side)
            measure.first_call(call, settings.device_type)
            taken += [1e3 * measure.first_call(call, settings.device_type) for _ in range(BURST)]
            _give_turn(folder, other)
    found = measure.Timing.of(taken)
    row = Row(
        workload=label(workload, regime),  # type: ignore[arg-type]
        variant=side,
        mode="default",
        dtype=str(settings.dtype).removeprefix("torch."),
        shrunk=built.shrunk,
        note=f"{built.note}; each side in a process of its own, in turns; calls that compile: "
        + ", ".join(f"{seconds:.1f} s" for seconds in first[:-1]),
        shapes=built.shapes,
        **asdict(found),
        ratio=None,
        first_call_s=sum(first[:-1]),
        first_call_cold=True,
        peak_memory_bytes=peak,
        relative_l2=l2,
        disturbed=None,
    )
    (folder / f"{side}.json").write_text(json.dumps(asdict(row)), encoding="utf-8")


def _turn(folder: Path) -> str | None:
    try:
        return (folder / "turn").read_text(encoding="utf-8")
    except FileNotFoundError:
        return None


def _give_turn(folder: Path, side: str) -> None:
    written = folder / f"turn-{side}"
    written.write_text(side, encoding="utf-8")
    written.replace(folder / "turn")


def _wait_for(condition: Callable[[], bool], alive: Callable[[], bool] = lambda: True) -> None:
    while not condition():
        if not alive():
            raise SystemExit("one of the sides failed")
        time.sleep(0.005)


def compare(name: str, regime: str) -> Results:
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)
        children = [_start(name, regime, side, folder) for side in SIDES]

        def alive() -> bool:
            return all(process.poll() in (None, 0) for process in children)

        try:
            _wait_for(lambda: all((folder / side).exists() for side in SIDES), alive)
            _give_turn(folder, SIDES[0])
            _wait_for(lambda: all(process.poll() is not None for process in children), alive)
        finally:
            for process in children:
                process.kill()
        if any(process.returncode for process in children):
            raise SystemExit("one of the sides failed")
        rows: list[Row] = [Row(**json.loads((folder / f"{side}.json").read_text(encoding="utf-8"))) for side in SIDES]
    yardstick = rows[0].median_ms
    return Results.now([replace(row, ratio=yardstick / row.median_ms) for row in rows], device.default())


def _start(name: str, regime: str, side: str, folder: Path) -> subprocess.Popen[Any]:
    # Use a separate, empty cache.
    environment = envs.child_environment({"TORCHINDUCTOR_CACHE_DIR": str(folder / f"cache-{side}")})
    command = [sys.executable, __file__, name, "--regime", regime, "--side", side, "--folder", str(folder)]
    return subprocess.Popen(command, env=environment)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("workload")
    parser.add_argument("--regime", choices=("static", "dynamic"), default="dynamic")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was found there")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.side:
        child(given.workload, given.regime, given.side, given.folder)
        return
    results = compare(given.workload, given.regime)
    for row in results.rows:
        print(
            f"{row.workload} {row.variant}: {row.median_ms:.1f} ms, {row.ratio:.2f}; compiling took {row.first_call_s:.1f} s"
        )
    if given.json:
        results.save(given.json)


if __name__ == "__main__":
    main()
