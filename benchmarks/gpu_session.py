"""Run all measurements that need a GPU, in resumable calls of at most ten minutes.

    python benchmarks/gpu_session.py --out results --diffusers /path/with/diffusers

Each step runs in a separate process; a family that crashes it is skipped in later calls. The steps: exactness of the
families whose full size has no float64 run, all families with their errors against float64, host times, the pipeline,
compile times. Exit code 0: everything is measured. 3: call again. 1: a variant failed or exceeds the fidelity "close".
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import shutil
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DONE, FAILED, LEFT_OVER, CRASHED = 0, 1, 3, 4

# The steps, and the least seconds that must be left to start each.
STEPS = {"exactness": 40, "families": 40, "host": 40, "pipeline": 130, "compile-time": 130}

# Seconds reserved at the end of a call for starting a process and writing files.
_MARGIN = 15.0


def settings(step: str) -> Any:
    """Return the settings of a step."""
    from tritium import device
    from tritium.bench.settings import Settings

    changes: dict[str, dict[str, Any]] = {
        "exactness": {"seconds": 0.0, "errors": True, "against": ("eager",)},
        "families": {"errors": True},
        "pipeline": {"seconds": 5.0},
    }
    return Settings(**{"seconds": 3.0, "device_type": device.default(), **changes.get(step, {})})


def measure(step: str, out: Path, seconds: float, only: Sequence[str]) -> int:
    """Measure what the file of a step lacks, in this process."""
    from tritium.bench import families
    from tritium.bench.denoisers import FAMILIES, with_few_tokens
    from tritium.bench.results import Store
    from tritium.bench.suite import Clock, Suite
    from tritium.bench.suites import SUITES

    chosen = settings(step)
    suite = SUITES.get(step)
    if step in ("exactness", "families"):
        some = [family for family in FAMILIES if not only or family.name in only]
        if step == "exactness":
            # Full width and few tokens, if the full size does not fit.
            some = [with_few_tokens(family) for family in some if not family.fits_float64]
        skipped = names_in(out / "crashed.json")
        tasks = [task for task in families.tasks(some, chosen) if task.name not in skipped]
        suite = Suite(lambda *_: tasks)
    assert suite is not None
    store = Store(out / f"{step}.json", chosen.device_type)
    outcome = suite.run(chosen, store, Clock(seconds), _notify(out))
    for reason in outcome.failed:
        print(f"FAILED {reason}", flush=True)
    if outcome.left_over:
        return LEFT_OVER
    return FAILED if outcome.failed else DONE


def _notify(out: Path) -> Callable[[str, float], None]:
    """Print the current step, and write the workload's name for the parent in case the process crashes."""
    printed: list[str] = []

    def notify(what: str, share: float) -> None:
        (out / "now.txt").write_text(what.partition(":")[0], encoding="utf-8")
        if printed[-1:] != [what]:
            printed.append(what)
            print(f"[{share:4.0%}] {what}", flush=True)

    return notify


def names_in(path: Path) -> list[str]:
    names: list[str] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    return names


def add_name(path: Path, name: str) -> None:
    path.write_text(json.dumps([*names_in(path), name]), encoding="utf-8")


def session(
    out: Path, limit: float, steps: Sequence[str], path: Sequence[str], only: Sequence[str], jobs: int = 1
) -> int:
    """Run each step in a process, or families in several; skip a family after it has crashed its process."""
    start, codes = time.monotonic(), {}
    for step in steps:
        codes[step] = LEFT_OVER
        if jobs > 1 and step in ("exactness", "families"):
            left = limit - (time.monotonic() - start) - _MARGIN
            print(f"== {step} in {jobs} processes, {left:.0f} s left", flush=True)
            codes[step] = in_parallel(step, out, left, path, only, jobs)
            continue
        while (left := limit - (time.monotonic() - start) - _MARGIN) >= STEPS[step]:
            print(f"== {step}, {left:.0f} s left", flush=True)
            codes[step] = _child(step, out, left, path, only)
            if codes[step] != CRASHED or step not in ("exactness", "families"):
                break
    failed = print_summary(out)
    words = {DONE: "done", LEFT_OVER: "call again"}
    print("; ".join(f"{step}: {words.get(code, 'failed')}" for step, code in codes.items()))
    if failed or {FAILED, CRASHED} & set(codes.values()) or names_in(out / "crashed.json"):
        return FAILED
    return LEFT_OVER if LEFT_OVER in codes.values() else DONE


def in_parallel(step: str, out: Path, seconds: float, path: Sequence[str], only: Sequence[str], jobs: int) -> int:
    """Measure each family in its own process: they compile side by side, and wait for one another to be timed."""
    from tritium.bench.denoisers import FAMILIES
    from tritium.bench.results import Results, Store

    deadline, target, merging = time.monotonic() + seconds, out / f"{step}.json", threading.Lock()
    stored = {row.workload for row in Results.load(target).rows} if target.exists() else set()
    chosen = [family for family in FAMILIES if not only or family.name in only]
    if step == "exactness":
        chosen = [family for family in chosen if not family.fits_float64]
    skipped = {*names_in(out / "crashed.json"), *stored, *(name.removesuffix(" few tokens") for name in stored)}
    # Those that take longest start first.
    waiting = sorted((family for family in chosen if family.name not in skipped), key=lambda family: -family.budget)

    def measure_one(name: str) -> int:
        left = deadline - time.monotonic()
        if left < STEPS[step]:
            return LEFT_OVER
        part = out / f"{step}-{name}"
        part.mkdir(exist_ok=True)
        code = _child(step, part, left, path, [name])
        with merging:
            if (part / f"{step}.json").exists():
                results = Results.load(part / f"{step}.json")
                Store(target, results.device["type"]).add(results.rows)
            for crashed in names_in(part / "crashed.json"):
                add_name(out / "crashed.json", crashed)
            shutil.rmtree(part)
        return code

    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        codes = set(pool.map(measure_one, [family.name for family in waiting]))
    return next((code for code in (CRASHED, FAILED, LEFT_OVER) if code in codes), DONE)


