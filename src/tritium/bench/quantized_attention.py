"""Attention in 8 bits against cuDNN in bfloat16, with the time to store q, k and v in 8 bits, and its parts alone.

The remark of a row is its error in the worst head, as SQNR in dB: for normal inputs, and for keys and queries with outlier
channels. Both are those of the last queries against float64.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from tritium import ops
from tritium.bench.quantized_kernels import Case, Maker
from tritium.bench.settings import Settings
from tritium.ops import attention, op
from tritium.ops.attention import eight_bits, trial
from tritium.ops.attention.reference import Sizes, arguments
from tritium.ops.quantize_rows import FP8, INT8

REFERENCE = "bf16 cuDNN"

# Batch, heads, tokens and width of FLUX's attention at 1024 px, and of Wan's at 81 frames of 480p.
SHAPES = {"flux": (1, 24, 4608, 128), "wan": (1, 40, 32_760, 128)}

# Calls in a captured graph: one of Wan's takes 40 ms.
CALLS = {"flux": 10, "wan": 1}

# Options of the kernel: BLOCK, STEP, TMA, VALUES8, warps, stages.
CANDIDATES = (
    (128, 128, False, True, 8, 2),
    (128, 128, False, True, 8, 3),
    (128, 64, False, True, 8, 3),
    (64, 128, False, True, 4, 2),
    (64, 64, False, True, 4, 3),
    (128, 128, True, True, 8, 3),
    (64, 64, True, True, 4, 3),
    (64, 128, True, True, 4, 2),
    (128, 128, False, False, 8, 2),
)


def options_of(candidate: tuple[Any, ...]) -> dict[str, Any]:
    """Return the kernel's options for a candidate; `ROUNDED` is True."""
    names = ("BLOCK", "STEP", "TMA", "VALUES8", "num_warps", "num_stages")
    return {"ROUNDED": True, **dict(zip(names, candidate, strict=True))}


def words_of(candidate: tuple[Any, ...]) -> str:
    block, step, tma, values8, warps, stages = candidate
    how = f"{block}x{step}, {warps} warps, {stages} stages{', descriptors' if tma else ''}"
    return how + ("" if values8 else ", values in 16 bits")


def cases(*, small: bool) -> list[Maker]:
    """Return both shapes, and the parts of each alone; small ones for a CPU."""
    shapes = dict.fromkeys(SHAPES, (1, 2, 200, 64)) if small else SHAPES
    whole = [functools.partial(_whole_case, name, shape) for name, shape in shapes.items()]
    return [*whole, *(functools.partial(_parts_case, name, shape) for name, shape in shapes.items())]


def _given(shape: tuple[int, ...], settings: Settings, seed: int = 0) -> op.Arguments:
    batch, heads, tokens, width = shape
    draw = op.draw_from(settings.dtype, settings.device_type)
    # Other values for every seed.
    for _ in range(seed):
        draw(1)
    made = arguments(draw, Sizes(batch, heads, heads, tokens, tokens, width, width))
    return attention.OP.bind(**made)


def _provider(name: str) -> Callable[..., torch.Tensor]:
    chosen = ops.providers(attention.OP)[name]

    def run(*values: Any) -> torch.Tensor:
        given = attention.OP.bind(*values)
        if (reason := chosen.decline(given)) is not None:
            raise ValueError(reason)
        return chosen.run(given)  # type: ignore[return-value]

    return run


def _candidate(dtype: torch.dtype, candidate: tuple[Any, ...], **changes: Any) -> Callable[..., torch.Tensor]:
    def run(*values: Any) -> torch.Tensor:
        given = attention.OP.bind(*values)
        if not given.q.is_cuda:
            raise ValueError("kernels run on a GPU")
        return eight_bits.run_triton(given, dtype, {**options_of(candidate), **changes})

    return run


def _whole_case(name: str, shape: tuple[int, ...], settings: Settings) -> Case:
    seeds = iter(range(100))
    variants: dict[str, Callable[..., Any]] = {
        REFERENCE: _provider("cudnn" if settings.device_type == "cuda" else "sdpa")
    }
    variants["int8"] = _provider("int8")
    variants["fp8"] = _provider("fp8")
    variants["cudnn8"] = _provider("cudnn8")
    for candidate in CANDIDATES[1:]:
        variants[f"int8, {words_of(candidate)}"] = _candidate(INT8, candidate)
    variants["int8, total of exact weights"] = _candidate(INT8, CANDIDATES[0], ROUNDED=False)
    variants[f"fp8, {words_of(CANDIDATES[5])}"] = _candidate(FP8, CANDIDATES[5])
    return Case(
        f"attention {name}",
        variants,
        lambda: tuple(vars(_given(shape, settings, next(seeds))).values()),
        f"{shape[2]} tokens, {shape[1]} heads of {shape[3]}, storing in 8 bits included",
        reference=REFERENCE,
        truth=lambda *values: _exact(attention.OP.bind(*values)),
        read=lambda out: out[:, :, _rows(out)],
        judge=_judge(shape, settings),
        calls=CALLS[name],
    )


def _rows(side: torch.Tensor) -> slice:
    return slice(max(0, side.shape[2] - trial.CHECKED), None)


def _exact(given: op.Arguments) -> torch.Tensor:
    return trial.exact_rows(given, _rows(given.q))[0]


def _judge(shape: tuple[int, ...], settings: Settings) -> Callable[[Callable[..., Any]], str]:
    """Return a function that gives the SQNR of a variant's worst head for two kinds of inputs."""
    normal = _given(shape, settings)
    create = trial.with_outliers(normal)
    assert create is not None
    inputs: Mapping[str, op.Arguments] = {"normal": normal, "outliers": attention.OP.bind(**create())}
    truths = {kind: _exact(given) for kind, given in inputs.items()}

    def judge(run: Callable[..., Any]) -> str:
        found = []
        for kind, given in inputs.items():
            out, truth = run(*vars(given).values()), truths[kind]
            error = (out[:, :, _rows(out)].double() - truth).square().sum((0, 2, 3))
            worst = float((truth.square().sum((0, 2, 3)) / error).min())
            found.append(f"{kind} {10 * math.log10(worst):.1f} dB")
        return "worst head: " + ", ".join(found)

    return judge


def _parts_case(name: str, shape: tuple[int, ...], settings: Settings) -> Case:
    """Storing q, k and v alone, and the mean of the keys alone."""
    one = torch.ones(1, device=settings.device_type)

    def mean(*values: Any) -> torch.Tensor:
        values[1].mean(2, dtype=torch.float32)
        return one

    def stored(*values: Any) -> torch.Tensor:
        q, k, v = values[:3]
        if not q.is_cuda:
            raise ValueError("kernels run on a GPU")
        eight_bits.stored(q, None, INT8, per_row=True)
        eight_bits.stored(k, k.mean(2, dtype=torch.float32), INT8)
        eight_bits.stored(v, None, FP8, rotates=False, transposed=True)
        return one

    return Case(
        f"attention {name}, parts",
        {"mean of the keys": mean, "mean, and storing in int8": stored},
        lambda: tuple(vars(_given(shape, settings)).values()),
        f"{shape[2]} tokens, {shape[1]} heads of {shape[3]}",
        reference="mean of the keys",
    )
