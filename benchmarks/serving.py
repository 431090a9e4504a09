"""The server: its overhead over the library call, a soak, and images a second with and without batches.

    python benchmarks/serving.py overhead --out serving.json            # HTTP, CPU or GPU
    python benchmarks/serving.py soak --minutes 10 --out serving.json   # HTTP, flat memory
    python benchmarks/serving.py batching --out serving.json            # without HTTP: no FastAPI is needed

Each adds its rows to the file. `--eager` runs without compiling.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import http.client
import json
import random
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from tritium import device
from tritium.bench import generation
from tritium.bench.results import Row, Store
from tritium.serve.dispatch import Dispatcher
from tritium.serve.engine import Done, Job, Model
from tritium.serve.queue import Limits
from tritium.serve.runner import LocalRunner
from tritium.serve.worker import PipelineWorker
from tritium.serve.worker_settings import WorkerSettings

PROMPT = "a red circle"
OVERHEAD_STEPS, OVERHEAD_ROUNDS = 4, 40
# Seconds between two readings of the memory.
READING = 5.0
SOAK_CLIENTS = 3


def row(workload: str, variant: str, milliseconds: Sequence[float], note: str, remark: str = "", **fields: Any) -> Row:
    times = sorted(milliseconds)
    quarter = len(times) // 4
    rest = {"dtype": "float32", "peak_memory_bytes": None, **fields}
    return Row(
        workload=workload,
        variant=variant,
        note=note,
        remark=remark or None,
        median_ms=statistics.median(times),
        lower_quartile_ms=times[quarter],
        upper_quartile_ms=times[-1 - quarter],
        samples=len(times),
        mode=None,
        shrunk=False,
        shapes={},
        ratio=None,
        first_call_s=0.0,
        first_call_cold=False,
        relative_l2=0.0,
        disturbed=None,
        **rest,
    )


# --- a server in a process ---


@contextmanager
def server(*options: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Start `tritium serve example`; yield its process and port when it is ready."""
    command = [sys.executable, "-m", "tritium", "serve", "example", "--port", "0", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = next((line for line in process.stdout if "ready on" in line), None)
        if line is None:
            raise RuntimeError("the server did not start")
        print(line.strip(), flush=True)
        yield process, int(line.split(" after")[0].rpartition(":")[2])
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


class Client:
    """One connection that stays open."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)

    def generate(self, *, leave: bool = False, **body: Any) -> int:
        """Send a request and read the answer, or leave in the middle; return the status."""
        headers = {"content-type": "application/json"}
        self._connection.request("POST", "/v1/images/generations", json.dumps({"prompt": PROMPT, **body}), headers)
        if leave:
            time.sleep(0.05)
            self._connection.close()
            return 0
        response = self._connection.getresponse()
        response.read()
        return response.status


def overhead(*, eager: bool) -> list[Row]:
    """Interleave library calls in this process with requests to a server; both run the same pipeline in the same way."""
    settings = WorkerSettings(pipeline="example", name="example", eager=eager, edits=False)
    worker = PipelineWorker(settings)
    worker.load()
    arguments = {"num_inference_steps": OVERHEAD_STEPS, "height": 128, "width": 128}
    samples: dict[str, list[float]] = {"library call": [], "request": []}
    with server("--no-edits", *(["--eager"] if eager else [])) as (_, port):
        client = Client(port)
        functions: dict[str, Callable[[], object]] = {
            "library call": lambda: worker.pipe(
                [PROMPT], generator=[torch.Generator().manual_seed(0)], output_type="pil", **arguments
            ),
            "request": lambda: client.generate(tritium={"seed": 0, "steps": OVERHEAD_STEPS}),
        }
        for number in range(OVERHEAD_ROUNDS + 3):
            for name, function in functions.items():
                start = time.perf_counter()
                function()
                if number >= 3:
                    samples[name].append((time.perf_counter() - start) * 1e3)
    note = f"example, 128 x 128, {OVERHEAD_STEPS} steps, {'eager' if eager else 'compiled'}, PNG in JSON over HTTP"
    difference = statistics.median(samples["request"]) - statistics.median(samples["library call"])
    remarks = {"request": f"{difference:.1f} ms more than the library call"}
    return [row("serving overhead", name, times, note, remarks.get(name, "")) for name, times in samples.items()]


# --- a soak ---


def soak(minutes: float, *, eager: bool) -> list[Row]:
    """Send mixed requests for a while, leave some of them, and read the memory of both processes."""
    note = (
        f"example, {SOAK_CLIENTS} clients, {minutes:g} minutes, one of four leaves, {'eager' if eager else 'compiled'}"
    )
    with server("--batch", "2", *(["--eager"] if eager else [])) as (process, port):
        until = time.monotonic() + minutes * 60
        statuses: list[int] = []
        times: list[float] = []
        clients = [
            threading.Thread(target=_use, args=(port, seed, until, statuses, times)) for seed in range(SOAK_CLIENTS)
        ]
        for client in clients:
            client.start()
        readings = []
        while time.monotonic() < until:
            time.sleep(READING)
            readings.append(_memory(process.pid))
            print(f"{len(statuses)} requests, {readings[-1] / 2**20:.0f} MiB", flush=True)
        for client in clients:
            client.join()
    quarter = max(1, len(readings) // 4)
    second, last = statistics.median(readings[quarter : 2 * quarter]), statistics.median(readings[-quarter:])
    counts = {status: statuses.count(status) for status in sorted(set(statuses))}
    remark = (
        f"memory of the second quarter {second / 2**20:.0f} MiB, of the last {last / 2**20:.0f} MiB ({last / second - 1:+.1%}); "
        f"requests by status (0: left): {counts}"
    )
    return [row("serving soak", "requests", times, note, remark, peak_memory_bytes=max(readings))]


def _use(port: int, seed: int, until: float, statuses: list[int], times: list[float]) -> None:
    random_ = random.Random(seed)
    client = Client(port)
    while time.monotonic() < until:
        body = random_.choice(
            [
                {"n": 2},
                {"stream": True, "partial_images": 2},
                {"output_format": "webp"},
                {"tritium": {"steps": 2, "seed": 1}},
                {"tritium": {"negative_prompt": "", "true_cfg_scale": 2.0}},
            ]
        )
        leave = random_.random() < 0.25
        start = time.perf_counter()
        statuses.append(client.generate(leave=leave, **{"tritium": {"steps": 4}, **body}))
        if not leave:
            times.append((time.perf_counter() - start) * 1e3)


def _memory(pid: int) -> int:
    """Return the resident bytes of a process and its children."""
    own = int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]) * 4096
    # A process belongs to the thread that started it.
    children = [file.read_text(encoding="ascii").split() for file in Path(f"/proc/{pid}/task").glob("*/children")]
    return own + sum(_memory(int(child)) for found in children for child in found)


# --- batches ---


class Promising:
    """A started runner with another model than its own."""

    def __init__(self, runner: LocalRunner, model: Model) -> None:
        self._runner, self._model = runner, model

    async def start(self) -> tuple[Model, ...]:
        return (self._model,)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)


def flux_shaped(where: str) -> Any:
    """Return the example with a denoiser of FLUX's width and few blocks, in bfloat16 on a GPU."""
    import diffusers

    pipe = generation.load(generation.EXAMPLE, where)
    config = {**pipe.transformer.config, "num_layers": 2, "num_single_layers": 4}
    heads = {"num_attention_heads": 24 if where == "cuda" else 2, "attention_head_dim": 128}
    names = (
        "patch_size",
        "in_channels",
        "num_layers",
        "num_single_layers",
        "joint_attention_dim",
        "pooled_projection_dim",
    )
    with torch.device(where):
        torch.manual_seed(0)
        transformer = diffusers.FluxTransformer2DModel(**{name: config[name] for name in names}, **heads)
    pipe.register_modules(transformer=transformer.eval().requires_grad_(requires_grad=False))
    return pipe.to(torch.bfloat16) if where == "cuda" else pipe


def batching(where: str, *, eager: bool, requests: int) -> list[Row]:
    """Send requests at the same time to a worker in a thread, with batches and one by one."""
    rows = []
    sides = (128, 256) if where == "cuda" else (128,)
    cases: list[tuple[str, Callable[[], Any] | None, int]] = [("example", None, side) for side in sides]
    cases += [("FLUX-shaped", lambda: flux_shaped(where), side) for side in ((256, 1024) if where == "cuda" else (64,))]
    for name, load, side in cases:
        settings = WorkerSettings(
            pipeline="example",
            name=name,
            sizes=((side, side),),
            batches=(1, 4),
            text_tokens=32,
            steps=4,
            eager=eager,
            edits=False,
            device=where,
        )
        start = time.perf_counter()
        worker = PipelineWorker(settings, load)
        found = asyncio.run(_rates(worker, requests))
        dtype = "bfloat16" if load is not None and where == "cuda" else "float32"
        note = f"{name}, {side} x {side}, 4 steps, {requests} requests at once, {'eager' if eager else 'compiled'}"
        for variant, (rate, remark) in found.items():
            rows.append(
                row("serving batches", variant, [1e3 / rate], note, f"{rate:.2f} images/s{remark}", dtype=dtype)
            )
            print(f"{note}; {variant}: {rows[-1].remark} ({time.perf_counter() - start:.0f} s)", flush=True)
    return rows


async def _rates(worker: PipelineWorker, requests: int) -> dict[str, tuple[float, str]]:
    """Return images a second, and a remark: in batches of 4, in those that were measured as faster, and one by one."""
    runner = LocalRunner([worker])
    (model,) = await runner.start()
    size = model.sizes[0]
    found = {}
    always = {size: (4,)}
    for variant, batches in (("one by one", {}), ("in batches of 4", always), ("as measured", model.batches)):
        chosen = dataclasses.replace(model, batches=batches)
        engine = Dispatcher(Promising(runner, chosen), Limits(length=10 * requests))
        await engine.start()
        await _all(engine, chosen, 4)
        start = time.perf_counter()
        await _all(engine, chosen, requests)
        seconds = time.perf_counter() - start
        found[variant] = (requests / seconds, f"; batches {sorted(chosen.batches_at(size))}")
    await runner.stop()
    return found


async def _all(engine: Dispatcher, model: Model, requests: int) -> None:
    width, height = model.sizes[0]

    async def one(seed: int) -> None:
        job = Job(
            id=f"{time.monotonic_ns()}-{seed}",
            model=model.name,
            prompt=PROMPT,
            width=width,
            height=height,
            steps=model.steps,
            seed=seed,
        )
        last = [event async for event in engine.submit(job)][-1]
        assert isinstance(last, Done), last

    await asyncio.gather(*(one(seed) for seed in range(requests)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["overhead", "soak", "batching"])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--requests", type=int, default=24)
    given = parser.parse_args()
    where = device.default()
    if given.what == "overhead":
        rows = overhead(eager=given.eager)
    elif given.what == "soak":
        rows = soak(given.minutes, eager=given.eager)
    else:
        rows = batching(where, eager=given.eager, requests=given.requests)
    for found in rows:
        print(f"{found.workload}, {found.variant}: {found.median_ms:.1f} ms; {found.remark or ''}")
    Store(given.out, where).add(rows)


if __name__ == "__main__":
    main()
