"""Measure skipping on the example pipeline: time of the denoiser, error of the latents, and peers at equal quality.

    python benchmarks/skipping.py --json benchmarks/results/cpu-2-cores-skip.json

28 steps with 14 computed ones. The table is searched with jobs that are not measured: seeds from 1000 on. Every error is
against eager images with all steps, as relative L2 of the final latents. With `--peers`, the caches of diffusers (and
DBCache of cache-dit, where it is installed) run in the same process with several thresholds; each row has the median PSNR.
Times are those of all calls of the denoiser in an image, by the median of rounds in which all ways take turns.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

import tritium
from tritium import Plan, Skip, compat, device, measure
from tritium.bench import generation, results
from tritium.bench.search import engines
from tritium.bench.search.evaluation import Evaluator, Pace, Store
from tritium.bench.search.recording import recording_of
from tritium.bench.search.skipping import Effort, Tables
from tritium.budget import Budget
from tritium.pipelines.generation import Image, Job, generate
from tritium.techniques.choice import Choice
from tritium.techniques.skip.propose import Proposer

STEPS, RUNS, JOBS = 28, 14, 8
SEARCHED = 1000
EAGER = Choice(how="eager")

# The number of computed steps of our rows beside peers.
PEER_RUNS = (18, 14, 11, 9)


def jobs_of(seed: int, count: int = JOBS) -> list[Job]:
    every = generation.jobs_for(generation.EXAMPLE, steps=STEPS)
    return [dataclasses.replace(every[place % len(every)], seed=seed + place) for place in range(count)]


@contextlib.contextmanager
def denoiser_seconds(kind: type) -> Iterator[list[tuple[float, float]]]:
    """Record the seconds of every call of a class of models: of the clock, and of the process on the CPU."""
    call, taken = kind.__call__, []

    def timed(self: Any, *args: Any, **kwargs: Any) -> Any:
        start, busy = time.perf_counter(), time.process_time()
        result = call(self, *args, **kwargs)
        taken.append((time.perf_counter() - start, time.process_time() - busy))
        return result

    kind.__call__ = timed  # type: ignore[method-assign]
    try:
        yield taken
    finally:
        del kind.__call__


def searched(pipe: Any, numbers: Sequence[int]) -> dict[int, Skip]:
    """Return the best table for each number of computed steps, found with jobs of other seeds."""
    jobs = jobs_of(SEARCHED)
    pace = Pace(lambda what, _: print(what, flush=True), 100)
    images, observed, calls = engines.references(pipe, jobs, 4, pace)
    recording = recording_of(observed[:4])
    assert recording is not None
    with tritium.optimize(pipe, Plan(components=dict.fromkeys(calls, "eager"), progress=False)) as handle:
        evaluator = Evaluator(handle, jobs, images, Store(None, {}), pace)
        budget = Budget(max_latent_l2=0.0)
        tables = Tables(evaluator, budget, recording, ["transformer"], len(jobs), Effort())
        base = dict.fromkeys(handle.choices, EAGER)
        proposer = Proposer(recording, tables.sensitivity(base))
        found = {runs: tables.best_of(base, "skip", proposer.proposals(runs, 8)) for runs in numbers}
        return {runs: tables.table_of(best) for runs, best in found.items()}


Way = Callable[[], contextlib.AbstractContextManager[Any]]


def tritium_way(pipe: Any, skip: Skip | None, choice: Choice) -> Way:
    @contextlib.contextmanager
    def way() -> Iterator[None]:
        names = [name for name, value in pipe.components.items() if isinstance(value, torch.nn.Module)]
        components = dict.fromkeys(names, EAGER) | {"transformer": choice.with_(skip=skip)}
        with tritium.optimize(pipe, Plan(components=components, progress=False)):
            yield

    return way


def diffusers_way(pipe: Any, config: Any) -> Way:
    @contextlib.contextmanager
    def way() -> Iterator[None]:
        pipe.transformer.enable_cache(config)
        try:
            yield
        finally:
            pipe.transformer.disable_cache()

    return way


def cache_dit_way(threshold: float) -> Way:
    @contextlib.contextmanager
    def way() -> Iterator[Any]:
        import cache_dit

        # Its blocks stay in a model: FirstBlockCache fails on that model afterwards.
        pipe = generation.load(generation.EXAMPLE, device.default())

        config = cache_dit.DBCacheConfig(
            Fn_compute_blocks=1, Bn_compute_blocks=0, max_warmup_steps=4, residual_diff_threshold=threshold
        )
        cache_dit.enable_cache(pipe, cache_config=config)
        try:
            yield pipe
        finally:
            cache_dit.disable_cache(pipe)

    return way


def peers(pipe: Any) -> dict[str, Way]:
    """Return the caches of others; MagCache is calibrated with one image of another seed, as it asks for."""
    import diffusers

    found = {
        f"diffusers FirstBlockCache {threshold}": diffusers_way(pipe, diffusers.FirstBlockCacheConfig(threshold))
        for threshold in (0.05, 0.08, 0.12)
    }
    ratios = mag_ratios(pipe)
    for threshold, longest in ((0.06, 3), (0.12, 4), (0.24, 5)):
        config = diffusers.MagCacheConfig(
            threshold=threshold,
            max_skip_steps=longest,
            retention_ratio=0.2,
            num_inference_steps=STEPS,
            mag_ratios=ratios,
        )
        found[f"diffusers MagCache {threshold}, {longest}"] = diffusers_way(pipe, config)
    for interval in (2, 3, 4):
        config = diffusers.TaylorSeerCacheConfig(
            cache_interval=interval, disable_cache_before_step=3, max_order=1, use_lite_mode=True
        )
        found[f"diffusers TaylorSeer lite {interval}"] = diffusers_way(pipe, config)
    with contextlib.suppress(ImportError):
        import cache_dit  # noqa: F401

        found |= {f"cache-dit DBCache {value}": cache_dit_way(value) for value in (0.08, 0.16, 0.24)}
    return found


def mag_ratios(pipe: Any) -> list[float]:
    """Return the ratios of the norms of consecutive changes over all blocks, of one image."""
    norms: list[torch.Tensor] = []
    model, inputs = pipe.transformer, []
    start = model.x_embedder.register_forward_hook(lambda _m, _a, out: inputs.append(out))
    end = model.norm_out.register_forward_pre_hook(lambda _m, args: norms.append((args[0] - inputs[-1]).norm(dim=-1)))
    generate(pipe, jobs_of(SEARCHED, 1)[0])
    start.remove()
    end.remove()
    pairs = itertools.pairwise(norms)
    return [1.0, *(float((later / earlier).mean()) for earlier, later in pairs)]


def measured(pipe: Any, ways: dict[str, Way], jobs: Sequence[Job], rounds: int) -> list[dict[str, Any]]:
    """Run every way on all jobs in turn; return seconds of the denoiser, errors, and PSNR against the first way."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    # On a shared machine the process waits for its core; the seconds that it computes do not count that.
    busy: dict[str, list[float]] = {name: [] for name in ways}
    images: dict[str, list[Image]] = {}
    whole: dict[str, list[float]] = {name: [] for name in ways}
    failed: dict[str, str] = {}
    for number in range(rounds):
        for name in measure.order_of_round(list(ways), number):
            if name in failed:
                continue
            try:
                with ways[name]() as other, denoiser_seconds(type(pipe.transformer)) as taken:
                    used = other or pipe
                    if number == 0:
                        generate(used, dataclasses.replace(jobs[0], seed=5))
                    found = []
                    for job in jobs:
                        taken.clear()
                        found.append(generate(used, job))
                        seconds[name].append(sum(wall for wall, _ in taken))
                        busy[name].append(sum(cpu for _, cpu in taken))
                        whole[name].append(found[-1].seconds)
                    images[name] = found
            except Exception as error:  # noqa: BLE001 - a peer that fails is a result too
                failed[name] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            print(f"round {number + 1}: {name} {failed.get(name, '')}", flush=True)
    reference = images[next(iter(ways))]
    rows = []
    for name in ways:
        if name in failed:
            rows.append({"workload": "example, 28 steps", "variant": name, "ratio": None, "failed": failed[name]})
            continue
        compared = [image.difference(full) for image, full in zip(images[name], reference, strict=True)]
        errors = [difference.latent_l2 or 0.0 for difference in compared]
        levels = [difference.psnr for difference in compared]
        median = statistics.median(levels)
        rows.append(
            {
                "workload": "example, 28 steps",
                "variant": name,
                "denoiser_ms": statistics.median(seconds[name]) * 1e3,
                "denoiser_cpu_ms": statistics.median(busy[name]) * 1e3,
                "image_ms": statistics.median(whole[name]) * 1e3,
                "latent_l2_median": statistics.median(errors),
                "latent_l2_worst": max(errors),
                "psnr_median": None if median == float("inf") else median,
                "psnr_worst": None if min(levels) == float("inf") else min(levels),
                "jobs": len(jobs),
                "rounds": rounds,
            }
        )
    for row in rows:
        if "denoiser_ms" in row:
            row["ratio"] = rows[0]["denoiser_ms"] / row["denoiser_ms"]
            row["cpu_ratio"] = rows[0]["denoiser_cpu_ms"] / row["denoiser_cpu_ms"]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peers", action="store_true")
    parser.add_argument("--no-compile", action="store_true", help="Measure eagerly alone.")
    parser.add_argument("--only-adaptive", action="store_true", help="Measure the adaptive rule beside eager alone.")
    arguments = parser.parse_args()
    pipe = generation.load(generation.EXAMPLE, device.default())
    if arguments.only_adaptive:
        write(
            measured(pipe, {"eager": contextlib.nullcontext, **adaptive(pipe)}, jobs_of(0), arguments.rounds), arguments
        )
        return
    tables = searched(pipe, sorted({RUNS, *(PEER_RUNS if arguments.peers else ())}))
    ways: dict[str, Way] = {"eager": contextlib.nullcontext}
    for runs, skip in sorted(tables.items(), reverse=True):
        ways[f"eager, {runs} of {STEPS} steps: {skip.rows[0]}"] = tritium_way(pipe, skip, EAGER)
    default = Skip.window(steps=STEPS, runs=RUNS)
    ways[f"eager, Skip.window(): {default.rows[0]}"] = tritium_way(pipe, default, EAGER)
    if not arguments.no_compile:
        ways["tritium"] = tritium_way(pipe, None, Choice())
        ways[f"tritium, {RUNS} of {STEPS} steps: {tables[RUNS].rows[0]}"] = tritium_way(pipe, tables[RUNS], Choice())
    ways |= adaptive(pipe)
    if arguments.peers:
        ways |= peers(pipe)
    write(measured(pipe, ways, jobs_of(0), arguments.rounds), arguments)


def adaptive(pipe: Any) -> dict[str, Way]:
    """Return the adaptive rule with two thresholds."""
    return {f"eager, Skip(adaptive={limit})": tritium_way(pipe, Skip(adaptive=limit), EAGER) for limit in (0.05, 0.2)}


def write(rows: Sequence[dict[str, Any]], arguments: argparse.Namespace) -> None:
    for row in rows:
        print({name: round(value, 4) if isinstance(value, float) else value for name, value in row.items()})
    if arguments.json is not None:
        content = {
            "device": device.describe(device.default()).to_dict(),
            "versions": compat.versions.versions(),
            "commit": results.commit(),
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "rows": rows,
        }
        arguments.json.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
