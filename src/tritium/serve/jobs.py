"""Jobs as clients see them: followed to their end, found again by id or idempotency key, kept for a while."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Literal

from tritium.serve.engine import LAST, Cancelled, Done, Engine, Event, Failed, Preview, Queued, Started, Step
from tritium.serve.faults import Fault, invalid, of_failure
from tritium.serve.metrics import Metrics
from tritium.serve.protocol import Accepted
from tritium.serve.settings import Settings

# Bytes of a kept job without its result.
_OVERHEAD = 4096

State = Literal["queued", "in_progress", "completed", "failed"]


class Record:
    """One job and its events so far."""

    def __init__(self, accepted: Accepted, owner: str, idempotency: tuple[str, str] | None) -> None:
        self.accepted = accepted
        self.owner = owner
        self.idempotency = idempotency
        self.created = time.time()
        self.ended: float | None = None
        self.events: list[Event] = []
        self.watchers = 0
        self.changed = asyncio.Event()

    @property
    def id(self) -> str:
        return self.accepted.job.id

    @property
    def kept(self) -> bool:
        """Return True if the result is kept for clients that come back."""
        return self.accepted.background or self.idempotency is not None

    @property
    def last(self) -> Event | None:
        """Return the last event of a job that has ended."""
        return self.events[-1] if self.ended is not None else None

    @property
    def state(self) -> State:
        """Return OpenAI's word for where the job is."""
        if isinstance(self.last, Done):
            return "completed"
        if self.ended is not None:
            return "failed"
        return "in_progress" if any(isinstance(event, Started) for event in self.events) else "queued"

    @property
    def progress(self) -> int:
        """Return the percentage of denoising steps that are done; 100 with the result only."""
        if isinstance(self.last, Done):
            return 100
        steps = [event for event in self.events if isinstance(event, Step)]
        return min(99, 100 * steps[-1].index // max(1, steps[-1].total)) if steps else 0

    @property
    def remaining(self) -> float:
        """Return an estimate of the seconds until the job ends or begins, from its steps or the queue."""
        waited = time.time() - self.created
        if self.progress:
            return waited * (100 - self.progress) / self.progress
        return max(0.0, sum(event.wait for event in self.events if isinstance(event, Queued)) - waited)

    def add(self, event: Event) -> None:
        """Append an event and wake the watchers."""
        self.events.append(event)
        if isinstance(event, LAST):
            self.ended = time.time()
        self.changed.set()
        self.changed = asyncio.Event()

    async def watch(self) -> AsyncIterator[Event]:
        """Yield all events, those of the past first."""
        index = 0
        while True:
            while index < len(self.events):
                yield self.events[index]
                index += 1
            if self.ended is not None:
                return
            await self.changed.wait()

    async def result(self) -> Done:
        """Return the result; raise a `Fault` if the job ended without one."""
        async for event in self.watch():
            if isinstance(event, Done):
                return event
            if isinstance(event, (Failed, Cancelled)):
                raise of_failure(event)
        raise AssertionError("a job ended without a last event")

    @property
    def size(self) -> int:
        """Return about how many bytes the job keeps."""
        images = self.last.images if isinstance(self.last, Done) else ()
        return _OVERHEAD + len(self.accepted.job.prompt) + sum(len(image) for image in images)


class Jobs:
    def __init__(self, engine: Engine, settings: Settings, metrics: Metrics) -> None:
        self._engine = engine
        self._settings = settings
        self._metrics = metrics
        self._records: dict[str, Record] = {}
        self._keys: dict[tuple[str, str], tuple[str, str]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def submit(self, accepted: Accepted, owner: str, idempotency: tuple[str, str] | None) -> Record:
        """Submit a job, or return that of the same idempotency key. `idempotency` is the key and a digest of the body."""
        if idempotency is not None:
            record = self._same(owner, *idempotency)
            if record is not None:
                return record
        record = Record(accepted, owner, idempotency)
        events = self._engine.submit(accepted.job)
        self._records[record.id] = record
        if idempotency is not None:
            self._keys[owner, idempotency[0]] = (idempotency[1], record.id)
        task = asyncio.get_running_loop().create_task(self._follow(record, events))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return record

    def _same(self, owner: str, key: str, digest: str) -> Record | None:
        before, job_id = self._keys.get((owner, key), ("", ""))
        record = self._records.get(job_id)
        if record is None:
            return None
        if before != digest:
            message = "this idempotency key was used for another request: send a new key"
            raise invalid(message, "Idempotency-Key", "idempotency_mismatch")
        return record

    async def _follow(self, record: Record, events: AsyncIterator[Event]) -> None:
        watch = self._metrics.watch(record.accepted.job)
        try:
            async for event in events:
                watch(event)
                record.add(event)
        finally:
            if record.ended is None:
                record.add(Failed(code="internal", message="the engine gave no result", retry=True))
            self._settle(record)

    def _settle(self, record: Record) -> None:
        """Keep an ended job for a while, or forget it. A job that may succeed next time is not found by its key."""
        if not isinstance(record.last, Done) and record.idempotency is not None:
            self._keys.pop((record.owner, record.idempotency[0]), None)
        if not record.kept or (isinstance(record.last, Cancelled) and record.last.why == "delete"):
            self.forget(record)
            return
        job = record.accepted.job
        record.accepted = replace(record.accepted, job=replace(job, images=(), mask=None))
        record.events = [event for event in record.events if not isinstance(event, (Preview, Step)) or record.watchers]
        asyncio.get_running_loop().call_later(self._settings.keep_seconds, self.forget, record)
        kept = [record for record in self._records.values() if record.ended is not None]
        while len(kept) > 1 and sum(record.size for record in kept) > self._settings.keep_bytes:
            self.forget(kept.pop(0))

    def forget(self, record: Record) -> None:
        self._records.pop(record.id, None)
        if record.idempotency is not None:
            key = record.owner, record.idempotency[0]
            if self._keys.get(key, ("", ""))[1] == record.id:
                del self._keys[key]

    def find(self, job_id: str, owner: str, kinds: tuple[str, ...]) -> Record:
        """Return a job of this owner; another owner's does not exist for it."""
        record = self._records.get(job_id)
        if record is None or record.owner != owner or record.accepted.job.kind not in kinds:
            raise Fault(404, f"there is no job {job_id[:80]!r}: it may have expired", "not_found", "id", retry=False)
        return record

    def of(self, owner: str, kinds: tuple[str, ...]) -> list[Record]:
        """Return the background jobs of an owner, the oldest first."""
        records = [record for record in self._records.values() if record.owner == owner]
        return [record for record in records if record.accepted.background and record.accepted.job.kind in kinds]

    def delete(self, record: Record) -> None:
        self._engine.cancel(record.id, "delete")
        if record.ended is not None:
            self.forget(record)

    def leave(self, record: Record) -> None:
        """Stop a job that has no client left; one with an idempotency key goes on for a while."""
        if record.ended is not None or record.accepted.background or record.watchers:
            return
        if record.idempotency is None or not self._settings.grace:
            self._engine.cancel(record.id, "disconnect")
            return
        asyncio.get_running_loop().call_later(self._settings.grace, self._abandon, record)

    def _abandon(self, record: Record) -> None:
        if record.ended is None and not record.watchers:
            self._engine.cancel(record.id, "disconnect")

    def expires(self, record: Record) -> int | None:
        """Return the Unix time at which a kept result is dropped."""
        return None if record.ended is None else int(record.ended + self._settings.keep_seconds)
