"""A worker that is a group of ranks: the first one gets batches and broadcasts them, and all compute them together."""

from __future__ import annotations

import dataclasses
import datetime
import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from tritium import device, envs
from tritium.serve.engine import Counts, Emit, Event, Failed, IsCancelled, Job, Model
from tritium.serve.process import end_process
from tritium.serve.worker import PipelineWorker
from tritium.serve.worker_settings import WorkerSettings

# Ranks wait for the next batch as long as the server has none. A rank that ends closes its connections, which ends the others.
_IDLE = datetime.timedelta(days=3650)

# Reasons of a cancellation by number; the last one stands for all others.
_REASONS = (None, "disconnect", "delete", "deadline", "shutdown", "failed")


def join(settings: WorkerSettings, rank: int, ranks: int, store: str) -> RankedWorker:
    """Join the group of this machine's ranks, each with a GPU if there are GPUs; return this rank's worker."""
    where = settings.device or device.default()
    settings = dataclasses.replace(settings, gpu=settings.gpu + rank)
    if sys.platform == "linux":
        # All ranks are on this machine, whose name may have no address.
        envs.set_unless_set("GLOO_SOCKET_IFNAME", "lo")
    if where == "cuda":
        torch.cuda.set_device(settings.gpu)
    backend = "cpu:gloo,cuda:nccl" if where == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=ranks)
    return RankedWorker(PipelineWorker(settings), rank, dist.new_group(backend="gloo", timeout=_IDLE))


class RankedWorker:
    """The worker of one rank. Only the first rank's events are used."""

    def __init__(self, worker: PipelineWorker, rank: int, group: Any) -> None:
        self._worker, self._rank, self._group = worker, rank, group

    def load(self) -> tuple[Model, ...]:
        return self._worker.load()

    def run(self, batch: Sequence[Job], emit: Emit, cancelled: IsCancelled) -> None:
        dist.broadcast_object_list([batch], 0, self._group)
        self._worker.run(batch, emit, lambda job_id: self._agree(cancelled(job_id)))

    def follow(self) -> None:
        """Compute the batches of the first rank until the group ends."""
        self._worker.load()
        while True:
            received: list[Any] = [None]
            dist.broadcast_object_list(received, 0, self._group)
            self._worker.run(received[0], _end_after_failure, lambda _job_id: self._agree(None))

    def _agree(self, why: str | None) -> str | None:
        """Return the first rank's reason on all ranks, so that all of them stop after the same step."""
        number = torch.tensor(_REASONS.index(why) if why in _REASONS else len(_REASONS) - 1)
        dist.broadcast(number, 0, self._group)
        return _REASONS[int(number)]

    def counts(self) -> Counts:
        return self._worker.counts()


def _end_after_failure(_job_id: str, event: Event) -> None:
    """End the process after an error that the other ranks may not have: they would wait for this one."""
    if isinstance(event, Failed) and event.code != "invalid_job":
        sys.stderr.write(f"tritium: a rank ends: {event.message}\n")
        end_process()
