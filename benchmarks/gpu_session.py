"""Run all measurements that need a GPU, in resumable calls of at most ten minutes.

    python benchmarks/gpu_session.py --out results --diffusers /path/with/diffusers

Each step runs in a separate process; a family that crashes it is skipped in later calls. The steps: exactness of the
families whose full size has no float64 run, all families with their errors against float64, host times, the pipeline,
compile times. Exit code 0: everything is measured. 3: call again. 1: a side failed or exceeds the fidelity "close".
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DONE, FAILED, LEFT_OVER, CRASHED = 0, 1, 3, 4

# Seconds reserved at the end of a call for starting a process and writing files.
_MARGIN = 15.0


def _settings(**changes: Any) -> Any:
    from tritium import device
    from tritium.bench import run

    return run.Settings(**{"seconds": 3.0, "device_type": device.default(), **changes})


def _notify(out: Path) -> Callable[[str, float], None]:
    """Print the current step, and write the workload's name for the parent in case the process crashes."""
    said: list[str] = []

    def notify(what: str, share: float) -> None:
        (out / "now.txt").write_text(what.partition(":")[0], encoding="utf-8")
        if said[-1:] != [what]:
            said.append(what)
            print(f"[{share:4.0%}] {what}", flush=True)

    return notify


def _names(path: Path) -> list[str]:
    found: list[str] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    return found


def _add_name(path: Path, name: str) -> None:
    path.write_text(json.dumps([*_names(path), name]), encoding="utf-8")


def exactness(out: Path, seconds: float, only: Sequence[str]) -> int:
    """Compare families with full width and few tokens with float64, if the full size does not fit."""
    from tritium.bench.families import FAMILIES, measuring
    from tritium.bench.store import Store

    settings = _settings(seconds=0.0, errors=True, against=("eager",))
    store = Store(out / "exactness.json", settings.device_type)
    wide = [f for f in FAMILIES if not f.fits_float64 and (not only or f.name in only)]
    return _measure([measuring.with_few_tokens(family) for family in wide], settings, store, out, seconds)


def families(out: Path, seconds: float, only: Sequence[str]) -> int:
    """Measure the families without rows, with errors against float64."""
    from tritium.bench.families import FAMILIES
    from tritium.bench.store import Store

    settings = _settings(errors=True)
    chosen = [f for f in FAMILIES if not only or f.name in only]
    return _measure(chosen, settings, Store(out / "families.json", settings.device_type), out, seconds)


def _measure(chosen: Sequence[Any], settings: Any, store: Any, out: Path, seconds: float) -> int:
    from tritium.bench.families import measuring
    from tritium.bench.store import Clock

    dtype, skipped = str(settings.dtype).removeprefix("torch."), _names(out / "crashed.json")
    missing = [family for family in chosen if family.name not in skipped and not store.has(family.name, dtype)]
    outcome = measuring.measure_all(missing, settings, store, Clock(seconds), _notify(out))
    for reason in outcome.failed:
        print(f"FAILED {reason}", flush=True)
    if outcome.left_over:
        return LEFT_OVER
    return FAILED if outcome.failed else DONE


def pipeline(out: Path, seconds: float, only: Sequence[str]) -> int:
    """Measure the FLUX pipeline at the sizes without rows."""
    from tritium.bench import flux_pipeline
    from tritium.bench.store import Clock, Store

    del only
    settings = _settings(seconds=5.0)
    store = Store(out / "pipeline.json", settings.device_type)
    return LEFT_OVER if flux_pipeline.run(settings, store, Clock(seconds), _notify(out)) else DONE


def compile_time(out: Path, seconds: float, only: Sequence[str]) -> int:
    """Measure first calls with few and with many blocks."""
    from tritium.bench import compile_time as suite
    from tritium.bench.store import Clock, Store

    del only
    settings = _settings()
    store = Store(out / "compile-time.json", settings.device_type)
    return LEFT_OVER if suite.run(settings, store, Clock(seconds), _notify(out)) else DONE


def host(out: Path, seconds: float, only: Sequence[str]) -> int:
    """Measure the host time of a generated and of an owned kernel."""
    from tritium.bench import host as suite
    from tritium.bench.store import Store

    del only, seconds
    settings = _settings()
    suite.run(settings, Store(out / "host.json", settings.device_type), _notify(out))
    return DONE


STEPS: dict[str, Callable[[Path, float, Sequence[str]], int]] = {
    "exactness": exactness,
    "families": families,
    "host": host,
    "pipeline": pipeline,
    "compile-time": compile_time,
}
# A step is started only if at least this many seconds are left.
LEAST = {"exactness": 40, "families": 40, "host": 40, "pipeline": 130, "compile-time": 130}


