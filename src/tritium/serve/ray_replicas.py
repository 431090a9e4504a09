"""Workers as replicas of a Ray Serve deployment, which Ray starts, watches, and scales. HTTP stays in this process."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tritium.errors import ConfigError, MissingExtra, brief
from tritium.serve.engine import Cancelled, Counts, Event, Job, Model, WorkerDied
from tritium.serve.worker_settings import WorkerSettings

NAME = "tritium"

# Seconds that a replica may take to finish its batch when it is scaled down.
_SHUTDOWN_SECONDS = 600.0


@dataclass(frozen=True, kw_only=True)
class Replicas:
    """The numbers of replicas between which Ray scales, and the GPUs of each."""

    least: int = 1
    most: int = 1
    gpus: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.least <= self.most or self.most < 1:
            raise ConfigError(f"replicas {self.least}:{self.most}: give MIN:MAX with 0 <= MIN <= MAX and MAX from 1")

    @classmethod
    def parse(cls, text: str, gpus: float = 0.0) -> Replicas:
        """Return the replicas of `N` or `MIN:MAX`.

        >>> Replicas.parse("1:4")
        Replicas(least=1, most=4, gpus=0.0)
        """
        first, _, last = text.partition(":")
        if not first.isdecimal() or not (last or first).isdecimal():
            raise ConfigError(f"replicas {text!r} are neither a number nor MIN:MAX, such as 1:4")
        return cls(least=int(first), most=int(last or first), gpus=gpus)


class Replica:
    """One worker of the deployment, in a thread of its actor. Ray constructs it and calls its methods."""

    async def __init__(self, settings: WorkerSettings) -> None:  # type: ignore[misc]  # Ray awaits it
        from tritium.serve.runner import LocalRunner
        from tritium.serve.worker import PipelineWorker

        self._id = uuid.uuid4().hex
        self._runner = LocalRunner([PipelineWorker(settings)])
        # Ray gives a replica batches when this is done.
        self._models = await self._runner.start()

    async def models(self) -> tuple[Model, ...]:
        return self._models

    async def run(self, batch: Sequence[Job]) -> AsyncIterator[tuple[str, Any]]:
        """Yield the events of a batch, and at its end the replica's id with its totals."""
        async with contextlib.aclosing(self._runner.run(batch)) as events:  # type: ignore[type-var]
            async for pair in events:
                yield pair
        yield self._id, self._runner.counts()

    def check_health(self) -> None:
        """Raise if the worker is gone for good; Ray then starts another replica."""
        if not self._runner.ready():
            raise RuntimeError("the worker is not loaded")


class RayRunner:
    """Carry batches to the replicas of a deployment; `deploy` returns its handle, and `undeploy` ends it."""

    def __init__(self, deploy: Callable[[], Any], most: int = 1, undeploy: Callable[[], Any] = lambda: None) -> None:
        # Batches wait in the handle while Ray starts replicas for them; that is what it scales by.
        self.slots = most
        self._deploy, self._undeploy = deploy, undeploy
        self._handle: Any = None
        self._ready = False
        self._running: dict[str, _Running] = {}
        self._counts: dict[str, Counts] = {}
        self._restarts = 0
        self._checks: set[asyncio.Task[None]] = set()

    async def start(self) -> tuple[Model, ...]:
        self._handle = await asyncio.to_thread(self._deploy)
        models: tuple[Model, ...] = await self._handle.models.remote()
        self._ready = True
        return models

    async def run(self, batch: Sequence[Job]) -> AsyncIterator[tuple[str, Event]]:
        running = _Running({job.id for job in batch}, self._handle.options(stream=True).run.remote(list(batch)))
        self._running |= dict.fromkeys(running.live, running)
        try:
            async for name, event in self._received(running):
                if isinstance(event, Counts):
                    self._counts[name] = event
                elif name in running.live:
                    yield name, event
            for name, why in running.cancelled.items():
                yield name, Cancelled(why=why)
        finally:
            running.stream.cancel()
            for job in batch:
                self._running.pop(job.id, None)

    async def _received(self, running: _Running) -> AsyncIterator[tuple[str, Any]]:
        """Yield what a replica sends; end without an error if the batch was cancelled."""
        errors: Any = importlib.import_module("ray.exceptions")
        cancelled = (
            importlib.import_module("ray.serve.exceptions").RequestCancelledError,
            errors.TaskCancelledError,
            asyncio.CancelledError,
        )
        try:
            async for pair in running.stream:
                yield pair
        except cancelled:
            if running.live:
                raise
        except errors.RayError as error:
            self._ready = False
            self._restarts += 1
            check = asyncio.get_running_loop().create_task(self._until_answered())
            self._checks.add(check)
            check.add_done_callback(self._checks.discard)
            raise WorkerDied(brief(error)) from error

    async def _until_answered(self) -> None:
        """Set `ready` when a replica answers again, which Ray has restarted."""
        await self._handle.models.remote()
        self._ready = True

    def cancel(self, job_id: str, why: str) -> None:
        """Drop a job's events; the replica stops when no job of the batch is left."""
        running = self._running.get(job_id)
        if running is None or job_id not in running.live:
            return
        running.live.remove(job_id)
        running.cancelled[job_id] = why
        if not running.live:
            running.stream.cancel()

    def ready(self) -> bool:
        return self._ready

    def counts(self) -> Counts:
        return sum(self._counts.values(), Counts(restarts=self._restarts))

    async def stop(self) -> None:
        self._ready = False
        for check in self._checks:
            check.cancel()
        await asyncio.to_thread(self._undeploy)


@dataclass
class _Running:
    """A batch: its jobs without a cancellation, and the replica's answer."""

    live: set[str]
    stream: Any

    def __post_init__(self) -> None:
        self.cancelled: dict[str, str] = {}


def runner(settings: WorkerSettings, replicas: Replicas) -> RayRunner:
    """Return a runner that deploys replicas on the Ray cluster of this machine or of `RAY_ADDRESS`; it starts one otherwise."""
    try:
        serve: Any = importlib.import_module("ray.serve")
    except ModuleNotFoundError as error:
        raise MissingExtra("ray", "ray", "serving with Ray") from error

    def deploy() -> Any:
        # Ray's own proxy would listen on port 8000.
        serve.start(http_options={"location": "NoServer"})
        return serve.run(application(settings, replicas), name=NAME, route_prefix=None)

    return RayRunner(deploy, replicas.most, lambda: serve.delete(NAME))


def application(settings: WorkerSettings, replicas: Replicas) -> Any:
    serve: Any = importlib.import_module("ray.serve")
    deployment = serve.deployment(
        name=NAME,
        max_ongoing_requests=1,
        autoscaling_config={
            "min_replicas": replicas.least,
            "max_replicas": replicas.most,
            "initial_replicas": max(1, replicas.least),
            "target_ongoing_requests": 1,
        },
        ray_actor_options={"num_cpus": 1, "num_gpus": replicas.gpus},
        graceful_shutdown_timeout_s=_SHUTDOWN_SECONDS,
    )(Replica)
    return deployment.bind(settings)
