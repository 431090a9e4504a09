"""Measure the time from a process's start to its first image: with weights that another process keeps, and artifacts.

    python benchmarks/sharing.py --json benchmarks/results/h200-sharing.json
    python benchmarks/sharing.py --pipeline example          # on a CPU, about a minute

One process keeps the weights (random ones for FLUX.1-dev's shape). The first user attaches, compiles with empty caches and
saves artifacts. The second has empty caches too and starts from the artifacts, as on a new machine or in a new container; the
third finds the caches of the first. Seconds count from the start of the process, Python and imports included.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

STEPS = 4
SIZE = 1024

# Users, in order: the folder of their caches, and whether they start from the file of the first.
USERS = {
    "shared, cold": ("first", False),
    "shared, artifacts": ("second", True),
    "shared, artifacts, warm caches": ("first", True),
}

# Seconds that a process gets.
PATIENCE = 240


def keep(name: str, pipeline: str, where: str) -> None:
    """Keep the weights until standard input ends."""
    from tritium.pipelines import sharing

    began = time.perf_counter()
    pipe = built(pipeline, where)
    loaded = time.perf_counter()
    with sharing.keeper(name) as keeper:
        keeper.publish(pipe)
        print(json.dumps([loaded - began, time.perf_counter() - loaded, keeper.bytes]), flush=True)
        sys.stdin.read()


def scale_of(where: str) -> Any:
    from tritium.bench import flux_pipeline

    return replace(flux_pipeline.FULL if where == "cuda" else flux_pipeline.SMALL, steps=STEPS)


def built(pipeline: str, where: str) -> Any:
    import torch

    import tritium
    from tritium.bench import flux_pipeline

    if pipeline == "example":
        return tritium.load_example(where)
    dtype = torch.bfloat16 if where == "cuda" else torch.float32
    return flux_pipeline.build(scale_of(where), where, dtype)


def use(name: str, pipeline: str, where: str, file: Path, began: float, *, starts_from_file: bool) -> None:
    """Attach, generate two images, and print the seconds of each part."""
    parts = {"python": time.time() - began}
    timed = Parts(parts)
    with timed("torch"):
        import torch
    # The attributes of tritium import what they need: diffusers is in `attach`, torch's compiler in `optimize`.
    import tritium
    from tritium import device

    with timed("attach"):
        pipe = tritium.attach(name, wait=10)
        device.synchronize(where)
    with timed("optimize"):
        handle = tritium.optimize(pipe, tritium.Plan(progress=False), artifacts=file if starts_from_file else None)
    call = call_of(pipeline, pipe, where)
    with timed("first image"):
        image = call()
        device.synchronize(where)
    total, cpu = time.time() - began, cpu_seconds()
    second = time.perf_counter()
    again = call()
    device.synchronize(where)
    second = time.perf_counter() - second
    if not starts_from_file:
        handle.save(file)
    found = {
        "parts": parts,
        "total_s": total,
        "cpu_s": cpu,
        "tracing_s": tracing_seconds(),
        "first_s": parts["first image"],
        "second_s": second,
        "failures": [str(failure) for failure in handle.report.failures],
        "equal": bool(torch.equal(image, again)),
        "digest": float(image.double().sum()),
        "shape": list(image.shape),
        "own_bytes": own_bytes(where),
    }
    print(json.dumps(found))


def tracing_seconds() -> float:
    import torch

    times = dict(zip(*torch._dynamo.utils.compile_times(repr="csv", aggregate=True), strict=True))
    return float(times.get("bytecode_tracing", 0.0))


def cpu_seconds() -> float:
    """Return the seconds that this process and its ended children have computed: others cannot disturb them."""
    kinds = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return sum(usage.ru_utime + usage.ru_stime for usage in map(resource.getrusage, kinds))


class Parts:
    """Adds the seconds of parts to a dictionary: `with parts("name"): ...`."""

    def __init__(self, seconds: dict[str, float]) -> None:
        self._seconds = seconds

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self._seconds[name] = time.perf_counter() - began


def call_of(pipeline: str, pipe: Any, where: str) -> Any:
    """Return a function that generates an image from the same noise."""
    import torch

    from tritium import example
    from tritium.bench import flux_pipeline
    from tritium.bench.workload import Normals

    if pipeline == "example":
        pipe.set_progress_bar_config(disable=True)
        return lambda: (
            pipe(
                example.PROMPTS[0],
                num_inference_steps=STEPS,
                generator=torch.Generator().manual_seed(0),
                output_type="pt",
            ).images
        )
    normal = Normals(where, torch.bfloat16 if where == "cuda" else torch.float32)
    pipe.set_progress_bar_config(disable=True)
    return flux_pipeline.generator(scale_of(where), SIZE if where == "cuda" else 64, pipe, normal)


def own_bytes(where: str) -> int:
    """Return the most memory that this process has allocated itself: mapped weights do not count."""
    import torch

    if where == "cuda":
        return int(torch.cuda.max_memory_allocated())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def start(arguments: list[str], caches: Path) -> subprocess.Popen[str]:
    (caches / "tmp").mkdir(parents=True, exist_ok=True)
    folders = {
        "TORCHINDUCTOR_CACHE_DIR": caches / "inductor",
        "TRITON_CACHE_DIR": caches / "triton",
        "TMPDIR": caches / "tmp",
        "XDG_RUNTIME_DIR": caches.parent,
    }
    environment = {**os.environ, **{name: str(folder) for name, folder in folders.items()}}
    # An installed package has its bytecode: without it, the imports of each user would compile Tritium's modules.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    return subprocess.Popen(
        [sys.executable, __file__, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )


def run(pipeline: str, where: str, root: Path) -> dict[str, Any]:
    """Run a keeper and its users, one after the other; return what each measured."""
    name, file = f"benchmark-{os.getpid()}", root / "artifacts.tritium"
    common = ["--name", name, "--pipeline", pipeline, "--device", where]
    keeper = start(["--role", "keep", *common], root / "keeper")
    assert keeper.stdout is not None
    found: dict[str, Any] = {}
    try:
        line = keeper.stdout.readline()
        if not line:
            raise SystemExit("the keeper has failed")
        found["keeper"] = json.loads(line)
        for user, (caches, starts_from_file) in USERS.items():
            options = ["--role", "use", *common, "--file", str(file), "--began", repr(time.time())]
            process = start([*options, *(["--starts-from-file"] if starts_from_file else [])], root / caches)
            output, _ = process.communicate(timeout=PATIENCE)
            if process.returncode:
                raise SystemExit(f"{user}: the process failed")
            found[user] = json.loads(output.splitlines()[-1])
            print(told(user, found[user]), flush=True)
    finally:
        keeper.communicate()
    return found


def told(user: str, found: dict[str, Any]) -> str:
    parts = ", ".join(f"{name} {seconds:.2f}" for name, seconds in found["parts"].items())
    return (
        f"{user}: first image after {found['total_s']:.2f} s ({parts}; in it tracing {found['tracing_s']:.2f}), "
        f"{found['cpu_s']:.1f} s of CPU time, second image {found['second_s']:.2f} s, {found['own_bytes'] / 1e9:.2f} GB of its own"
    )


def rows(pipeline: str, where: str, found: dict[str, Any]) -> list[Any]:
    from tritium.bench.results import OPTIMIZED, Row

    built_s, published_s, size = found["keeper"]
    note = f"{STEPS} steps; weights of {size / 1e9:.2f} GB kept by another process"
    common = {"workload": f"{pipeline} pipeline, shared weights", "mode": None, "note": note, "shrunk": where == "cpu"}
    return [
        Row(
            **common,
            variant=f"{OPTIMIZED}, {user}",
            dtype="bfloat16" if where == "cuda" and pipeline != "example" else "float32",
            shapes={"pixels": entry["shape"]},
            median_ms=entry["second_s"] * 1e3,
            lower_quartile_ms=entry["second_s"] * 1e3,
            upper_quartile_ms=entry["second_s"] * 1e3,
            samples=1,
            ratio=None,
            first_call_s=entry["first_s"],
            first_call_cold=user == "shared, cold",
            peak_memory_bytes=entry["own_bytes"],
            relative_l2=0.0 if entry["digest"] == found["shared, cold"]["digest"] else float("nan"),
            disturbed=None,
            cold_start_s=entry["total_s"] if user == "shared, cold" else None,
            restart_s=entry["total_s"] if user != "shared, cold" else None,
            remark=f"{told(user, entry)}; the keeper built the pipeline in {built_s:.1f} s and shared it in {published_s:.2f} s",
        )
        for user, entry in found.items()
        if user != "keeper"
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pipeline", choices=["flux", "example"], default="flux")
    parser.add_argument("--device", choices=["cuda", "cpu"])
    parser.add_argument("--json", type=Path)
    for option in ("--role", "--name"):
        parser.add_argument(option, help=argparse.SUPPRESS)
    parser.add_argument("--file", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--began", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--starts-from-file", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.role == "keep":
        keep(chosen.name, chosen.pipeline, chosen.device)
        return
    if chosen.role == "use":
        use(
            chosen.name,
            chosen.pipeline,
            chosen.device,
            chosen.file,
            chosen.began,
            starts_from_file=chosen.starts_from_file,
        )
        return
    from tritium import device
    from tritium.bench.results import Results

    where = chosen.device or device.default()
    with tempfile.TemporaryDirectory(prefix="sharing-") as folder:
        found = run(chosen.pipeline, where, Path(folder))
    equal = len({entry["digest"] for user, entry in found.items() if user != "keeper"}) == 1
    print(f"images of all users are {'equal' if equal else 'DIFFERENT'}")
    if chosen.json is not None:
        Results.now(rows(chosen.pipeline, where, found), where).save(chosen.json)


if __name__ == "__main__":
    main()
