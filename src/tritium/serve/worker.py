"""The worker: owns a pipeline and its handle, warms it up, and turns batches of jobs into events."""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from tritium import compat, device, example
from tritium.api import Handle, optimize
from tritium.bench import generation
from tritium.config import CompilationConfig
from tritium.errors import ConfigError, TritiumError, brief
from tritium.pipelines.plan import Plan
from tritium.pipelines.shapes import Shapes
from tritium.serve import calls, images, previews
from tritium.serve.calls import EDIT, INPAINT, Caller
from tritium.serve.engine import Counts, Done, Emit, Failed, IsCancelled, Job, Lora, Model, Size, Started, WorkerDied
from tritium.serve.loras import LoraBank, TooLarge
from tritium.serve.steps import AllCancelled, Steps
from tritium.serve.ways import EXACT, Ways
from tritium.serve.worker_settings import WorkerSettings

# A batch must save this share of the time of single images.
_BATCH_SAVES = 0.03

# Steps of a timed image, at most; the rest is proportional.
_TIMED_STEPS = 8

_PROMPT = "a"


class InvalidJob(ValueError):
    """A job that this worker cannot compute; the message is for the client."""


class PipelineWorker:
    """A worker in this process. `load_pipe` replaces the loading of the settings' pipeline."""

    def __init__(self, settings: WorkerSettings, load_pipe: Callable[[], Any] | None = None) -> None:
        self.settings = settings
        self._load_pipe = load_pipe or self._load_named
        self.pipe: Any = None
        self.handle: Handle | None = None
        self._graphs_at_start = 0

    # --- the start ---

    def load(self) -> tuple[Model, ...]:
        """Load the pipeline, compile or load its code for every promised shape, and measure it."""
        settings = self.settings
        self.pipe = self._load_pipe()
        self.pipe.set_progress_bar_config(disable=True)
        self._caller = Caller(self.pipe)
        self._sizes = settings.sizes or (self._caller.size,)
        self.bank = LoraBank(self.pipe, settings.loras, settings.lora_rank) if settings.loras else None
        self.previewer = previews.fit(self.pipe)
        related = calls.related(self.pipe) if settings.edits else {}
        self._callers = {name: Caller(pipe) for name, pipe in related.items()}
        self._scheduler = copy.deepcopy(self.pipe.scheduler.__dict__)
        if not settings.eager:
            self._optimize()
        model = self._measured()
        self._graphs_at_start = compat.dynamo.graphs_compiled()
        return (model,)

    def _load_named(self) -> Any:
        where = self.settings.device or device.default()
        if where == "cuda":
            torch.cuda.set_device(self.settings.gpu)
        return generation.load(self.settings.pipeline, where)

    def _optimize(self) -> None:
        settings = self.settings
        shapes = Shapes(
            sizes=[(height, width) for width, height in self._sizes],
            text_tokens=settings.text_tokens or (),
            # What the app lets through and was not promised must be right, and must not stop the server to compile.
            on_violation="eager",
        )
        plan = Plan(
            config=CompilationConfig(**settings.config),
            shapes=shapes,
            progress=False,
            **settings.techniques,
        )
        stored = Path(settings.artifacts) if settings.artifacts else None
        is_stored = stored is not None and stored.exists()
        self.handle = optimize(self.pipe, plan, artifacts=stored if is_stored else None)
        self.ways = Ways(self.handle, settings.recipes)
        for name, quality in settings.qualities.items():
            if quality.fidelity not in (None, *self.ways.fidelities):
                raise ConfigError(
                    f"quality {name!r} asks for fidelity {quality.fidelity!r}, which needs a recipe that is lossy"
                )
        for way in self.ways.compiled:
            self.ways.use(way)
            self._warm_up(self.handle)
        if stored is not None and not is_stored:
            self.handle.save(stored)

    def _warm_up(self, handle: Handle) -> None:
        """Compile and capture the calls of one way of running: every batch, with and without LoRAs and guidance."""
        unguided = {"guidance_scale": 1.0} if self._caller.doubles_batch else None
        for loras in ((), *([(Lora(name=self.bank.names[0]),)] if self.bank is not None else [])):
            self._use_loras(loras)
            for batch, frames in itertools.product(self._batches, self._frames):
                for guidance in ({}, *([unguided] if unguided else [])):
                    handle.warmup(**self._warming(self._caller, batch, frames=frames), **guidance)
            for name, caller in self._callers.items():
                handle.warmup(caller.pipe, **self._warming(caller, 1, name))
        self._use_loras(())

    @property
    def _batches(self) -> tuple[int, ...]:
        return tuple(sorted({1, *self.settings.batches}))

    def _warming(self, caller: Caller, batch: int, name: str = "", frames: int = 1) -> dict[str, Any]:
        """Return arguments of a call like those of jobs; the height, width and steps come from the warm-up."""
        job = replace(self._sample(self._sizes[0], 2), frames=frames)
        if name:
            job = replace(job, images=(_blank(job.size),), mask=_blank(job.size, "L") if name == INPAINT else None)
        arguments = caller.arguments([job] * batch, self.settings.text_tokens)
        return {key: value for key, value in arguments.items() if key not in ("height", "width", "num_inference_steps")}

    def _sample(self, size: Size, steps: int) -> Job:
        """Return a job of the promised shapes."""
        width, height = size
        return Job(
            id="warm-up",
            model=self.settings.name,
            prompt=_PROMPT,
            width=width,
            height=height,
            steps=steps,
            kind=self._caller.kinds[0],
            frames=self._frames[0],
            images=(_blank(size),) if self._caller.needs_image else (),
        )

    @cached_property
    def _frames(self) -> tuple[int, ...]:
        return self.settings.frames or (self._caller.default("num_frames") or 1,)

    def _measured(self) -> Model:
        settings, caller = self.settings, self._caller
        steps = settings.steps or caller.steps
        seconds = {size: self._seconds(size, 1, steps) for size in self._sizes}
        batches: dict[Size, tuple[int, ...]] = {}
        for size in self._sizes:
            each = {batch: self._seconds(size, batch, steps) / batch for batch in self._batches[1:]}
            paying = tuple(batch for batch, alone in each.items() if alone < seconds[size] * (1 - _BATCH_SAVES))
            batches |= {size: paying} if paying else {}
        takes = (*caller.takes(), *(("mask",) if INPAINT in self._callers else ()))
        return Model(
            name=settings.name,
            sizes=self._sizes,
            kinds=tuple(dict.fromkeys((*caller.kinds, *(("edit",) if EDIT in self._callers else ())))),
            steps=steps,
            frames=self._frames,
            batches=batches,
            seconds=seconds,
            fidelities=self.ways.fidelities if self.handle is not None else (),
            recipes=tuple(settings.recipes) if self.handle is not None else (),
            loras=self.bank.names if self.bank is not None else (),
            qualities=settings.qualities,
            takes=takes,
            max_images=caller.max_images,
            eager_seconds=self._eager_seconds(steps) if settings.measure_eager else None,
        )

    def _seconds(self, size: Size, batch: int, steps: int) -> float:
        """Return the seconds of a batch at these steps, from a run of at most eight of them."""
        timed = min(steps, _TIMED_STEPS)
        job = self._sample(size, timed)
        start = time.perf_counter()
        calls.results(self.pipe(**self._caller.arguments([job] * batch, self.settings.text_tokens)))
        return (time.perf_counter() - start) * steps / timed

    def _eager_seconds(self, steps: int) -> float:
        if self.handle is not None:
            self.ways.use(EXACT)
        seconds = min(self._seconds(self._sizes[0], 1, steps) for _ in range(2))
        if self.handle is not None:
            self.ways.use(self.ways.default)
        return seconds

    # --- jobs ---

    def run(self, batch: Sequence[Job], emit: Emit, cancelled: IsCancelled) -> None:
        for job in batch:
            emit(job.id, Started(batched=len(batch)))
        caller = self._caller_of(batch[0])
        steps = Steps(batch, emit, cancelled, caller, self.previewer)
        start = time.perf_counter()
        failure: Failed | None = None
        lost: BaseException | None = None
        try:
            found = self._generate(batch, caller, steps)
            facts = {"seconds": time.perf_counter() - start, "batched": len(batch), "way": self._way_of(batch[0])}
            steps.check()
            for job, result in zip(batch, found, strict=True):
                if job.id in steps.live:
                    emit(job.id, _done(job, result, facts))
                    steps.live.remove(job.id)
        except AllCancelled:
            self._restore_scheduler()
        except Exception as error:  # noqa: BLE001  # every error of a batch is an event
            failure, lost = _failure(error), error if _is_device_lost(error) else None
            self._restore_scheduler()
        if failure is not None:
            # The traceback, which held the tensors of the call, is gone here.
            if failure.code == "out_of_memory" and torch.cuda.is_initialized():
                torch.cuda.empty_cache()
            for job_id in list(steps.live):
                emit(job_id, failure)
        if lost is not None:
            raise WorkerDied(brief(lost)) from lost

    def _generate(self, batch: Sequence[Job], caller: Caller, steps: Steps) -> list[Any]:
        job = batch[0]
        if example.is_example(self.pipe):
            unknown = [word for one in batch for word in example.unknown_words(one.prompt)]
            if unknown:
                raise InvalidJob(
                    f"the example model does not know {', '.join(map(repr, dict.fromkeys(unknown)))}; its words are: "
                    f"{' '.join(example.VOCABULARY)}"
                )
        arguments = caller.arguments(batch, self.settings.text_tokens)
        self._use_loras(job.loras)
        if self.handle is not None:
            self.ways.use(self._way_of(job))
        steps.check()
        with steps.watching(arguments):
            return calls.results(caller.pipe(**arguments))

    def _caller_of(self, job: Job) -> Caller:
        if not job.images or "image" in self._caller.parameters:
            return self._caller
        return self._callers[INPAINT if job.mask is not None else EDIT]

    def _way_of(self, job: Job) -> str:
        return self.ways.of(job) if self.handle is not None else EXACT

    def _use_loras(self, loras: Sequence[Lora]) -> None:
        if self.bank is not None:
            self.bank.use(loras)
        elif loras:
            raise InvalidJob("this server has no LoRAs")

    def _restore_scheduler(self) -> None:
        """Give the scheduler the state that it had before the first call: a call may have ended in the middle."""
        state = self.pipe.scheduler.__dict__
        state.clear()
        state.update(copy.deepcopy(self._scheduler))

    # --- the rest of `Worker` ---

    def counts(self) -> Counts:
        on_gpu = torch.cuda.is_initialized()
        handle = self.handle
        return Counts(
            recompiles=compat.dynamo.graphs_compiled() - self._graphs_at_start,
            violations=sum(violation.times for violation in handle.violations) if handle is not None else 0,
            captures=len(handle.captures) if handle is not None else 0,
            device_bytes=torch.cuda.memory_reserved() if on_gpu else 0,
        )

    def is_alive(self) -> bool:
        return True

    def cancel(self, job_id: str, why: str) -> None:
        """Do nothing: `run` reads cancellations after each step."""

    def close(self) -> None:
        if self.handle is not None:
            self.handle.remove()
        self.handle = self.pipe = None


