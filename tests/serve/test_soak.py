"""Many mixed requests with random cancellations, through the queue to the pipeline: nothing hangs, nothing is left."""

import asyncio
import contextlib
import gc
import random
import weakref

import pytest
import torch

from support import workers
from tritium.serve.dispatch import Dispatcher
from tritium.serve.engine import LAST, Cancelled, Done, Refused, Step
from tritium.serve.queue import Limits
from tritium.serve.runner import LocalRunner

REQUESTS = 50


def mixed(number, random_):
    """A request of any kind: several images, edits, guidance, previews, other lengths."""
    changes = random_.choice(
        [
            {},
            {"n": 3},
            {"steps": 9, "partial_images": 2},
            {"negative_prompt": "blue", "true_cfg": 2.0},
            {"kind": "edit", "images": (workers.upload(),)},
            {"kind": "edit", "images": (workers.upload(),), "mask": workers.upload(255, "L")},
            {"loras": ("absent",)},
            {"output_format": "webp", "fidelity": "exact"},
        ]
    )
    return workers.job(f"job-{number}", seed=number, key=random_.choice("ab"), **changes)


async def used(engine, job, random_):
    """Submit a job; in half of the cases leave, cancel it, or give it a deadline, at a random time."""
    await asyncio.sleep(random_.random() * 0.3)
    fate = random_.choice(["stay", "stay", "leave", "cancel"])
    until = random_.randrange(8)
    last = None
    events = engine.submit(job)
    async with contextlib.aclosing(events):
        async for event in events:
            last = event
            if isinstance(event, Step) and event.index >= until and fate == "leave":
                return Cancelled(why="disconnect")
            if isinstance(event, Step) and event.index >= until and fate == "cancel":
                engine.cancel(job.id, "delete")
    return last


async def rounds(engine, number):
    random_ = random.Random(number)
    jobs = [mixed(index, random_) for index in range(REQUESTS)]
    outcomes = await asyncio.gather(*(used(engine, job, random_) for job in jobs), return_exceptions=True)
    assert all(isinstance(outcome, (*LAST, Refused)) for outcome in outcomes), outcomes
    return outcomes


def tensors():
    gc.collect()
    return [entry for entry in gc.get_objects() if isinstance(entry, torch.Tensor)]


@pytest.fixture
def count():
    """Count the tensors that exist now and did not before this test: those of other tests go at any moment."""
    others = {id(tensor): weakref.ref(tensor) for tensor in tensors()}
    return lambda: sum(id(own) not in others or others[id(own)]() is not own for own in tensors())


@pytest.mark.parametrize("lanes", [pytest.param(1, marks=pytest.mark.thorough), 2])
def test_mixed_requests_with_random_cancellations(lanes, count):
    async def main():
        runner = LocalRunner([workers.worker(batches=(1, 2, 4)) for _ in range(lanes)])
        engine = Dispatcher(runner, Limits(length=200))
        await engine.start()
        reference = [event async for event in engine.submit(workers.job("first"))][-1]
        await rounds(engine, 0)
        alive = []
        async with asyncio.timeout(120):
            for number in (1, 2, 3):
                outcomes = await rounds(engine, number)
                assert {Done, Cancelled} <= {type(outcome) for outcome in outcomes}
                while runner._running:
                    await asyncio.sleep(0.01)
                alive.append(count())
        status = engine.status()
        assert (status.queued, status.running, status.ready) == (0, 0, True)
        assert not runner._cancelled
        assert len(asyncio.all_tasks()) == 1
        # Callbacks of the last batch may be alive at some of these moments, but nothing adds up.
        assert max(alive) - min(alive) < 50, alive
        again = [event async for event in engine.submit(workers.job("last"))][-1]
        assert again.images == reference.images
        await engine.drain(1)

    asyncio.run(main())
