"""The types between the app, the queue and the workers: plain data, without torch.

One job goes this way: the app makes a `Job`, `Engine.submit` returns its events, the queue splits it into single images (jobs
with `n` of 1) and collects them into batches, `Runner.run` carries a batch to a `Worker`, and the worker's events come back.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, TypeAlias

Kind = Literal["image", "edit", "video"]
Fidelity = Literal["exact", "close", "fast"]
Size = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Lora:
    name: str
    scale: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Job:
    """One request, checked against its model. Prompts and uploads stay out of `repr`, so that logs do not get them."""

    id: str
    model: str
    prompt: str = field(repr=False)
    width: int
    height: int
    steps: int
    kind: Kind = "image"
    negative_prompt: str | None = field(default=None, repr=False)
    # Number of images; image `i` starts from `seed + i`. A worker gets jobs with `n` of 1 only.
    n: int = 1
    frames: int = 1
    frames_per_second: int = 16
    # Arguments `guidance_scale` and `true_cfg_scale` of the pipeline; None for its default.
    guidance: float | None = None
    true_cfg: float | None = None
    seed: int = 0
    loras: tuple[Lora, ...] = ()
    # "exact" is computed alone, never in a batch.
    fidelity: Fidelity | None = None
    recipe: str | None = None
    # Encoded uploads, checked by the app: their type and number of pixels are within the limits.
    images: tuple[bytes, ...] = field(default=(), repr=False)
    mask: bytes | None = field(default=None, repr=False)
    partial_images: int = 0
    # "png", "jpeg" or "webp"; "mp4" for a video, or "gif".
    output_format: str = "png"
    compression: int = 100
    # Higher runs earlier among the jobs of one key.
    priority: int = 0
    # The owner: fairness is between keys. Not an API key itself but a digest of it.
    key: str = field(default="", repr=False)
    # Seconds after submission after which the result is useless.
    timeout: float | None = None

    @property
    def size(self) -> Size:
        return self.width, self.height

    @property
    def group(self) -> tuple[Any, ...]:
        """Return what jobs of one batch have in common."""
        guidance = self.guidance, self.true_cfg, self.negative_prompt is None
        return (
            self.model,
            self.kind,
            self.size,
            self.frames,
            self.steps,
            guidance,
            self.loras,
            self.fidelity,
            self.recipe,
        )

    def singles(self) -> list[Job]:
        """Return one job for each image, with ids `ID/0`, `ID/1`, ..."""
        return [replace(self, id=f"{self.id}/{index}", n=1, seed=self.seed + index) for index in range(self.n)]


@dataclass(frozen=True, kw_only=True)
class Queued:
    """The job waits; `wait` is the estimate in seconds."""

    ahead: int
    wait: float


@dataclass(frozen=True, kw_only=True)
class Started:
    """A worker has begun with the job, in a batch of `batched` images."""

    batched: int = 1


@dataclass(frozen=True, kw_only=True)
class Step:
    """Denoising step `index` of `total` is done, counted from 1."""

    index: int
    total: int


@dataclass(frozen=True, kw_only=True)
class Preview:
    """An image from unfinished latents: a linear map of them to RGB, not a decoded image. `index` counts from 0."""

    index: int
    image: bytes = field(repr=False)
    step: int = 0
    # Which image of its job; set by the dispatcher.
    image_index: int = 0


@dataclass(frozen=True, kw_only=True)
class Done:
    """The encoded result: `n` images, or one video. `facts` is plain data for the response (seconds, batched, ...)."""

    images: tuple[bytes, ...] = field(repr=False)
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Failed:
    """The job failed. `retry` is False if the same job would fail again.

    Codes: `out_of_memory`, `invalid_job` (the pipeline refused its arguments), `worker_died`, `internal`.
    """

    code: str
    message: str
    retry: bool = False


@dataclass(frozen=True, kw_only=True)
class Cancelled:
    """The job was stopped. Reasons: `disconnect`, `delete`, `deadline`, `shutdown`."""

    why: str


Event: TypeAlias = Queued | Started | Step | Preview | Done | Failed | Cancelled
# After one of these no event follows.
LAST = (Done, Failed, Cancelled)


@dataclass(frozen=True, kw_only=True)
class Quality:
    """What OpenAI's `quality` stands for; None means the model's default."""

    steps: int | None = None
    fidelity: Fidelity | None = None
    recipe: str | None = None


@dataclass(frozen=True, kw_only=True)
class Model:
    """What one model promises: requests outside of it are refused before they are queued."""

    name: str
    # Width and height, as requests name them; the first one is the default.
    sizes: tuple[Size, ...]
    kinds: tuple[Kind, ...] = ("image",)
    steps: int = 28
    max_steps: int = 200
    # Numbers of frames of a video; the first one is the default.
    frames: tuple[int, ...] = (1,)
    frames_per_second: int = 16
    # Batch sizes that are compiled and that a recipe measured as faster per image, by size; other sizes run alone.
    batches: Mapping[Size, tuple[int, ...]] = field(default_factory=dict)
    # Measured seconds of one image at the default steps, by size.
    seconds: Mapping[Size, float] = field(default_factory=dict)
    # Those that requests may choose; empty if the server runs one configuration.
    fidelities: tuple[Fidelity, ...] = ()
    recipes: tuple[str, ...] = ()
    loras: tuple[str, ...] = ()
    qualities: Mapping[str, Quality] = field(default_factory=dict)
    # Optional arguments that the pipeline takes: "negative_prompt", "guidance", "true_cfg", "mask", and "image" for a video
    # that begins with an upload.
    takes: tuple[str, ...] = ()
    # The largest number of uploaded images of an edit.
    max_images: int = 1
    # Measured seconds of one eager image at the default steps and size; None if not measured.
    eager_seconds: float | None = None

    def batches_at(self, size: Size) -> tuple[int, ...]:
        """Return the legal batch sizes at a size, 1 included."""
        return tuple(sorted({1, *self.batches.get(size, ())}))

    def estimate(self, job: Job) -> float:
        """Return the seconds of one image of a job: measured at its size, else by pixels; 1 s if nothing was measured."""
        if not self.seconds:
            return 1.0
        nearest = min(self.seconds, key=lambda size: abs(_pixels(size) - _pixels(job.size)))
        scale = _pixels(job.size) / _pixels(nearest) * job.steps / self.steps * max(1, job.frames / self.frames[0])
        return self.seconds[nearest] * scale


def _pixels(size: Size) -> int:
    return size[0] * size[1]


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Totals of a worker since its start, for metrics."""

    recompiles: int = 0
    violations: int = 0
    captures: int = 0
    device_bytes: int = 0
    restarts: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(**{name: count + vars(other)[name] for name, count in vars(self).items()})


