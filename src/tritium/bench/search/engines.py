"""How the parts of a pipeline run without skipping: the fastest lossless ways, and lossy ones that are faster."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from tritium import compat
from tritium.api import Handle, optimize
from tritium.bench.bisect import copied
from tritium.bench.search.evaluation import Evaluator, Pace
from tritium.bench.search.recording import Observed, observing
from tritium.errors import PipelineError
from tritium.pipelines import hooks, trial
from tritium.pipelines.generation import Image, Job, generate
from tritium.pipelines.parts import DENOISERS, modules_of
from tritium.pipelines.plan import Plan
from tritium.techniques.choice import Choice

EAGER = Choice(how="eager")

# Calls of a part that are timed, at most: one of each job.
_TIMED_CALLS = 4


def references(
    pipe: Any, jobs: Sequence[Job], recorded: int, pace: Pace
) -> tuple[list[Image], list[Observed], dict[str, list[trial.Call]]]:
    """Return eager images, what denoisers did in them, and one call of every part in the first jobs."""
    modules = modules_of(pipe)
    denoisers = [modules[name] for name in DENOISERS if name in modules]
    calls: dict[str, list[trial.Call]] = {}
    images, observed = [], []
    with optimize(pipe, Plan(progress=False, components=dict.fromkeys(modules, "eager"))) as handle:
        for place, job in enumerate(jobs):
            pace.step("eager images", 1.0)
            for name in handle.choices:
                kept = calls.setdefault(name, [])
                handle.part(name).before_first = functools.partial(_keep, kept) if place < _TIMED_CALLS else None
            with ExitStack() as stack:
                scheduler = getattr(pipe, "scheduler", None)
                found = stack.enter_context(observing(denoisers, scheduler, keep=place < recorded))
                images.append(generate(pipe, job))
            observed.append(found)
    return images, observed, calls


def _keep(kept: list[trial.Call], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    # The pipeline continues with these tensors, and may write into them.
    kept.append(copied((args, kwargs)))


def lossless(
    evaluator: Evaluator, calls: dict[str, list[trial.Call]], seconds: float
) -> tuple[dict[str, Choice], dict[str, Any]]:
    """Return the fastest lossless choice of every part, and its figures."""
    handle, store = evaluator.handle, evaluator.store
    chosen: dict[str, Choice] = {}
    figures: dict[str, Any] = {}
    for name in handle.choices:
        part = handle.part(name)
        chosen[name] = EAGER
        if not calls.get(name) or not part.spec.blocks:
            continue
        try:
            hooks.check(part.spec)
        except PipelineError as error:
            figures[name] = {"milliseconds": {}, "why": f"left alone: {error}"}
            continue
        known = store.rows.get(f"part {name}")
        if known is None:
            evaluator.pace.step(f"{name}: {', '.join(map(str, trial.ways(part)))}", 2.0)
            # As in pipelines: tensors made in inference mode would compile every part again.
            with torch.no_grad():
                trial.decide(part, calls[name], seconds=seconds)
            known = {"choice": part.choice.to_dict(), "milliseconds": part.measured, "why": part.why}
            store.put(f"part {name}", known)
            part.use(EAGER)
        chosen[name] = Choice(**known["choice"])
        figures[name] = {"milliseconds": known["milliseconds"], "why": known["why"]}
    return chosen, figures


def lossy(
    evaluator: Evaluator,
    base: dict[str, Choice],
    calls: dict[str, list[trial.Call]],
    figures: dict[str, Any],
    seconds: float,
) -> Iterator[tuple[str, dict[str, Choice]]]:
    """Yield engines with a lossy technique in the denoisers, where it saves enough time."""
    handle, store = evaluator.handle, evaluator.store
    engines: dict[str, dict[str, Choice]] = {}
    for name in (name for name in handle.choices if name in DENOISERS and base[name].how == "tritium"):
        part = handle.part(name)
        variants = [
            base[name].with_(techniques=(*base[name].techniques, *choice.techniques))
            for choice in part.lossy_variants()
        ]
        if not variants:
            continue
        known = store.rows.get(f"lossy {name}")
        if known is None:
            evaluator.pace.step(f"{name}: {', '.join(map(str, variants))}", 2.0)
            with torch.no_grad():
                taken = trial.timed(part, [base[name], *variants], calls[name], seconds)
            known = {str(choice): milliseconds for choice, milliseconds in taken.items()}
            store.put(f"lossy {name}", known)
            part.use(EAGER)
        figures[name]["milliseconds"] |= known
        for choice in variants:
            if known[str(choice)] < known[str(base[name])] * (1 - trial.GAIN):
                engines.setdefault(str(choice), dict(base))[name] = choice
    yield from engines.items()


def plain_compile(handle: Handle, calls: dict[str, list[trial.Call]]) -> dict[str, Choice]:
    """Return `torch.compile` for every part that was called and can be compiled."""
    choices = {}
    for name in handle.choices:
        part = handle.part(name)
        is_encoder = name.startswith(("text_encoder", "image_encoder"))
        compiled = Choice(how="inductor")
        can = calls.get(name) and not is_encoder and compiled in trial.ways(part)
        choices[name] = compiled if can and _compiles(part) else EAGER
    return choices


def _compiles(part: Any) -> bool:
    try:
        hooks.check(part.spec)
    except PipelineError:
        return False
    return not compat.modules.is_wrapped(part.module)
