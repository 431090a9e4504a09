"""Measure whole images with the recipe that ships for the example, with eager, torch.compile and plain Tritium.

    python benchmarks/recipes.py --json benchmarks/results/cpu-2-cores-tune.json

The jobs have seeds that the recipe's search did not use. The ways take turns in one process. PSNR and SSIM are the worst of
all jobs, against eager images with all steps; the errors of latents are the median. On a shared machine the process waits
for its core, so each remark has the milliseconds of the processor too.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from pathlib import Path
from typing import Any

import tritium
from tritium import Choice, Plan, device, measure, quality
from tritium.bench import generation
from tritium.bench.results import EAGER, INDUCTOR, OPTIMIZED, Results, Row
from tritium.pipelines import recipe
from tritium.pipelines.generation import Image, Job, generate

STEPS, JOBS, SEED = 28, 8, 2000
RECIPE = "tritium recipe"
# Below this share of the processor, others took its cores.
UNDISTURBED = 0.9


def jobs_of(count: int = JOBS) -> list[Job]:
    every = generation.jobs_for(generation.EXAMPLE, steps=STEPS)
    return [dataclasses.replace(every[place % len(every)], seed=SEED + place) for place in range(count)]


def ways_of(pipe: Any, handle: tritium.api.Handle) -> dict[str, dict[str, Choice]]:
    """Return the choice of every part for each way. torch.compile gets the parts that a user of diffusers compiles."""
    eager = dict.fromkeys(handle.choices, Choice(how="eager"))
    compiled = dict.fromkeys(("transformer", "vae.decode"), Choice(how="inductor"))
    plan = recipe.load(Path(generation.EXAMPLE)).plan_for(pipe)
    chosen = {name: plan.choice(name) or choice for name, choice in handle.choices.items()}
    return {EAGER: eager, INDUCTOR: eager | compiled, OPTIMIZED: handle.choices, RECIPE: chosen}


@dataclasses.dataclass
class Taken:
    """What one way took."""

    first: float = 0.0
    seconds: list[float] = dataclasses.field(default_factory=list)
    busy: list[float] = dataclasses.field(default_factory=list)
    images: list[Image] = dataclasses.field(default_factory=list)


def measured(pipe: Any, rounds: int) -> dict[str, Taken]:
    """Run every way on all jobs in turn."""
    jobs = jobs_of()
    with tritium.optimize(pipe, Plan(progress=False)) as handle:
        ways = ways_of(pipe, handle)
        found = {name: Taken() for name in ways}
        for number in range(rounds):
            for name in measure.order_of_round(list(ways), number):
                handle.use(ways[name])
                taken = found[name]
                if number == 0:
                    taken.first = generate(pipe, jobs[0]).seconds
                    generate(pipe, jobs[0])
                taken.images = []
                for job in jobs:
                    busy = time.process_time()
                    taken.images.append(generate(pipe, job))
                    taken.busy.append(time.process_time() - busy)
                    taken.seconds.append(taken.images[-1].seconds)
                print(f"round {number + 1}, {name}: {statistics.median(taken.seconds):.3f} s", flush=True)
        print(handle, handle.skipping, sep="\n")
    return found


def row_of(name: str, found: dict[str, Taken]) -> Row:
    """Return the row of a way; its ratio is against torch.compile, in time of the clock."""
    taken, compiled = found[name], found[INDUCTOR]
    differences = [ours.difference(plain) for ours, plain in zip(taken.images, found[EAGER].images, strict=True)]
    worst = quality.worst(differences)
    busy, median = statistics.median(taken.busy), statistics.median(taken.seconds)
    quartiles = statistics.quantiles(taken.seconds, n=4)
    of_busy = statistics.median(compiled.busy) / busy
    return Row(
        workload="example, 28 steps",
        variant=name,
        mode="default",
        dtype="float32",
        shrunk=False,
        note=f"whole images of {JOBS} jobs of 128 x 128 that the recipe's search did not use",
        shapes={"pixels": [1, 3, 128, 128]},
        median_ms=median * 1e3,
        lower_quartile_ms=quartiles[0] * 1e3,
        upper_quartile_ms=quartiles[2] * 1e3,
        samples=len(taken.seconds),
        ratio=statistics.median(compiled.seconds) / median,
        first_call_s=taken.first,
        first_call_cold=False,
        peak_memory_bytes=None,
        relative_l2=statistics.median(difference.latent_l2 or 0.0 for difference in differences),
        disturbed=sum(taken.busy) < UNDISTURBED * sum(taken.seconds),
        psnr=None if worst.psnr == float("inf") else worst.psnr,
        ssim=worst.ssim,
        remark=f"{busy * 1e3:.0f} ms of the processor, torch.compile's divided by that: {of_busy:.2f}",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    where = device.default()
    found = measured(generation.load(generation.EXAMPLE, where), arguments.rounds)
    rows = [row_of(name, found) for name in found]
    for row in rows:
        print(f"{row.variant}: {row.median_ms:.0f} ms, {row.ratio:.2f}, PSNR {row.psnr}, {row.remark}")
    if arguments.json is not None:
        Results.now(rows, where).save(arguments.json)


if __name__ == "__main__":
    main()
