"""Measure what attention in 8 bits costs the example pipeline: the error of every layer, and the images.

    python benchmarks/attention_quality.py --json benchmarks/results/attention/example.json

On a CPU the definition of the provider computes, with the kernels' arithmetic. `layers` has the SQNR in dB of the worst head
of each layer over all steps of two images, against float64. `images` has the PSNR of eight images of 28 steps against those of
the unquantized pipeline.
"""

from __future__ import annotations

import argparse
import collections
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tritium import CompilationConfig, Plan, Quantize, load_example, optimize
from tritium.example import PROMPTS
from tritium.layers.attention.diffusers import AttentionHandle, change_layers
from tritium.layers.attention.forward import attention_forward
from tritium.ops import catalog
from tritium.ops.attention.rounded import rounded_attention
from tritium.pipelines.generation import Job, generate

sys.path.insert(0, str(Path(__file__).parent.parent / "training"))
import score

STEPS = 28
JOBS = tuple(
    Job(prompt=prompt, steps=STEPS, seed=seed, extra={"max_sequence_length": 512})
    for seed, prompt in enumerate((*PROMPTS, *score.unseen(4)[1]))
)
CONFIGS = {
    "int8 attention": Quantize(None, attention="int8"),
    "fp8 linears": Quantize("fp8"),
    "fp8 linears, int8 attention": Quantize("fp8", attention="int8"),
    "int8 linears, int8 attention": Quantize("int8", attention="int8"),
}


def layers(pipe: Any) -> dict[str, list[float]]:
    """Return the SQNR of the worst head of each layer, over all steps, by format."""
    calls: list[int] = [0]
    worst: dict[str, dict[int, float]] = collections.defaultdict(dict)
    count = len(pipe.transformer.attn_processors)

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any, **named: Any) -> torch.Tensor:
        q, k, v = (side.transpose(1, 2) for side in (query, key, value))
        scale, layer = q.shape[-1] ** -0.5, calls[0] % count
        calls[0] += 1
        exact = torch.softmax(q.double() @ k.double().mT * scale, -1) @ v.double()
        for name, rotate in (("int8", None), ("int8, not rotated", 0)):
            error = rounded_attention(q, k, v, scale, rotate=rotate).double() - exact
            ratio = exact.square().sum((0, 2, 3)) / error.square().sum((0, 2, 3))
            found = float(10 * torch.log10(ratio.min()))
            worst[name][layer] = min(found, worst[name].get(layer, found))
        return attention_forward(query, key, value, *rest, **named)

    handle = AttentionHandle()
    change_layers(handle, pipe.transformer, "quality", attend)
    with handle:
        for job in JOBS[:2]:
            generate(pipe, job)
    return {name: [round(by_layer[layer], 1) for layer in sorted(by_layer)] for name, by_layer in worst.items()}


def images(pipe: Any) -> dict[str, dict[str, float]]:
    """Return the PSNR of eight images by config."""
    plain = [generate(pipe, job) for job in JOBS]
    found = {}
    for name, config in CONFIGS.items():
        # Without code generation: the operators are the same.
        plan = Plan(
            quantize=config, config=CompilationConfig(engine="eager"), progress=False, components={"vae": "eager"}
        )
        with optimize(pipe, plan):
            psnr = [generate(pipe, job).difference(other).psnr for job, other in zip(JOBS, plain, strict=True)]
        found[name] = {"median": round(statistics.median(psnr), 1), "lowest": round(min(psnr), 1)}
        print(name, found[name], file=sys.stderr, flush=True)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="the file to write")
    parsed = parser.parse_args(arguments)
    catalog()
    pipe = load_example()
    pipe.set_progress_bar_config(disable=True)
    result = {"steps": STEPS, "layers": layers(pipe)}
    print(result["layers"], file=sys.stderr, flush=True)
    result["images"] = images(pipe)
    text = json.dumps(result, indent=2)
    print(text)
    if parsed.json is not None:
        parsed.json.write_text(text + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