@dataclass(frozen=True, kw_only=True)
class Status:
    """The state of an engine; `ready` after warm-up, while the worker answers and the queue has room."""

    ready: bool
    why: str = ""
    queued: int = 0
    queued_seconds: float = 0.0
    running: int = 0
    counts: Counts = field(default_factory=Counts)


class Refused(Exception):
    """A job is not taken: the queue is full, its deadline cannot be met, or the server drains.

    Codes: `queue_full`, `deadline`, `draining`, `not_ready`. `retry_after` is in seconds, None if a retry is useless.
    """

    def __init__(self, code: str, message: str, retry_after: float | None) -> None:
        super().__init__(message)
        self.code = code
        self.retry_after = retry_after


class WorkerDied(Exception):
    """A worker ended in the middle of a batch. Its runner starts another one."""


Emit: TypeAlias = Callable[[str, Event], None]
# Return why a job is to stop, or None. Called after each step.
IsCancelled: TypeAlias = Callable[[str], str | None]


class Worker(Protocol):
    """Owns a pipeline, in this process or in others. Only `load`, `run` and `counts` are called by one thread alone."""

    def load(self) -> tuple[Model, ...]:
        """Load and warm up; return the models with their measured times."""

    def run(self, batch: Sequence[Job], emit: Emit, cancelled: IsCancelled) -> None:
        """Compute a batch of jobs of one group, each with `n` of 1; emit `Started` to one last event for every job.

        An error of the batch is emitted as `Failed` for each unfinished job. A cancelled job gets `Cancelled`, the others go
        on. Nothing of a batch is left in the pipeline.
        """

    def counts(self) -> Counts:
        """Return totals since `load`."""

    def cancel(self, job_id: str, why: str) -> None:
        """Pass on a cancellation of a running job, which `run` would otherwise read too late."""

    def is_alive(self) -> bool:
        """Return False if a process of the worker is gone."""

    def close(self) -> None:
        """End the worker; a running batch raises `WorkerDied`, or ends with its current step."""


class Runner(Protocol):
    """Carries batches to one or several workers; used by the app's event loop."""

    # Batches that may run at the same time. It may change, for example with Ray's replicas.
    slots: int

    async def start(self) -> tuple[Model, ...]:
        """Start the workers; return their models after warm-up."""

    def run(self, batch: Sequence[Job]) -> AsyncIterator[tuple[str, Event]]:
        """Yield the events of a batch with the ids of their jobs; raise `WorkerDied` if the worker is gone."""

    def cancel(self, job_id: str, why: str) -> None:
        """Stop a job of a running batch after its current step. An unknown id does nothing."""

    def ready(self) -> bool:
        """Return True while a worker is loaded and answers; False during a restart."""

    def counts(self) -> Counts:
        """Return the newest totals, without waiting."""

    async def stop(self) -> None:
        """End the workers. Running batches are lost."""


class Engine(Protocol):
    """What the app talks to."""

    async def start(self) -> None:
        """Start the workers; return when they are warm."""

    def submit(self, job: Job) -> AsyncIterator[Event]:
        """Queue a job and return its events; raise `Refused` at once if it is not taken."""

    def cancel(self, job_id: str, why: str) -> bool:
        """Stop a job, queued or running; return False if there is none."""

    def models(self) -> tuple[Model, ...]:
        """Return the models; empty before `start` is done."""

    def status(self) -> Status:
        """Return the current state."""

    async def drain(self, seconds: float) -> None:
        """Take no more jobs, wait for the others for at most these seconds, cancel the rest, stop the workers."""
