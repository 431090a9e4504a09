"""Admit single images to a queue, and choose which of them run next: pure, with an injected clock.

Fairness: every key has a tag, the seconds of work that it was given. The key with the smallest tag goes next; a key that
returns keeps its tag, but not below that of the keys in turn, so that idle time earns nothing (start-time fair queueing).
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from tritium.serve.engine import Job, Model, Queued, Refused

# The longest wait for other members of a batch, and its share of a denoising step.
_WINDOW = 0.005
_WINDOW_STEP = 0.1
# Weight of the newest measurement in the mean of measured times.
_NEWEST = 0.3


@dataclass(frozen=True, kw_only=True)
class Limits:
    # Images that wait.
    length: int = 64
    # Estimated seconds of the images that wait.
    seconds: float = 600.0
    # The largest share of both that one key may have.
    share: float = 1.0

    def __post_init__(self) -> None:
        if self.length < 1 or self.seconds <= 0 or not 0 < self.share <= 1:
            raise ValueError(
                f"a queue needs a length of at least 1, seconds above 0 and a share in (0, 1]; these are {self}"
            )


@dataclass(kw_only=True, eq=False)
class Entry:
    """One image of a job that waits or runs."""

    parent: Job
    job: Job
    # Estimated seconds, as they were at admission.
    seconds: float
    entered: float
    deadline: float | None
    order: int
    # Set after a failed batch: this image runs once more, and alone.
    alone: bool = False

    @property
    def rank(self) -> tuple[int, int]:
        """Return the position among the images of one key."""
        return -self.job.priority, self.order


@dataclass(eq=False)
class _Lane:
    """The waiting images of one key, sorted by rank."""

    tag: float
    entries: list[Entry] = field(default_factory=list)


@dataclass(eq=False)
class _Running:
    entries: Sequence[Entry]
    started: float
    seconds: float


class Queue:
    """Images that wait for a worker, bounded by number and estimated seconds, and those that run."""

    def __init__(self, models: Iterable[Model], limits: Limits, clock: Callable[[], float]) -> None:
        self.models = {model.name: model for model in models}
        self.limits = limits
        self._clock = clock
        self._lanes: dict[str, _Lane] = {}
        # Tags of keys without images, as long as they exceed the tag of the key in turn.
        self._tags: dict[str, float] = {}
        self._turn = 0.0
        self._again: deque[Entry] = deque()
        self._running: list[_Running] = []
        self._order = 0
        # Measured seconds divided by the model's estimate; batch sizes that ran out of memory.
        self._ratios: dict[tuple[Any, ...], float] = {}
        self._forbidden: dict[tuple[Any, ...], int] = {}
        self._hold: float | None = None

    def __len__(self) -> int:
        return sum(1 for _ in self._entries())

    @property
    def seconds(self) -> float:
        """Return the estimated seconds of the images that wait."""
        return sum(entry.seconds for entry in self._entries())

    @property
    def running(self) -> int:
        """Return the number of images that run."""
        return sum(len(batch.entries) for batch in self._running)

    def estimate(self, job: Job) -> float:
        """Return the seconds of one image: the model's estimate, corrected by later measurements."""
        return self.models[job.model].estimate(job) * self._ratios.get(_work(job), 1.0)

    def wait(self, job: Job, slots: int) -> Queued:
        """Return the images that run before those of a job that enters now, and the seconds until it starts."""
        ahead = self._ahead(job)
        if not ahead and len(self._running) < slots:
            return Queued(ahead=0, wait=0.0)
        now = self._clock()
        remaining = sum(max(0.0, batch.started + batch.seconds - now) for batch in self._running)
        return Queued(ahead=len(ahead), wait=(remaining + sum(entry.seconds for entry in ahead)) / max(1, slots))

    def _ahead(self, job: Job) -> list[Entry]:
        """Return the images of its own key that go before a job, and those of other keys whose turn comes before its own."""
        lane = self._lanes.get(job.key) or _Lane(max(self._turn, self._tags.get(job.key, 0.0)))
        ahead = [entry for entry in lane.entries if entry.rank < (-job.priority, self._order + 1)]
        turn = lane.tag + sum(entry.seconds for entry in ahead)
        for other in self._lanes.values():
            tag = other.tag
            for entry in other.entries if other is not lane else ():
                if tag > turn:
                    break
                ahead.append(entry)
                tag += entry.seconds
        return [*self._again, *ahead]

    def admit(self, job: Job, slots: int) -> Queued:
        """Add the images of a job, all or none; raise `Refused` with the time after which a retry may succeed."""
        cost = self.estimate(job)
        queued = self.wait(job, slots)
        self._check_room(job, cost, slots)
        # The images of a job share the slots.
        seconds = cost * -(-job.n // max(1, slots))
        if job.timeout is not None and queued.wait + seconds > job.timeout:
            late = queued.wait + seconds - job.timeout
            later = seconds <= job.timeout
            advice = "allow more time, or send it later" if later else "allow more time, or fewer steps"
            raise Refused(
                "deadline",
                f"the job would take about {queued.wait + seconds:.1f} s ({queued.wait:.1f} s of them in the queue), and its "
                f"deadline is in {job.timeout:.1f} s: {advice}",
                late if later else None,
            )
        now = self._clock()
        for single in job.singles():
            self._order += 1
            deadline = None if job.timeout is None else now + job.timeout
            entry = Entry(parent=job, job=single, seconds=cost, entered=now, deadline=deadline, order=self._order)
            bisect.insort(self._lane(job.key).entries, entry, key=lambda entry: entry.rank)
        return queued

    def _check_room(self, job: Job, cost: float, slots: int) -> None:
        own = self._lanes.get(job.key, _Lane(0.0)).entries
        share = self.limits.share
        bounds = (
            ("the queue", list(self._entries()), self.limits.length, self.limits.seconds),
            ("your share of the queue", own, max(1, int(self.limits.length * share)), self.limits.seconds * share),
        )
        for name, entries, length, seconds in bounds:
            if job.n > length:
                raise Refused("queue_full", f"n={job.n}, and {name} holds {length} images: send fewer at once", None)
            queued = sum(entry.seconds for entry in entries)
            surplus = len(entries) + job.n - length
            # An empty queue takes any job: otherwise a long one would never run.
            excess = queued + cost * job.n - seconds if entries else 0.0
            if surplus > 0 or excess > 0:
                after = max(surplus * queued / max(1, len(entries)), excess) / max(1, slots)
                message = f"{name} is full: {len(entries)} images that take about {queued:.1f} s are waiting"
                raise Refused("queue_full", message, max(0.05, after))

    def take(self) -> list[Entry]:
        """Return the batch that runs next, or nothing; `hold` then says when more members were worth waiting for."""
        self._hold = None
        if self._again:
            return self._start([self._again.popleft()])
        if not self._lanes:
            return []
        key = min(self._lanes, key=lambda key: (self._lanes[key].tag, self._lanes[key].entries[0].order))
        head = self._lanes[key].entries[0]
        self._turn = self._lanes[key].tag
        self._tags = {key: tag for key, tag in self._tags.items() if tag > self._turn}
        batch, full = self._collect(key, head)
        until = head.entered + self._window(head.job)
        if not full and self._clock() < until:
            self._hold = until
            return []
        for entry in batch:
            self._lanes[entry.job.key].tag += entry.seconds
            self._drop(entry)
        return self._start(batch)

    @property
    def hold(self) -> float | None:
        """Return the seconds after which `take` is to be called again, if it waits for members of a batch."""
        return None if self._hold is None else max(0.0, self._hold - self._clock())

    def _collect(self, key: str, head: Entry) -> tuple[list[Entry], bool]:
        """Return images of the head's group, a legal number of them, and True if no larger batch is legal."""
        legal = self.legal(head.job)
        lanes = sorted(self._lanes, key=lambda name: (name != key, self._lanes[name].tag))
        group = head.job.group
        same = [entry for name in lanes for entry in self._lanes[name].entries if entry.job.group == group]
        number = max(size for size in legal if size <= len(same))
        return same[:number], number == legal[-1]

    def legal(self, job: Job) -> tuple[int, ...]:
        """Return the batch sizes in which a job may run: those that pay and fitted into memory so far."""
        if job.fidelity == "exact":
            return (1,)
        bound = self._forbidden.get(_work(job))
        sizes = self.models[job.model].batches_at(job.size)
        return tuple(size for size in sizes if bound is None or size < bound) or (1,)

    def forbid(self, job: Job, size: int) -> None:
        """Make batches of `size` images and larger ones illegal for this kind of job."""
        self._forbidden[_work(job)] = min(size, self._forbidden.get(_work(job), size))

    def finish(self, batch: Sequence[Entry], *, measured: bool) -> None:
        """Remove a batch from what runs; its time enters the estimates if `measured`."""
        running = next(running for running in self._running if running.entries is batch)
        self._running.remove(running)
        if not measured:
            return
        job = batch[0].job
        now = (self._clock() - running.started) / len(batch)
        ratio = now / max(1e-9, self.models[job.model].estimate(job))
        before = self._ratios.get(_work(job), ratio)
        self._ratios[_work(job)] = before + _NEWEST * (ratio - before)

    def again(self, entry: Entry) -> None:
        """Queue an image of a failed batch once more, before all others; it runs alone."""
        entry.alone = True
        self._again.append(entry)

    def remove(self, job_id: str) -> list[Entry]:
        """Remove the waiting images of a job and return them."""
        entries = [entry for entry in self._entries() if entry.parent.id == job_id]
        for entry in entries:
            self._drop(entry)
        return entries

    def late(self) -> list[Entry]:
        """Return the waiting images that cannot be done before their deadlines any more."""
        now = self._clock()
        return [
            entry for entry in self._entries() if entry.deadline is not None and now + entry.seconds > entry.deadline
        ]

    def _entries(self) -> Iterator[Entry]:
        yield from self._again
        for lane in self._lanes.values():
            yield from lane.entries

    def _lane(self, key: str) -> _Lane:
        if key not in self._lanes:
            self._lanes[key] = _Lane(max(self._turn, self._tags.pop(key, 0.0)))
        return self._lanes[key]

    def _drop(self, entry: Entry) -> None:
        if entry in self._again:
            self._again.remove(entry)
            return
        lane = self._lanes[entry.job.key]
        lane.entries.remove(entry)
        if not lane.entries:
            self._tags[entry.job.key] = self._lanes.pop(entry.job.key).tag

    def _start(self, batch: list[Entry]) -> list[Entry]:
        seconds = sum(entry.seconds for entry in batch)
        self._running.append(_Running(batch, self._clock(), seconds))
        return batch

    def _window(self, job: Job) -> float:
        return min(_WINDOW, _WINDOW_STEP * self.estimate(job) / max(1, job.steps))


def _work(job: Job) -> tuple[Any, ...]:
    """Return the properties that decide the memory of an image and, with its steps, its time."""
    return job.model, job.kind, job.size, job.frames, job.fidelity, job.recipe
