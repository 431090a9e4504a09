"""Measure the time to a new process's first result: cold, from torch's artifacts, from Tritium's file.

    python benchmarks/cold_start.py --repeats 3 --json benchmarks/results/cold-start/cpu-2-cores.json

Every start is a process with a new cache folder and temporary folder, as on a new machine. Only `warm cache` reuses
the folders of an earlier start. Seconds are medians; the model and its inputs are those of `tritium bench`.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

STARTS = ("cold", "torch's artifacts", "Tritium's file", "warm cache")
FILES = {"torch's artifacts": "torch.bin", "Tritium's file": "file.tritium"}


def child(workload: str, start: str, folder: Path, *, save: bool) -> None:
    """Run one start in this process and print its measurements as JSON."""
    began = time.perf_counter()
    import torch

    from tritium import Backend, compat, device, explain
    from tritium.artifacts import files as artifacts
    from tritium.artifacts.fingerprint import Fingerprint
    from tritium.bench import results, workloads

    where = device.default()
    (found,) = workloads.find(workload)
    built = found.build(where, torch.float32 if where == "cpu" else torch.bfloat16, small=where == "cpu")
    here = Fingerprint.current({"transformer": built.model.config}, where)
    compiler = _count_compiler_calls()
    ready, ready_cpu = time.perf_counter(), _cpu_seconds()
    if start == "torch's artifacts":
        torch.compiler.load_cache_artifacts((folder / FILES[start]).read_bytes())
    elif start == "Tritium's file":
        artifacts.load(folder / FILES[start], here)
    loaded = time.perf_counter()
    with torch.inference_mode():
        compiled = torch.compile(built.model, backend=Backend())
        compiled(**built.inputs)
        device.synchronize(where)
    done, done_cpu = time.perf_counter(), _cpu_seconds()
    assert not explain(compiled).failures
    if save:
        content = torch.compiler.save_cache_artifacts()
        assert content is not None
        (folder / FILES["torch's artifacts"]).write_bytes(content[0])
        artifacts.save(folder / FILES["Tritium's file"], here)
    times = torch._dynamo.utils.compile_times(repr="csv", aggregate=True)
    parts = dict(zip(times[0], map(float, times[1]), strict=True))
    print(
        json.dumps(
            {
                "import_s": ready - began,
                "load_s": loaded - ready,
                "first_result_s": done - ready,
                "cpu_s": done_cpu - ready_cpu,
                "tracing_s": parts["bytecode_tracing"],
                "compiler_calls": len(compiler),
                "compiler_s": sum(compiler),
                "graphs_found": torch._dynamo.utils.counters["inductor"]["fxgraph_cache_hit"],
                "device": device.describe(where).to_dict(),
                "versions": compat.versions.versions(),
                "commit": results.commit(),
                "note": built.note,
            }
        )
    )


def _cpu_seconds() -> float:
    """Return the CPU time of this process and its ended children: hardly affected by other users' load."""
    return sum(os.times()[:4])


def _count_compiler_calls() -> list[float]:
    """Record the seconds of every later call of the C++ compiler; background calls overlap."""
    from torch._inductor import cpp_builder

    original, taken = cpp_builder.CppBuilder.build, []

    def build(self: Any) -> None:
        began = time.perf_counter()
        original(self)
        taken.append(time.perf_counter() - began)

    cpp_builder.CppBuilder.build = build
    return taken


def measure(workload: str, start: str, files: Path, machine: Path, *, save: bool = False) -> dict[str, Any]:
    """Run one start in a folder that simulates a machine."""
    (machine / "tmp").mkdir(parents=True, exist_ok=True)
    # Inductor stores precompiled headers in the temporary folder, outside its cache.
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(machine / "cache"), "TMPDIR": str(machine / "tmp")}
    command = [sys.executable, __file__, "--workload", workload, "--start", start, "--folder", str(files)]
    done = subprocess.run(
        [*command, *(["--save"] if save else [])], env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise SystemExit(done.stderr)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def compare(workload: str, repeats: int) -> dict[str, Any]:
    taken: dict[str, list[dict[str, Any]]] = {start: [] for start in STARTS}
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        files = root / "files"
        files.mkdir()
        for round_ in range(repeats):
            for start in STARTS:
                # No apostrophes or spaces: Inductor passes paths to a shell.
                machine = root / f"machine-{0 if start == 'warm cache' else STARTS.index(start)}-{round_}"
                taken[start].append(measure(workload, start, files, machine, save=start == "cold" and round_ == 0))
                print(start, f"{taken[start][-1]['first_result_s']:.1f} s", file=sys.stderr, flush=True)
        sizes = {start: (files / file).stat().st_size for start, file in FILES.items()}
    first = taken["cold"][0]
    rows: list[dict[str, Any]] = []
    for start, entries in taken.items():
        medians = {
            key: round(statistics.median(entry[key] for entry in entries), 3)
            for key in ("import_s", "load_s", "first_result_s", "cpu_s", "tracing_s", "compiler_calls", "compiler_s")
        }
        cold = rows[0] if rows else medians
        shares = {
            f"{key.removesuffix('_s')}_share": round(medians[key] / cold[key], 4) for key in ("first_result_s", "cpu_s")
        }
        rows.append({"start": start, **medians, **shares, "file_bytes": sizes.get(start)})
    return {
        **{key: first[key] for key in ("device", "versions", "commit", "note")},
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "workload": workload,
        "repeats": repeats,
        "rows": rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workload", default="flux")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--start", choices=STARTS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--save", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.start is not None:
        child(arguments.workload, arguments.start, arguments.folder, save=arguments.save)
        return
    found = compare(arguments.workload, arguments.repeats)
    for row in found["rows"]:
        print(
            f"{row['start']:18} {row['first_result_s']:7.1f} s {row['first_result_share']:6.1%}"
            f"  {row['cpu_s']:7.1f} s of CPU {row['cpu_share']:6.1%}"
            f"  {row['compiler_calls']:.0f} compiler calls"
        )
    if arguments.json is not None:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
