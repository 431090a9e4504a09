"""Time HiDream's mixture of experts, alone and in its block: stock under torch.compile, and as grouped products.

    python benchmarks/experts.py --out benchmarks/results/h200-experts.json

The classes are diffusers' with random weights: 4 experts of 2560 x 6912, of which each of 4096 tokens takes 2, and a shared
one. All variants have the same weights and run interleaved. On a CPU the sizes shrink.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from diffusers.models.transformers import transformer_hidream_image as hidream
from torch import nn

from tritium import device
from tritium.bench import comparison
from tritium.bench.results import EAGER, INDUCTOR, OPTIMIZED, Results, Row
from tritium.bench.settings import Settings, silent
from tritium.bench.workload import Normals, shapes_of
from tritium.techniques.experts import mixture as mixtures

TOKENS, HEADS, WIDTH = 4096, 20, 128
SMALL_TOKENS, SMALL_HEADS = 64, 2
EXPERTS, CHOSEN = 4, 2

# Grouped products without the other techniques.
GROUPED = f"{INDUCTOR} grouped"


def cases(settings: Settings) -> Iterator[tuple[str, nn.Module, dict[str, Any]]]:
    """Yield the name, the module and the inputs of each case."""
    tokens, heads = (SMALL_TOKENS, SMALL_HEADS) if settings.small else (TOKENS, HEADS)
    dim = heads * WIDTH
    normal = Normals(settings.device_type, settings.dtype, source=settings.device_type)
    x = normal(1, tokens, dim)
    torch.manual_seed(0)
    with torch.device(settings.device_type):
        mixture = hidream.MOEFeedForwardSwiGLU(dim, 4 * dim, EXPERTS, CHOSEN, _force_inference_output=True)
        block = hidream.HiDreamImageSingleTransformerBlock(
            dim, heads, WIDTH, EXPERTS, CHOSEN, _force_inference_output=True
        )
        positions = hidream.HiDreamImageEmbedND(10000, (64, 32, 32))(torch.zeros(1, tokens, 3))
    named = {"hidden_states": x, "temb": normal(1, dim), "image_rotary_emb": positions}
    for name, module, inputs in (("mixture", mixture, {"x": x}), ("block", block, named)):
        yield f"hidream {name}", module.eval().to(settings.dtype).requires_grad_(False), inputs


def calls(model: nn.Module, inputs: Mapping[str, Any], settings: Settings) -> dict[str, tuple[Callable[[], Any], int]]:
    """Return the call of each variant, and after how many calls it has settled."""
    grouped, ours = comparison.twin(model), comparison.twin(model)
    for routed in mixtures.find(grouped):
        assert mixtures.group(routed) is None
    handle = comparison.optimized(ours, settings)
    return {
        EAGER: (functools.partial(model, **inputs), 1),
        INDUCTOR: (functools.partial(torch.compile(model), **inputs), 2),
        GROUPED: (functools.partial(torch.compile(grouped, fullgraph=True), **inputs), 2),
        OPTIMIZED: (functools.partial(ours, **inputs), handle.part("model").calls_to_settle + 1),
    }


def run(seconds: float, settings: Settings, only: str) -> list[Row]:
    rows: list[Row] = []
    for name, model, inputs in cases(settings):
        if only not in name:
            continue
        torch.compiler.reset()
        measured = comparison.Comparison(
            workload=name,
            settings=settings,
            notify=silent,
            note=f"{EXPERTS} experts, {CHOSEN} a token, width {inputs.get('x', inputs.get('hidden_states')).shape[-1]}",
            shapes=shapes_of(inputs),
            shrunk=settings.small,
        )
        for variant, (call, calls_to_settle) in calls(model, inputs, settings).items():
            added = measured.add(variant, call, settle=lambda call, n=calls_to_settle: [call() for _ in range(n)])
            added.fields["mode"] = None
        with torch.inference_mode():
            measured.finish(measured.result(EAGER), seconds=seconds)
            for variant in measured.variants.values():
                variant.fields["host_us"] = comparison.host_us(variant.call, settings.device_type)
        rows += measured.rows()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=float, default=4.0, help="timing of each case")
    parser.add_argument("--only", choices=("mixture", "block"), default="", help="one case alone")
    given = parser.parse_args()
    settings = Settings(seconds=given.seconds, device_type=device.default(), cold=False)
    rows = run(given.seconds, settings, given.only)
    for row in rows:
        ratio = f"{row.ratio:.2f}" if row.ratio is not None else "-"
        print(
            f"{row.workload:16} {row.variant:20} {row.median_ms:8.3f} ms  x{ratio}  host {row.host_us:6.0f} us  "
            f"L2 {row.relative_l2:.1e}  first call {row.first_call_s:.1f} s"
        )
    if given.out is not None:
        Results.now(rows, settings.device_type).save(given.out)


if __name__ == "__main__":
    main()