def session(out: Path, limit: float, steps: Sequence[str], path: Sequence[str], only: Sequence[str]) -> int:
    """Run each step in a process; skip a family after it has crashed its process."""
    start, codes = time.monotonic(), {}
    for step in steps:
        codes[step] = LEFT_OVER
        while (left := limit - (time.monotonic() - start) - _MARGIN) >= LEAST[step]:
            print(f"== {step}, {left:.0f} s left", flush=True)
            codes[step] = _child(step, out, left, path, only)
            if codes[step] != CRASHED or step not in ("exactness", "families"):
                break
    failed = print_summary(out)
    words = {DONE: "done", LEFT_OVER: "call again"}
    print("; ".join(f"{step}: {words.get(code, 'failed')}" for step, code in codes.items()))
    if failed or {FAILED, CRASHED} & set(codes.values()) or _names(out / "crashed.json"):
        return FAILED
    return LEFT_OVER if LEFT_OVER in codes.values() else DONE


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
    if code == LEFT_OVER and workload not in _names(out / "slow.json"):
        # Other workloads may have used this call's time: allow one more attempt.
        _add_name(out / "slow.json", workload)
        return LEFT_OVER
    print(
        f"FAILED {workload}: " + ("no end twice" if code == LEFT_OVER else f"its process ended with {code}"), flush=True
    )
    _add_name(out / "crashed.json", workload)
    return CRASHED


def forget(out: Path, names: Sequence[str]) -> None:
    """Remove the rows of families, also those with few tokens, to measure them again in the next call."""
    sys.path.insert(0, str(ROOT / "src"))
    from dataclasses import replace

    from tritium.bench.results import Results

    names = [*names, *(f"{name} few tokens" for name in names)]
    for path in (out / "families.json", out / "exactness.json"):
        if path.exists():
            found = Results.load(path)
            replace(found, rows=tuple(row for row in found.rows if row.workload not in names)).save(path)
    for path in (out / "crashed.json", out / "slow.json"):
        path.write_text(json.dumps([name for name in _names(path) if name not in names]), encoding="utf-8")


def print_summary(out: Path) -> bool:
    """Print the figures of all files in the folder; return True if a side failed or is not exact enough."""
    sys.path.insert(0, str(ROOT / "src"))
    from tritium.bench import summary
    from tritium.bench.results import Results

    found = {name: out / f"{name}.json" for name in STEPS}
    rows = {name: Results.load(path).rows for name, path in found.items() if path.exists()}
    for line in summary.families_summary(rows.get("families", ())):
        print(" | ".join(line))
    for line in (*summary.families_table(rows.get("families", ())), *summary.pipeline_table(rows.get("pipeline", ()))):
        print(" | ".join(line))
    for row in rows.get("host", ()):
        print(f"{row.workload}, {row.variant}: {row.host_us:.1f} us a kernel")
    for line in summary.compile_time_summary(rows.get("compile-time", ())):
        print(line)
    checked = [row for name in ("exactness", "families") for row in rows.get(name, ()) if row.error_f64 is not None]
    outside = summary.outside_contract(checked)
    for line in outside:
        print(f"OUTSIDE the fidelity 'close': {line}")
    failed = dict.fromkeys(
        f"FAILED {row.workload}: {row.remark}"
        for name in ("exactness", "families")
        for row in rows.get(name, ())
        if row.variant == "eager" and " failed: " in (row.remark or "")
    )
    print(
        "\n".join([*failed, f"{len(checked)} sides compared with float64, {len(outside)} outside the fidelity 'close'"])
    )
    # Rows of torch.compile may exceed the bound without failing the run.
    ours = [row for row in checked if row.variant == "eager" or row.variant.startswith("tritium")]
    return bool(failed or summary.outside_contract(ours))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="where the JSON files are")
    parser.add_argument("--limit", type=float, default=580.0, help="seconds of this call")
    parser.add_argument("--steps", default=",".join(STEPS), help=f"some of {', '.join(STEPS)}")
    parser.add_argument("--only", default="", help="families, separated by commas")
    parser.add_argument("--again", default="", help="families to measure again, separated by commas")
    parser.add_argument("--diffusers", action="append", default=[], metavar="FOLDER", help="a folder for sys.path")
    parser.add_argument("--child", choices=STEPS, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    given.out.mkdir(parents=True, exist_ok=True)
    only = [name for name in given.only.split(",") if name]
    if given.child:
        try:
            return STEPS[given.child](given.out, given.limit, only)
        except Exception:  # noqa: BLE001 - the parent continues with the other families
            traceback.print_exc()
            return CRASHED
    if given.again:
        forget(given.out, given.again.split(","))
    steps = [name for name in given.steps.split(",") if name]
    unknown = [name for name in steps if name not in STEPS]
    if unknown:
        parser.error(f"there is no step {', '.join(unknown)}; valid: {', '.join(STEPS)}")
    return session(given.out, given.limit, steps, given.diffusers, only)


if __name__ == "__main__":
    raise SystemExit(main())
