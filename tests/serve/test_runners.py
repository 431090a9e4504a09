"""Runners: threads, processes that are killed, and groups of ranks."""

import asyncio
import contextlib
import dataclasses
import os
import signal

import numpy as np
import pytest

from support import small_pipelines, workers
from tritium.errors import PipelineError
from tritium.serve.dispatch import Dispatcher
from tritium.serve.engine import Cancelled, Counts, Done, Failed, Model, Started, Step, WorkerDied
from tritium.serve.process import ProcessWorker
from tritium.serve.runner import LocalRunner

STARTS = 120


class Fragile:
    """A worker that dies on a prompt, and cannot be loaded for some times."""

    def __init__(self, failures=0):
        self.loads, self.failures, self.closed = 0, failures, False

    def load(self):
        self.loads += 1
        if 1 < self.loads <= 1 + self.failures:
            raise RuntimeError("no memory yet")
        return (Model(name="tiny", sizes=((32, 32),)),)

    def run(self, batch, emit, cancelled):
        for job in batch:
            emit(job.id, Started())
            if job.prompt == "die":
                raise WorkerDied("as asked")
            emit(job.id, Done(images=(b"",)))

    def cancel(self, job_id, why):
        pass

    def counts(self):
        return Counts(recompiles=self.loads)

    def is_alive(self):
        return True

    def close(self):
        self.closed = True


async def until(condition, seconds=STARTS):
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.05)


def test_a_worker_that_dies_is_loaded_again(monkeypatch):
    monkeypatch.setattr("tritium.serve.runner._BACKOFF", 0.01)

    async def main():
        worker = Fragile(failures=2)
        runner = LocalRunner([worker])
        await runner.start()
        with pytest.raises(WorkerDied):
            await workers.collected(runner, workers.job(prompt="die"))
        await until(runner.ready)
        assert [type(event) for _, event in await workers.collected(runner, workers.job())] == [Started, Done]
        assert worker.loads == 4
        assert (runner.counts().restarts, runner.counts().recompiles) == (1, 1 + 4)
        await runner.stop()
        assert worker.closed

    asyncio.run(main())


def test_a_worker_that_cannot_be_loaded_again_stays_away(monkeypatch):
    monkeypatch.setattr("tritium.serve.runner._BACKOFF", 0.001)

    async def main():
        runner = LocalRunner([Fragile(failures=99)])
        await runner.start()
        for _ in range(2):
            with pytest.raises(WorkerDied):
                await workers.collected(runner, workers.job(prompt="die"))
        assert not runner.ready()
        await runner.stop()

    asyncio.run(main())


def test_several_workers_run_at_the_same_time():
    async def main():
        runner = LocalRunner([workers.worker(), workers.worker()])
        (model,) = await runner.start()
        assert (model.name, runner.slots) == ("tiny", 2)
        batches = [workers.job(str(seed), seed=seed) for seed in range(4)]
        results = await asyncio.gather(*(workers.collected(runner, job) for job in batches))
        for job, events in zip(batches, results, strict=True):
            assert isinstance(workers.of(job.id, events)[-1], Done)
        await runner.stop()

    asyncio.run(main())


def test_a_batch_that_is_left_stops(tmp_path):
    """Its reader goes away after the first step: the worker is free long before the last one."""

    async def main():
        runner = LocalRunner([workers.worker()])
        await runner.start()
        events = runner.run([workers.job(steps=500)])
        async for _, event in events:
            if isinstance(event, Step):
                break
        await events.aclose()
        async with asyncio.timeout(2):
            assert isinstance((await workers.collected(runner, workers.job("b")))[-1][1], Done)
        assert not runner._running
        await runner.stop()

    asyncio.run(main())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return workers.save(tmp_path_factory.mktemp("pipeline"))


def test_a_killed_process_is_restarted(folder):
    async def main():
        worker = workers.process(workers.settings(folder))
        runner = LocalRunner([worker])
        engine = Dispatcher(runner)
        await engine.start()
        image = [event async for event in engine.submit(workers.job())][-1]
        (pid,) = worker.pids
        stopped = [event async for event in _cancelling(engine, workers.job("b", steps=500))]
        assert stopped[-1] == Cancelled(why="delete")

        # In the middle of a job: it runs again in the next process.
        killed = False
        last = None
        async for event in engine.submit(workers.job("c", steps=300)):
            if isinstance(event, Step) and not killed:
                killed = True
                os.kill(pid, signal.SIGKILL)
            last = event
        assert isinstance(last, Done)
        assert worker.pids != [pid]
        assert (engine.status().ready, engine.status().counts.restarts) == (True, 1)

        # While it is idle: the engine is not ready until the next process is.
        os.kill(worker.pids[0], signal.SIGKILL)
        await until(lambda: not runner.ready(), 5)
        assert not engine.status().ready
        again = [event async for event in engine.submit(workers.job("d"))][-1]
        assert again.images == image.images
        assert engine.status().counts.restarts == 2
        pids = worker.pids
        await engine.drain(1)
        await until(lambda: not any(map(_is_running, pids)), 5)

    asyncio.run(main())


async def _cancelling(engine, job):
    async for event in engine.submit(job):
        if isinstance(event, Step) and event.index == 1:
            engine.cancel(job.id, "delete")
        yield event


def _is_running(pid):
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, 0)
        return True
    return False


def test_a_process_that_cannot_load_says_why(tmp_path):
    runner = LocalRunner([workers.process(workers.settings(tmp_path / "absent"))])
    with pytest.raises(PipelineError, match="neither 'example' nor a folder"):
        asyncio.run(runner.start())


def test_a_group_of_two_ranks(folder):
    """Guidance is split between them: both compute every step, and stop together."""
    settings = workers.settings(folder, eager=False, techniques={"parallel": {"cfg": 2, "vae": None}})
    worker = workers.process(settings, ranks=2)
    job = workers.job(negative_prompt="blue", true_cfg=3.0)
    worker.load()
    try:
        assert len(worker.pids) == 2
        first = workers.of("a", workers.run(worker, job))[-1]
        long = dataclasses.replace(job, id="b", steps=500)
        events = []

        def emit(name, event):
            events.append((name, event))
            if event == Step(index=2, total=500):
                worker.cancel("b", "delete")

        worker.run([long], emit, lambda _name: None)
        stopped = workers.of("b", events)
        assert stopped[-1] == Cancelled(why="delete")
        assert sum(isinstance(event, Step) for event in stopped) < 400
        assert workers.of("a", workers.run(worker, job))[-1].images == first.images
        pipe = small_pipelines.flux(1, 1)
        refused = workers.of("a", workers.run(worker, dataclasses.replace(job, loras=("x",))))[-1]
        assert (type(refused), refused.code) == (Failed, "invalid_job")

        # One of the ranks is killed: the group ends as one.
        os.kill(worker.pids[1], signal.SIGKILL)
        with pytest.raises(WorkerDied):
            workers.run(worker, job)
        assert not worker.is_alive()
        assert not worker.pids
    finally:
        worker.close()
    reference = workers.library(
        type(pipe).from_pretrained(folder), job, negative_prompt="blue", true_cfg_scale=3.0
    ).astype(int)
    assert np.abs(workers.pixels(first).astype(int) - reference).max() <= 1


@pytest.mark.thorough
def test_a_spawned_process(folder):
    worker = ProcessWorker(workers.settings(folder))
    worker.load()
    assert isinstance(workers.of("a", workers.run(worker, workers.job()))[-1], Done)
    worker.close()
