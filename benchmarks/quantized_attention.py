"""Attention in 8 bits against cuDNN in bfloat16, with the time to store q, k and v in 8 bits.

The remark of a row is its error in the worst head, as SQNR in dB: for normal inputs, and for keys and queries with outlier
channels. Both are those of the last queries against float64.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from quantized_kernels import Case, Maker

from tritium import ops
from tritium.bench.settings import Settings
from tritium.ops import attention, op
from tritium.ops.attention import trial
from tritium.ops.attention.reference import Sizes, arguments

REFERENCE = "bf16 cuDNN"

# Batch, heads, tokens and width: FLUX and Qwen-Image at 1024 px, Wan at 81 frames of 480p, and fewer of its tokens.
SHAPES = {
    "flux": (1, 24, 4608, 128),
    "qwen-image": (1, 24, 4352, 128),
    "wan": (1, 40, 32_760, 128),
    "wan, a quarter": (1, 40, 8190, 128),
    "wan, a half": (1, 40, 16_384, 128),
}

# Calls in a captured graph: one of Wan's takes 40 ms.
CALLS = {"wan": 1, "wan, a quarter": 2, "wan, a half": 1}
USUAL_CALLS = 10


def cases(*, small: bool) -> list[Maker]:
    """Return a case of each shape; small ones for a CPU."""
    return [functools.partial(_case, name, (1, 2, 200, 64) if small else shape) for name, shape in SHAPES.items()]


def _case(name: str, shape: tuple[int, ...], settings: Settings) -> Case:
    seeds = iter(range(100))
    return Case(
        f"attention {name}",
        {REFERENCE: _provider("cudnn" if settings.device_type == "cuda" else "sdpa"), "int8": _provider("int8")},
        lambda: tuple(vars(_given(shape, settings, next(seeds))).values()),
        f"{shape[2]} tokens, {shape[1]} heads of {shape[3]}, storing in 8 bits included",
        reference=REFERENCE,
        truth=lambda *values: _exact(attention.OP.bind(*values)),
        read=lambda out: out[:, :, _rows(out)],
        judge=_judge(shape, settings),
        calls=CALLS.get(name, USUAL_CALLS),
    )


def _given(shape: tuple[int, ...], settings: Settings, seed: int = 0) -> op.Arguments:
    batch, heads, tokens, width = shape
    draw = op.draw_from(settings.dtype, settings.device_type)
    # Other values for every seed.
    for _ in range(seed):
        draw(1)
    drawn = arguments(draw, Sizes(batch, heads, heads, tokens, tokens, width, width))
    return attention.OP.bind(**drawn)


def _provider(name: str) -> Callable[..., torch.Tensor]:
    provider = ops.providers(attention.OP)[name]

    def run(*values: Any) -> torch.Tensor:
        given = attention.OP.bind(*values)
        if (reason := provider.decline(given)) is not None:
            raise ValueError(reason)
        return provider.run(given)  # type: ignore[return-value]

    return run


def _rows(side: torch.Tensor) -> slice:
    return slice(max(0, side.shape[2] - trial.CHECKED), None)


def _exact(given: op.Arguments) -> torch.Tensor:
    return trial.exact_rows(given, _rows(given.q))[0]


def _judge(shape: tuple[int, ...], settings: Settings) -> Callable[[Callable[..., Any]], str]:
    """Return a function that gives the SQNR of a variant's worst head for two kinds of inputs."""
    normal = _given(shape, settings)
    create = trial.with_outliers(normal)
    assert create is not None
    inputs = {"normal": normal, "outliers": attention.OP.bind(**create())}
    truths = {kind: _exact(given) for kind, given in inputs.items()}

    def judge(run: Callable[..., Any]) -> str:
        ratios = []
        for kind, given in inputs.items():
            out, truth = run(*vars(given).values()), truths[kind]
            error = (out[:, :, _rows(out)].double() - truth).square().sum((0, 2, 3))
            worst = float((truth.square().sum((0, 2, 3)) / error).min())
            ratios.append(f"{kind} {10 * math.log10(worst):.1f} dB")
        return "worst head: " + ", ".join(ratios)

    return judge
