"""Call a pipeline once for every bucket of its shapes, so that no later call compiles."""

from __future__ import annotations

import contextlib
import inspect
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from tritium import compat
from tritium.errors import PipelineError, ShapeError
from tritium.pipelines.part import Part
from tritium.pipelines.progress import Progress
from tritium.pipelines.shapes import Bucket, Shapes
from tritium.pipelines.skipping import Skipping
from tritium.report.ledger import LEDGER

# Two steps: the first one compiles, the second runs compiled code while the results of the first are alive.
STEPS = 2

PROMPT = "a"


def warm_up(
    pipe: Any, shapes: Shapes, parts: Sequence[Part], progress: Progress, call: Mapping[str, Any]
) -> dict[str, float]:
    """Return seconds by bucket; raise a `ShapeError` at Dynamo's recompile limit."""
    buckets = shapes.buckets
    seconds: dict[str, float] = {}
    limits = len(LEDGER.limits())
    with (
        Skipping(lambda: parts).paused(),
        _learning(parts),
        _quiet(pipe),
        progress.over("warming up", len(buckets)) as next_one,
    ):
        for bucket in buckets:
            arguments = {**arguments_of(pipe, bucket, _steps(parts)), **call}
            next_one(str(bucket))
            start = time.perf_counter()
            pipe(**arguments)
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
            seconds[str(bucket)] = time.perf_counter() - start
            reached = LEDGER.limits()[limits:]
            if reached:
                raise ShapeError(
                    f"{reached[0].function} reached Dynamo's {reached[0].limit} ({reached[0].value}) while {bucket} was warmed "
                    f"up, so some of its calls would run eagerly; last: {reached[0].reason}"
                )
    progress.tell(f"warmed up {len(buckets)} buckets in {sum(seconds.values()):.1f} s")
    return seconds


def _steps(parts: Sequence[Part]) -> int:
    """Return the number of steps after which the calls of every part behave alike."""
    return max([STEPS, *(part.calls_to_settle for part in parts)])


def arguments_of(pipe: Any, bucket: Bucket, steps: int = STEPS) -> dict[str, Any]:
    """Return the pipeline's arguments for a bucket; raise a `PipelineError` if it has no such argument."""
    known = inspect.signature(type(pipe).__call__).parameters
    asked: dict[str, Any] = {"height": bucket.height, "width": bucket.width}
    if bucket.text_tokens is not None:
        asked["max_sequence_length"] = bucket.text_tokens
    count = next((name for name in ("num_images_per_prompt", "num_videos_per_prompt") if name in known), None)
    if count is not None:
        asked[count] = bucket.batch
    elif bucket.batch > 1:
        asked["num_images_per_prompt"] = bucket.batch
    for name in asked:
        if name not in known:
            raise PipelineError(
                f"{type(pipe).__name__} takes no {name!r}, so Shapes cannot be promised of it ({bucket}); call it yourself "
                "for each shape instead of warmup()"
            )
    generator = torch.Generator().manual_seed(0)
    rest = {"prompt": PROMPT, "num_inference_steps": steps, "output_type": "pt", "generator": generator}
    return {**{name: value for name, value in rest.items() if name in known}, **asked}


@contextlib.contextmanager
def _learning(parts: Sequence[Part]) -> Iterator[None]:
    contracts = [part.contract for part in parts if part.contract is not None]
    before = [contract.learning for contract in contracts]
    for contract in contracts:
        contract.learning = True
    try:
        yield
    except BaseException:
        for contract, was in zip(contracts, before, strict=True):
            contract.learning = was
        raise
    for contract in contracts:
        contract.learning = False


@contextlib.contextmanager
def _quiet(pipe: Any) -> Iterator[None]:
    """Hide the pipeline's progress bar during warm-up."""
    own = getattr(pipe, compat.modules.PROGRESS_BAR, None)
    silence = getattr(pipe, "set_progress_bar_config", None)
    if silence is not None:
        silence(**{**(own or {}), "disable": True})
    try:
        yield
    finally:
        if own is not None:
            setattr(pipe, compat.modules.PROGRESS_BAR, own)
        elif hasattr(pipe, compat.modules.PROGRESS_BAR):
            delattr(pipe, compat.modules.PROGRESS_BAR)