def _child(step: str, out: Path, seconds: float, path: Sequence[str], only: Sequence[str]) -> int:
    now = out / "now.txt"
    now.unlink(missing_ok=True)
    command = [sys.executable, __file__, "--child", step, "--out", str(out), "--limit", str(seconds)]
    command += ["--only", ",".join(only)] if only else []
    places = [str(ROOT / "src"), *path, os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, places))}
    try:
        code = subprocess.run(command, env=environment, check=False, timeout=seconds + _MARGIN / 2).returncode
        if code in (DONE, FAILED, LEFT_OVER):
            return code
    except subprocess.TimeoutExpired:
        code = LEFT_OVER
    workload = now.read_text(encoding="utf-8") if now.exists() else step
    if code == LEFT_OVER and workload not in names_in(out / "slow.json"):
        # Other workloads may have used this call's time: allow one more attempt.
        add_name(out / "slow.json", workload)
        return LEFT_OVER
    reason = "no end twice" if code == LEFT_OVER else f"its process ended with {code}"
    print(f"FAILED {workload}: {reason}", flush=True)
    add_name(out / "crashed.json", workload)
    return CRASHED


def forget(out: Path, names: Sequence[str]) -> None:
    """Remove the rows of families, also those with few tokens, to measure them again in the next call."""
    from tritium.bench.results import Results

    names = [*names, *(f"{name} few tokens" for name in names)]
    for path in (out / "families.json", out / "exactness.json"):
        if path.exists():
            results = Results.load(path)
            replace(results, rows=tuple(row for row in results.rows if row.workload not in names)).save(path)
    for path in (out / "crashed.json", out / "slow.json"):
        path.write_text(json.dumps([name for name in names_in(path) if name not in names]), encoding="utf-8")


def print_summary(out: Path) -> bool:
    """Print the figures of all files in the folder; return True if a variant failed or is not exact enough."""
    from tritium.bench import summary
    from tritium.bench.results import Results
    from tritium.bench.suite import failures

    paths = {name: out / f"{name}.json" for name in STEPS}
    rows = {name: Results.load(path).rows if path.exists() else () for name, path in paths.items()}
    for line in (
        *summary.families_summary(rows["families"]),
        *summary.families_table(rows["families"]),
        *summary.pipeline_table(rows["pipeline"]),
    ):
        print(" | ".join(line))
    for row in rows["host"]:
        print(f"{row.workload}, {row.variant}: {row.host_us:.1f} us a kernel")
    for line in summary.compile_time_summary(rows["compile-time"]):
        print(line)
    of_families = [*rows["exactness"], *rows["families"]]
    checked = [row for row in of_families if row.error_f64 is not None]
    outside = summary.outside_contract(checked)
    failed = [f"FAILED {line}" for line in failures(of_families)]
    for line in (*(f"OUTSIDE the fidelity 'close': {line}" for line in outside), *failed):
        print(line)
    print(f"{len(checked)} variants compared with float64, {len(outside)} outside the fidelity 'close'")
    # Rows of torch.compile may exceed the bound without failing the run.
    ours = [row for row in checked if row.variant == "eager" or row.variant.startswith("tritium")]
    return bool(failed or summary.outside_contract(ours))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="where the JSON files are")
    parser.add_argument("--limit", type=float, default=580.0, help="seconds of this call")
    parser.add_argument("--steps", default=",".join(STEPS), help=f"some of {', '.join(STEPS)}")
    parser.add_argument("--only", default="", help="families, separated by commas")
    parser.add_argument(
        "--jobs", type=int, default=1, help="processes for families; their first calls then share cores"
    )
    parser.add_argument("--again", default="", help="families to measure again, separated by commas")
    parser.add_argument("--diffusers", action="append", default=[], metavar="FOLDER", help="a folder for sys.path")
    parser.add_argument("--child", choices=STEPS, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    given.out.mkdir(parents=True, exist_ok=True)
    sys.path.insert(0, str(ROOT / "src"))
    only = [name for name in given.only.split(",") if name]
    if given.child:
        try:
            return measure(given.child, given.out, given.limit, only)
        except Exception:  # noqa: BLE001 - the parent continues with the other families
            traceback.print_exc()
            return CRASHED
    if given.again:
        forget(given.out, given.again.split(","))
    steps = [name for name in given.steps.split(",") if name]
    unknown = [name for name in steps if name not in STEPS]
    if unknown:
        parser.error(f"there is no step {', '.join(unknown)}; valid: {', '.join(STEPS)}")
    return session(given.out, given.limit, steps, given.diffusers, only, given.jobs)


if __name__ == "__main__":
    raise SystemExit(main())
