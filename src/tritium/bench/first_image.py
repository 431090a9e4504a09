"""Time the first image of a new process, with or without compile artifacts: `python -m tritium.bench.first_image`, JSON on stdin.

Seconds count from `optimize` to the image, which is how long a service waits after its model is loaded. Modules are
imported before, also those of the compiler: `tritium.api` imports them.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from pathlib import Path

import torch

from tritium.api import optimize
from tritium.bench import generation
from tritium.pipelines.generation import Job, generate
from tritium.pipelines.plan import Plan


def main() -> None:
    order = json.load(sys.stdin)
    pipe = generation.load(order["name"], order["device"], getattr(torch, order["dtype"]))
    # Artifacts that are refused would be measured as a cold start.
    warnings.simplefilter("error", RuntimeWarning)
    artifacts, save = (Path(order[what]) if what in order else None for what in ("artifacts", "save"))
    start = time.perf_counter()
    handle = optimize(pipe, Plan(progress=False), artifacts=artifacts)
    warnings.resetwarnings()
    generate(pipe, Job(**order["job"]))
    seconds = time.perf_counter() - start
    if save is not None:
        handle.save(save)
    sys.stdout.write(json.dumps({"seconds": seconds}) + "\n")


if __name__ == "__main__":
    main()
