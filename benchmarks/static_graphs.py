"""Check static graphs on the example pipeline: no compilation after a warm-up, and bit-equal results.

    python benchmarks/static_graphs.py shapes --json results.json
    python benchmarks/static_graphs.py guidance --json results.json

    shapes    the transformer with few blocks, in 12 sizes and 2 batch sizes in random order, 500 calls: no recompile,
              results equal to the same compiled model without graphs, inputs unchanged, memory constant
    guidance  an image by the stock pipeline in 28 steps, each of which calls the transformer with and without the
              prompt and keeps the first result during the second call: latents and pixels equal to those without
              graphs

On a CPU, graphs are emulated and no code is generated (unless with `--engine inductor`), which runs the same checks
but no timing. `shapes` compiles for any size and captures each; `--apart` also compiles each separately. The exit
code is 1 if a check fails.
"""

from __future__ import annotations

import argparse
import datetime
import json
import random
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import tritium
from tritium import Backend, CompilationConfig, Plan, Shapes, compat, device, measure
from tritium.bench import generation, results
from tritium.pipelines.generation import MULTIPLE, Job, generate

# Each size has another number of tokens: a rotated image has the same shape for a transformer of tokens.
SIZES = [
    *((96, width) for width in (96, 128, 160, 192)),
    *((128, width) for width in (128, 160, 192)),
    *((160, width) for width in (160, 192)),
    *((192, width) for width in (192, 256)),
    (256, 256),
]
BATCH = (1, 2)
CALLS = 500
TEXT_TOKENS = 16
# Inputs of each shape that calls choose from: a replay that reads the inputs of the last call gives another result.
DRAWS = 3

STEPS = 28
GUIDED = {"negative_prompt": "", "true_cfg_scale": 4.0, "max_sequence_length": TEXT_TOKENS}

Inputs = dict[str, torch.Tensor]


def shapes(
    where: str, engine: str, *, calls: int = CALLS, sizes: list[tuple[int, int]] = SIZES, apart: bool = False
) -> dict[str, Any]:
    """Call the model with many shapes in random order; return the measurements and the checks."""
    dtype = torch.bfloat16 if where == "cuda" else torch.float32
    model = tritium.load_example(where, dtype).transformer.requires_grad_(False)
    # Keep one block of each kind: blocks are traced one by one, so more of them add no shapes.
    del model.transformer_blocks[1:], model.single_transformer_blocks[1:]
    given = {
        (size, batch): [drawn(model, size, batch, seed) for seed in range(DRAWS)] for size in sizes for batch in BATCH
    }
    kept = {key: [{name: t.clone() for name, t in one.items()} for one in some] for key, some in given.items()}
    dynamic = not apart
    plain, captured = (
        torch.compile(model, backend=Backend(config_of(where, engine, graphs)), dynamic=dynamic)
        for graphs in ("off", "with_compile")
    )
    order = random.Random(0)
    with torch.inference_mode(), compat.cached_code.recompile_limit(4096):
        start = time.perf_counter()
        expected = {key: [result(plain, one).clone() for one in some] for key, some in given.items()}
        for some in given.values():
            for one in some:
                result(captured, one)
        device.synchronize(where)
        warm_up_s = time.perf_counter() - start
        graphs, memory = compat.dynamo.graphs_compiled(), allocated(where)
        differing = 0
        with measure.gpu_lock(where):
            start = time.perf_counter()
            for _ in range(calls):
                key, draw = order.choice(list(given)), order.randrange(DRAWS)
                differing += not torch.equal(result(captured, given[key][draw]), expected[key][draw])
            calls_s = time.perf_counter() - start
        memory_after = allocated(where)
    rows = tritium.explain(captured).captures
    found = {
        "shapes": len(given),
        "calls": calls,
        "recompiles": compat.dynamo.graphs_compiled() - graphs,
        "differing_results": differing,
        "changed_inputs": sum(
            not torch.equal(one[name], was[name])
            for key, some in given.items()
            for one, was in zip(some, kept[key], strict=True)
            for name in one
        ),
        # None on a CPU, where torch does not count memory.
        "allocated_bytes_before": memory,
        "allocated_bytes_after": memory_after,
        "captures": sum(row["declined"] is None for row in rows),
        "declined": sorted({row["declined"] for row in rows if row["declined"] is not None}),
        "capture_bytes": sum(row["bytes"] for row in rows),
        "replays": sum(row["hits"] for row in rows),
        "warm_up_s": round(warm_up_s, 2),
        # Including the comparison of results, which waits for the device.
        "calls_s": round(calls_s, 2),
    }
    promises = {
        "no recompile": found["recompiles"] == 0,
        "results bit-equal to uncaptured": differing == 0,
        "inputs unchanged": found["changed_inputs"] == 0,
        **({"memory flat": memory == memory_after} if memory is not None else {}),
        "every shape captured": found["captures"] == len(given) and not found["declined"],
    }
    return {**found, "promises": promises}