def _blank(size: Size, mode: str = "RGB") -> bytes:
    from PIL import Image

    return images.encode(Image.new(mode, size, 255 if mode == "L" else (127, 127, 127)), "png", 100)


def _done(job: Job, result: Any, facts: dict[str, Any]) -> Done:
    if job.kind != "video":
        encoded = images.encode(result, job.output_format, job.compression)
        return Done(images=(encoded,), facts={**facts, "output_format": job.output_format})
    encoded, output_format = images.encode_video(result, job.frames_per_second, job.output_format)
    return Done(images=(encoded,), facts={**facts, "output_format": output_format})


def _failure(error: Exception) -> Failed:
    """Return the event for an error, with a message for the client."""
    # On a CPU, torch raises a plain RuntimeError.
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in str(error):
        return Failed(code="out_of_memory", message="the device has too little memory for this request")
    if isinstance(error, (InvalidJob, TooLarge)) or _refused_arguments(error):
        return Failed(code="invalid_job", message=str(error))
    if isinstance(error, TritiumError):
        return Failed(code="internal", message=brief(error))
    return Failed(code="internal", message=brief(error), retry=_is_device_lost(error))


def _refused_arguments(error: BaseException) -> bool:
    """Return True if the pipeline's own check of its arguments raised an error."""
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_name == "check_inputs":
            return isinstance(error, ValueError)
        trace = trace.tb_next
    return False


def _is_device_lost(error: BaseException) -> bool:
    """Return True if no later call on the device can succeed in this process."""
    return "CUDA error" in str(error) and not isinstance(error, torch.OutOfMemoryError)
