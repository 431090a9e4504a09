"""Find the first compiled module whose result exceeds the fidelity bound, and the site in it that is at fault.

Every module that Tritium compiled runs alone, on the arguments of an eager image: eagerly, compiled, and in float64. Modules are not
bisected: later blocks amplify or hide the error of an earlier one, and equal blocks share one compilation. Inside the module at fault
every probe is a compilation, so there bisection pays: see `bisect`.

Errors that no module shows alone, such as a result that a later call overwrites, or rounding that adds up, are searched by
bisection over images with the first n modules compiled.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tritium import compat, fidelity
from tritium.api import Handle
from tritium.bench.bisect import Call, Fault, bisect, copied, find_fault
from tritium.bench.settings import Notify
from tritium.pipelines.generation import Job, generate
from tritium.pipelines.part import Part
from tritium.pipelines.parts import Block
from tritium.techniques.choice import Choice

_EAGER = Choice(how="eager")


@dataclass(frozen=True, kw_only=True)
class Checked:
    """A compiled module and its error, in units of the bound: above 1 it is outside."""

    name: str
    kind: str
    # None if it returns no tensor.
    excess: float | None

    @property
    def size(self) -> float:
        return self.excess or 0.0

    def __str__(self) -> str:
        if self.excess is None:
            return f"{self.name} ({self.kind}): returns nothing that can be compared"
        times = f"{self.excess:.2g}" if self.excess < 10 else f"{self.excess:.0f}"
        size = f"error {times} x the bound" if math.isfinite(self.excess) else "no numbers, or another shape or dtype"
        return f"{self.name} ({self.kind}): {size}"

    def to_dict(self) -> dict[str, Any]:
        # JSON has no infinity.
        return {**self.__dict__, "excess": self.excess if math.isfinite(self.size) else None, "outside": self.size > 1}


@dataclass(frozen=True, kw_only=True)
class Location:
    """The result of a search. `first` and `fault` are None if every module is inside the bound."""

    # In call order.
    checked: tuple[Checked, ...]
    first: Checked | None = None
    fault: Fault | None = None
    # The result of the search over images, if no module alone is at fault.
    images: str | None = None

    @property
    def outside(self) -> list[Checked]:
        return [entry for entry in self.checked if entry.size > 1]

    def __str__(self) -> str:
        if not self.checked:
            return "nothing to locate: no part of the pipeline is compiled"
        if self.first is None:
            largest = max(self.checked, key=lambda entry: entry.size)
            text = f"all {len(self.checked)} compiled modules are inside the bound; the largest is {largest}"
            return f"{text}\n{self.images}" if self.images else text
        text = f"{self.first}; {self.fault}"
        others = self.outside[1:]
        if others:
            worst = max(others, key=lambda entry: entry.size)
            text += (
                f"\n{len(others)} of the {len(self.checked) - 1} other modules are outside too; the worst is {worst}"
            )
        return text

    def to_dict(self) -> dict[str, Any]:
        return {
            "first": None if self.first is None else self.first.to_dict(),
            "fault": None if self.fault is None else dataclasses.asdict(self.fault),
            "images": self.images,
            "modules": [entry.to_dict() for entry in self.checked],
            "in_words": str(self),
        }


@dataclass(frozen=True)
class _Kept:
    """The first call of a block while an eager image is generated."""

    part: Part
    block: Block
    choice: Choice
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def name(self) -> str:
        return ".".join(piece for piece in (self.part.name, self.block.path) if piece)

    @property
    def kind(self) -> str:
        return type(self.block.module).__name__


def locate(handle: Handle, job: Job, notify: Notify, is_past: Callable[[], bool] | None = None) -> Location:
    """Search the compiled modules of a handle, on the calls of a job.

    `is_past` generates an image with the pipeline in its present state and returns True if it exceeds the thresholds. With it,
    the search also covers images whose error no module explains alone.
    """
    choices = handle.choices
    try:
        notify("the calls of an eager image", 0.0)
        kept = _first_calls(handle, job)
        checked = tuple(_check(kept, notify))
        place = next((place for place, entry in enumerate(checked) if entry.size > 1), None)
        if place is not None:
            notify(f"{checked[place].name}: which site", 0.7)
            return Location(checked=checked, first=checked[place], fault=_fault(kept[place], handle))
        if not kept or is_past is None:
            return Location(checked=checked)
        notify("every module is inside the bound: which of them changes the image", 0.7)
        return Location(checked=checked, images=_by_images(kept, is_past))
    finally:
        for name, choice in choices.items():
            handle.part(name).use(choice)


def _first_calls(handle: Handle, job: Job) -> list[_Kept]:
    """Record the first call of every compiled block, in call order; leave every part eager."""
    kept: list[_Kept] = []
    with contextlib.ExitStack() as hooks:
        for name, choice in handle.choices.items():
            part = handle.part(name)
            part.use(_EAGER)
            for block in part.spec.blocks if choice.how != "eager" else ():
                keep = functools.partial(_keep, kept, part, block, choice)
                hooks.callback(block.module.register_forward_pre_hook(keep, with_kwargs=True).remove)
        generate(handle.pipe, job)
    return kept


def _keep(
    kept: list[_Kept],
    part: Part,
    block: Block,
    choice: Choice,
    _module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    if all(known.block.module is not block.module for known in kept):
        # The pipeline continues with these tensors, and may write into them.
        kept.append(_Kept(part, block, choice, *copied((args, kwargs))))


def _check(kept: Sequence[_Kept], notify: Notify) -> Iterator[Checked]:
    """Check every module alone."""
    for place, entry in enumerate(kept):
        notify(f"{entry.name}: compiled, eager and in float64", 0.1 + 0.6 * place / len(kept))
        call, part = _call(entry), entry.part
        # Block by block, also where the part is one program.
        with part.using(entry.choice, among={call.module}):
            # A call of the entry would be counted and timed: call the implementation behind it.
            excess = call.excess(part.run if call.module is part.module else call.module)
        yield Checked(name=entry.name, kind=entry.kind, excess=excess)


def _call(entry: _Kept) -> Call:
    module = entry.block.module
    args, kwargs = copied((entry.args, entry.kwargs))
    with torch.no_grad():
        eager = compat.modules.eager_call(module)(*args, **kwargs)
    return Call(module, entry.args, entry.kwargs, eager, fidelity.in_float64(module, entry.args, entry.kwargs))


def _fault(entry: _Kept, handle: Handle) -> Fault:
    if entry.choice.how == "inductor":
        explanation = "the part runs under plain torch.compile, whose generated code is at fault"
        return Fault(part="torch.compile", explanation=explanation)
    call = _call(entry)
    # With the weight layout of the choice.
    with entry.part.using(entry.choice, among=()):
        return find_fault(call, handle.plan.config, handle.plan.dynamic)


def _by_images(kept: Sequence[_Kept], is_past: Callable[[], bool]) -> str:
    """Name the module with which an image exceeds the thresholds, when it joins the modules called before it."""

    def past_with(number: int) -> bool:
        modules = {entry.block.module for entry in kept[:number]}
        for entry in kept:
            entry.part.use(entry.choice if number else _EAGER, among=modules)
        return is_past()

    if past_with(0):
        return (
            "two eager images differ past the thresholds: the pipeline itself does not repeat, and cannot be verified"
        )
    if past_with(len(kept)):
        last = kept[bisect(len(kept), past_with)]
        return (
            f"images go past the thresholds when {last.name} ({last.kind}) is compiled besides what is called before it: "
            "rounding that adds up to more than the thresholds allow, or something that one call leaves to the next"
        )
    for entry in kept:
        entry.part.use(entry.choice)
    if is_past():
        return "the image exceeds the thresholds only where a part is one program: no module of it alone is at fault"
    return "generated once more the image is inside the thresholds: the result changes from call to call"
