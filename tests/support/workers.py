"""Workers and runners over a tiny pipeline, for tests of the server."""

from __future__ import annotations

import io
import multiprocessing
import threading

import numpy as np
import torch
from PIL import Image

from support import ranks, small_pipelines
from tritium.serve.engine import LAST, Done, Job
from tritium.serve.process import ProcessWorker
from tritium.serve.worker import PipelineWorker
from tritium.serve.worker_settings import WorkerSettings

STEPS = 4

# Weights are drawn from the global generator: workers that load at once would mix their draws.
_building = threading.Lock()


def build():
    with _building:
        return small_pipelines.flux(1, 1)


def settings(folder="", **changes) -> WorkerSettings:
    """Settings for `small_pipelines.flux`, without Tritium unless `eager=False`."""
    fields = {"pipeline": str(folder), "name": "tiny", "sizes": ((32, 32),), "steps": STEPS, "text_tokens": 16}
    return WorkerSettings(**{**fields, "device": "cpu", "eager": True, "config": {"engine": "eager"}, **changes})


def worker(**changes) -> PipelineWorker:
    """A worker in this process, not yet loaded."""
    return PipelineWorker(settings(**changes), build)


def process(settings, **arguments) -> ProcessWorker:
    """A worker in processes that are forked from one with the imports: spawned ones import for several seconds."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(ranks.PRELOADED)
    return ProcessWorker(settings, start_method="forkserver", **arguments)


def save(folder):
    """Write the pipeline as a diffusers folder."""
    small_pipelines.flux(1, 1).save_pretrained(folder)
    return folder


def job(name="a", **changes) -> Job:
    fields = {"model": "tiny", "prompt": "a red circle", "width": 32, "height": 32, "steps": STEPS, "seed": 3}
    return Job(**{**fields, "id": name, **changes})


def run(worker, *jobs, cancelled=lambda _name, _events: None):
    """The events of a batch, as pairs; `cancelled` gets a job's id and the events so far."""
    events = []
    worker.run(jobs, lambda name, event: events.append((name, event)), lambda name: cancelled(name, events))
    return events


def of(name, events):
    """The events of one job, which ends with its one last event."""
    own = [event for owner, event in events if owner == name]
    assert [isinstance(event, LAST) for event in own] == [False] * (len(own) - 1) + [True], own
    return own


def last(worker, one: Job):
    """The last event of a job alone."""
    return of(one.id, run(worker, one))[-1]


def pixels(event):
    """The first image of a `Done` as an array."""
    assert isinstance(event, Done), event
    return np.asarray(Image.open(io.BytesIO(event.images[0])).convert("RGB"))


def library(pipe, one: Job, **call):
    """The image of a job from a plain call of the pipeline."""
    generator = torch.Generator().manual_seed(one.seed)
    arguments = {"max_sequence_length": 16, "generator": generator, "num_inference_steps": one.steps, **call}
    return np.asarray(pipe(one.prompt, height=one.height, width=one.width, **arguments).images[0])


def upload(colour="red", mode="RGB", size=(64, 64)) -> bytes:
    buffer = io.BytesIO()
    Image.new(mode, size, colour).save(buffer, "PNG")
    return buffer.getvalue()


async def collected(runner, *jobs):
    """The events of a batch that a runner carries."""
    return [pair async for pair in runner.run(jobs)]
