"""The steps of a running batch: events, previews and cancellations, from the pipeline's callback."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from tritium.serve import images
from tritium.serve.calls import Caller
from tritium.serve.engine import Cancelled, Emit, IsCancelled, Job, Preview, Step
from tritium.serve.previews import Previewer, clean


class AllCancelled(Exception):
    """Every job of the batch is cancelled; raised inside of the pipeline's call to end it."""


class Steps:
    """Follow a batch. A cancelled job gets its event at once; its place in the batch is computed and not used."""

    def __init__(
        self, batch: Sequence[Job], emit: Emit, cancelled: IsCancelled, caller: Caller, previewer: Previewer | None
    ) -> None:
        self._batch, self._emit, self._cancelled = batch, emit, cancelled
        self._caller, self._previewer = caller, previewer
        self.live = [job.id for job in batch]
        self._done = 0
        # The latents after the step before.
        self._before: Tensor | None = None
        self._pending: Any = None

    @contextlib.contextmanager
    def watching(self, arguments: dict[str, Any]) -> Iterator[None]:
        """Follow the call with these arguments; a pipeline without a callback is followed by its scheduler's steps."""
        if self._caller.has_callback:
            arguments["callback_on_step_end"] = self._on_step_end
            yield
            return
        scheduler = self._caller.pipe.scheduler
        step = scheduler.step

        def counted(*args: Any, **kwargs: Any) -> Any:
            result = step(*args, **kwargs)
            self._next(None)
            return result

        scheduler.step = counted
        try:
            yield
        finally:
            scheduler.__dict__.pop("step", None)

    def _on_step_end(self, _pipe: Any, _step: int, _time: Any, values: dict[str, Any]) -> dict[str, Any]:
        self._next(values.get("latents"))
        return {}

    def _next(self, latents: Tensor | None) -> None:
        self._done += 1
        self._wait_for_device()
        self.check()
        total = self._caller.total_steps(self._batch[0])
        for place, job in enumerate(self._batch):
            if job.id not in self.live:
                continue
            self._emit(job.id, Step(index=self._done, total=max(total, self._done)))
            if latents is not None and self._done in _preview_steps(job.partial_images, total):
                self._preview(place, job, clean(self._caller.pipe.scheduler, self._before, latents))
        self._before = latents

    def check(self) -> None:
        """Report cancelled jobs; raise `AllCancelled` if none is left."""
        for job_id in list(self.live):
            why = self._cancelled(job_id)
            if why is not None:
                self.live.remove(job_id)
                self._emit(job_id, Cancelled(why=why))
        if not self.live:
            raise AllCancelled

    def _wait_for_device(self) -> None:
        """Wait for the step before: the host would otherwise be many steps ahead of what can still be cancelled."""
        if not torch.cuda.is_initialized():
            return
        if self._pending is not None:
            self._pending.synchronize()
        self._pending = torch.cuda.Event()
        self._pending.record()

    def _preview(self, place: int, job: Job, latents: Tensor) -> None:
        if self._previewer is None or len(latents) != len(self._batch):
            return
        image = self._previewer.image(latents[place : place + 1], job.width, job.height)
        if image is not None:
            index = _preview_steps(job.partial_images, self._caller.total_steps(job)).index(self._done)
            self._emit(job.id, Preview(index=index, image=images.encode_preview(image, job), step=self._done))


def _preview_steps(count: int, total: int) -> list[int]:
    """Return the steps after which previews are sent, evenly between the first and the last.

    >>> _preview_steps(3, 28), _preview_steps(3, 2)
    ([7, 14, 21], [1])
    """
    return sorted({step for index in range(count) if 0 < (step := (index + 1) * total // (count + 1)) < total})
