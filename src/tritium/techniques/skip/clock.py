"""Which image, step and branch a call belongs to, read from the scheduler without waiting for the device.

Nothing is wrapped or reset: `set_timesteps` assigns a new object, and a new object is a new image. So an image that was
aborted leaves nothing behind.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tritium import compat


@dataclass(frozen=True)
class Moment:
    """The place of a call: its image, step and branch."""

    # The same object for all calls of an image, and another one for every other image.
    image: Any
    step: int
    steps: int
    branch: int
    # The scheduler, or None if the user says where a call belongs.
    scheduler: Any


@dataclass(eq=False)
class _Seen:
    """The state of a scheduler at the last call of one image."""

    scheduler: Any
    # Held by reference, so that the address of a schedule is not used again.
    timesteps: Any
    index: int
    branch: int = -1
    # True if its calls cannot be told from those of another image that goes on at the same time.
    is_mixed: bool = False


class Counter:
    """An image whose steps are counted by calls, for schedulers that count none: `handle.skipping.image(steps)`."""

    def __init__(self, steps: int, calls: int) -> None:
        self.steps, self.calls = steps, calls
        self._made = 0

    def next(self) -> Moment | None:
        """Return the place of the next call, or None if there are more calls than were announced."""
        step, branch = divmod(self._made, self.calls)
        self._made += 1
        if step >= self.steps:
            return None
        return Moment(self, step, self.steps, branch, None)

    def back(self) -> None:
        self._made -= 1


class Clock:
    """Tells the place of each call of a part from the schedulers of its pipelines."""

    def __init__(self, schedulers: Callable[[], Sequence[Any]]) -> None:
        self._schedulers = schedulers
        self._seen: list[_Seen] = []
        self._last: _Seen | Counter | None = None
        self._threads: set[int] = set()
        self._is_unsure = False
        # The images that a call could not be told apart between, and the one of them that went on since.
        self._rivals: list[_Seen] = []
        self._winner: _Seen | None = None
        # Set while the user announces an image.
        self.counter: Counter | None = None

    def now(self) -> Moment | str:
        """Return the place of this call, or why it is unknown."""
        if self.counter is not None:
            self._last = self.counter
            moment = self.counter.next()
            return moment if moment is not None else "more calls than skipping.image() announced"
        self._last = None
        # By identity: two pipelines may have one scheduler.
        schedulers = list({id(scheduler): scheduler for scheduler in self._schedulers()}.values())
        found = [
            (scheduler, *place)
            for scheduler in schedulers
            if (place := compat.diffusers.moment_of(scheduler)) is not None
        ]
        if not found:
            return self._why_none(schedulers)
        if len(found) > 1 and self._is_shared_by_threads():
            return "several pipelines share the denoiser and call it from several threads"
        scheduler, timesteps, index = found[0]
        if len(found) > 1:
            moved = [entry for entry in found if self._has_moved(*entry)]
            current = self._seen[-1].scheduler if self._seen and not self._is_unsure else None
            moved = moved or [entry for entry in found if entry[0] is current]
            if len(moved) != 1:
                self._rival([self._note(*entry) for entry in moved])
                # Later calls of this step do not tell either.
                self._is_unsure = True
                return "several pipelines share the denoiser, and more than one of them has moved on"
            scheduler, timesteps, index = moved[0]
        return self._place(scheduler, timesteps, index, {id(entry[0]) for entry in found})

    def back(self) -> None:
        """Forget the last call: it failed, and may be made again."""
        if isinstance(self._last, Counter):
            self._last.back()
        elif self._last is not None:
            self._last.branch -= 1

    def _place(self, scheduler: Any, timesteps: Any, index: int, live: set[int]) -> Moment | str:
        reason = "its scheduler calls the denoiser twice a step" if compat.diffusers.is_two_stage(scheduler) else None
        steps = len(timesteps)
        if reason is not None or not 0 <= index < steps:
            return reason or "the scheduler is past its last step"
        seen = self._note(scheduler, timesteps, index)
        if seen in self._rivals:
            if self._winner not in (None, seen):
                # Both go on: their calls take turns.
                self._mix()
            self._winner = seen
        if seen.is_mixed:
            return "several pipelines share the denoiser, and their images take turns"
        seen.branch += 1
        # Keep what is known of schedulers that are in use; the one that called last is last.
        self._seen = [one for one in self._seen if one is not seen and id(one.scheduler) in live]
        self._seen.append(seen)
        self._last = seen
        self._is_unsure = False
        return Moment(seen, index, steps, seen.branch, scheduler)

    def _rival(self, images: list[_Seen]) -> None:
        """Record images that a call could belong to."""
        if sum(image in self._rivals for image in images) > 1:
            self._mix()
        self._rivals, self._winner = images, None

    def _mix(self) -> None:
        for image in self._rivals:
            image.is_mixed = True

    def _has_moved(self, scheduler: Any, timesteps: Any, index: int) -> bool:
        seen = self._find(scheduler)
        if index >= len(timesteps):
            # Its image is complete.
            return False
        return seen is None or seen.timesteps is not timesteps or seen.index != index

    def _find(self, scheduler: Any) -> _Seen | None:
        return next((seen for seen in self._seen if seen.scheduler is scheduler), None)

    def _note(self, scheduler: Any, timesteps: Any, index: int) -> _Seen:
        """Return the state of a scheduler, renewed if it is at another step or in another image than before."""
        seen = self._find(scheduler)
        if seen is None or seen.timesteps is not timesteps or seen.index not in (index, index - 1):
            fresh = _Seen(scheduler, timesteps, index)
            self._seen = [one for one in self._seen if one is not seen] + [fresh]
            return fresh
        if seen.index != index:
            seen.index, seen.branch = index, -1
        return seen

    def _is_shared_by_threads(self) -> bool:
        self._threads.add(threading.get_ident())
        return len(self._threads) > 1

    @staticmethod
    def _why_none(schedulers: Sequence[Any]) -> str:
        if not schedulers:
            return "there is no scheduler; announce images with `with handle.skipping.image(steps):`"
        name = type(schedulers[0]).__name__
        return f"{name} counts no steps; announce images with `with handle.skipping.image(steps):`"


class HostCopy:
    """A tensor on its way to the host. Reading it later does not wait for work that was started after it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        tensor = tensor.detach()
        self._event: Any = None
        if tensor.is_cuda:
            self._values = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._values.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        else:
            self._values = tensor.clone()

    def read(self) -> list[float]:
        if self._event is not None:
            self._event.synchronize()
            self._event = None
        return [float(value) for value in self._values.flatten().tolist()]