def config_of(where: str, engine: str, graphs: str) -> CompilationConfig:
    """Return a configuration whose code is the same with and without captures.

    Providers are pinned: without captures the host's time counts too, so others may be chosen, which round differently.
    """
    return CompilationConfig(graphs=graphs, engine=engine, force_provider="triton" if where == "cuda" else None)


def drawn(model: Any, size: tuple[int, int], batch: int, seed: int) -> Inputs:
    """Return the arguments of a transformer call as the pipeline passes them for an image of this size."""
    generator = torch.Generator().manual_seed(seed)
    height, width = (side // MULTIPLE for side in size)
    config, where, dtype = model.config, model.device, model.dtype

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(where, dtype)

    places = torch.zeros(height, width, 3)
    places[..., 1] += torch.arange(height)[:, None]
    places[..., 2] += torch.arange(width)[None, :]
    return {
        "hidden_states": normal(batch, height * width, config.in_channels),
        "encoder_hidden_states": normal(batch, TEXT_TOKENS, config.joint_attention_dim),
        "pooled_projections": normal(batch, config.pooled_projection_dim),
        "timestep": torch.rand(batch, generator=generator).to(where, dtype),
        "img_ids": places.reshape(-1, 3).to(where, dtype),
        "txt_ids": torch.zeros(TEXT_TOKENS, 3, device=where, dtype=dtype),
    }


def result(model: Any, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    sample: torch.Tensor = model(**inputs, return_dict=False)[0]
    return sample


def allocated(where: str) -> int | None:
    if where != "cuda":
        return None
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


def guidance(where: str, engine: str, *, steps: int = STEPS, side: int = 128) -> dict[str, Any]:
    """Generate one image with guidance in two calls per step, with and without graphs."""
    dtype = torch.bfloat16 if where == "cuda" else torch.float32
    pipe = generation.load(generation.EXAMPLE, where, dtype)
    job = Job(prompt=tritium.example.PROMPTS[0], width=side, height=side, steps=steps, extra=GUIDED)
    promised = Shapes(sizes=[(side, side)], text_tokens=[TEXT_TOKENS], on_violation="error")
    found: dict[str, Any] = {"steps": steps, "size": [side, side]}
    pictures = {}
    for graphs in ("off", "with_compile"):
        plan = Plan(config=config_of(where, engine, graphs), shapes=promised, progress=False)
        with tritium.optimize(pipe, plan) as handle:
            start = time.perf_counter()
            handle.warmup(**GUIDED)
            warm_up_s = time.perf_counter() - start
            compiled = compat.dynamo.graphs_compiled()
            pictures[graphs] = generate(pipe, job)
            rows = handle.report.captures
            found[graphs] = {
                "warm_up_s": round(warm_up_s, 2),
                "picture_s": round(pictures[graphs].seconds, 3),
                "recompiles": compat.dynamo.graphs_compiled() - compiled,
                "captures": sum(row["declined"] is None for row in rows),
                "replays": sum(row["hits"] for row in rows),
                "declined": sorted({row["declined"] for row in rows if row["declined"] is not None}),
            }
    uncaptured, captured = pictures["off"], pictures["with_compile"]
    promises = {
        "no recompile": all(found[graphs]["recompiles"] == 0 for graphs in pictures),
        "latents bit-equal to uncaptured": torch.equal(uncaptured.latents, captured.latents),
        "pixels bit-equal to uncaptured": torch.equal(uncaptured.pixels, captured.pixels),
        # Two calls per step, of at least one block.
        "replayed": found["with_compile"]["replays"] >= 2 * steps,
    }
    return {**found, "promises": promises}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("mode", choices=("shapes", "guidance"))
    parser.add_argument("--json", type=Path, help="write what was found there")
    parser.add_argument("--device", choices=("cpu", "cuda"), default=device.default())
    parser.add_argument("--engine", choices=("inductor", "eager"), help="eager on a CPU if left out")
    parser.add_argument("--calls", type=int, default=CALLS, help="of mode shapes")
    parser.add_argument("--steps", type=int, default=STEPS, help="of mode guidance")
    parser.add_argument("--apart", action="store_true", help="compile each shape on its own, which takes minutes")
    options = parser.parse_args(arguments)
    engine = options.engine or ("inductor" if options.device == "cuda" else "eager")
    start = time.perf_counter()
    if options.mode == "shapes":
        found = shapes(options.device, engine, calls=options.calls, apart=options.apart)
    else:
        found = guidance(options.device, engine, steps=options.steps)
    seconds = time.perf_counter() - start
    for name, holds in found["promises"].items():
        print(f"{'holds ' if holds else 'BROKEN'}  {name}")
    print(f"{options.mode}: {seconds:.0f} s; " + ", ".join(f"{k} {v}" for k, v in found.items() if k != "promises"))
    if options.json is not None:
        about = {
            "mode": options.mode,
            "engine": engine,
            "device": device.describe(options.device).to_dict(),
            "versions": compat.versions.versions(),
            "commit": results.commit(),
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "seconds": round(seconds, 1),
        }
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({**about, **found}, indent=2) + "\n", encoding="utf-8")
    return 0 if all(found["promises"].values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
