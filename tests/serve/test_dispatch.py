"""The dispatcher over a runner of plain Python: events, batches, failures, cancellation, deadlines and drain."""

import asyncio

import pytest

from support.fake_runner import STEP, FakeRunner, model, result, until
from tritium.serve.dispatch import Dispatcher
from tritium.serve.engine import Cancelled, Done, Failed, Job, Preview, Queued, Refused, Started, Step, WorkerDied
from tritium.serve.queue import Limits

# A step is estimated as a quarter of a second, so that a batch is worth 5 ms of waiting.
BATCHED = {"batches": {(64, 64): (2, 4)}, "seconds": {(64, 64): 1.0}}
MEMORY = Failed(code="out_of_memory", message="no memory")


def job(name, **changes):
    return Job(
        **{"id": name, "model": "tiny", "prompt": "", "width": 64, "height": 64, "steps": 4, "seed": 5, **changes}
    )


def play(scenario, runner=None, limits=None):
    """Run a scenario with a started dispatcher, and check that nothing of it is left."""

    async def whole():
        engine = Dispatcher(runner or FakeRunner(), limits)
        await engine.start()
        async with asyncio.timeout(10):
            await scenario(engine)
            await engine.drain(1)
        assert engine.status().queued == engine.status().running == 0
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(whole())


async def finished(events):
    return [event async for event in events]


def gather(*streams):
    return asyncio.gather(*(finished(events) for events in streams))


def kinds(events):
    return [type(event).__name__ for event in events]


def together(engine, runner, *jobs):
    """Submit jobs while another one has the only slot, so that they wait for it together."""
    runner.gate.clear()
    engine.submit(job("first", width=96))
    streams = [engine.submit(each) for each in jobs]
    runner.gate.set()
    return streams


def sizes(runner):
    """Return the sizes of the batches after that job."""
    return [len(batch) for batch in runner.batches if batch[0].width == 64]


def test_the_events_of_one_image():
    async def scenario(engine):
        events = await finished(engine.submit(job("a", partial_images=1)))
        assert kinds(events) == ["Queued", "Started", "Step", "Preview", "Step", "Step", "Step", "Done"]
        assert [event for event in events if isinstance(event, Step)] == [Step(index=i, total=4) for i in (1, 2, 3, 4)]
        facts = events[-1].facts
        assert (facts["batched"], facts["way"]) == (1, "fake")
        assert facts["queue_seconds"] < 1
        assert facts["seconds"] >= 4 * STEP
        assert set(facts["parts"]) == {"start", "step", "end"}
        assert facts["parts"]["step"] >= STEP

    play(scenario)


def test_images_of_a_job_come_in_their_order():
    runner = FakeRunner(model(**{**BATCHED, "batches": {(64, 64): (2,)}}), slots=2)

    async def scenario(engine):
        events = await finished(engine.submit(job("a", n=3, partial_images=2)))
        seeds = [single.seed for batch in runner.batches for single in batch]
        assert sorted(seeds) == [5, 6, 7]
        assert [len(batch) for batch in runner.batches] == [2, 1]
        assert events[-1].images == tuple(result(job("x", seed=seed)) for seed in (5, 6, 7))
        assert events[-1].facts["batched"] == 2
        steps = [event for event in events if isinstance(event, Step)]
        assert [event.index for event in steps] == list(range(1, 13))
        assert {event.total for event in steps} == {12}
        previews = {(event.image_index, event.index) for event in events if isinstance(event, Preview)}
        assert previews == {(image, index) for image in range(3) for index in range(2)}
        assert kinds(events).count("Started") == 1

    play(scenario, runner)


def test_jobs_are_batched_where_it_was_measured_to_pay():
    runner = FakeRunner(model(**BATCHED))

    async def scenario(engine):
        done = await gather(*together(engine, runner, *(job(str(i), seed=i) for i in range(4))))
        assert [events[-1].facts["batched"] for events in done] == [4] * 4
        assert sizes(runner) == [4]
        lonely = await finished(engine.submit(job("lonely")))
        assert lonely[-1].facts["batched"] == 1

    play(scenario, runner)


def test_a_failed_batch_is_split_and_run_once_singly():
    runner = FakeRunner(model(**BATCHED))
    runner.faults = [
        (lambda batch: any(single.seed == 13 for single in batch), Failed(code="internal", message="seed 13"))
    ]

    async def scenario(engine):
        done = await gather(*together(engine, runner, *(job(str(seed), seed=seed) for seed in (11, 12, 13, 14))))
        assert [kinds(events)[-1] for events in done] == ["Done", "Done", "Failed", "Done"]
        assert sizes(runner) == [4, 1, 1, 1, 1]
        # Steps that ran twice are told once.
        assert [event.index for event in done[0] if isinstance(event, Step)] == list(range(1, 5))
        assert kinds(done[0]).count("Started") == 1

    play(scenario, runner)


def test_out_of_memory_removes_the_batch_size():
    runner = FakeRunner(model(**BATCHED))
    runner.faults = [(lambda batch: len(batch) > 2, MEMORY)]

    async def scenario(engine):
        done = await gather(*together(engine, runner, *(job(str(i)) for i in range(4))))
        assert {kinds(events)[-1] for events in done} == {"Done"}
        assert sizes(runner) == [4, 1, 1, 1, 1]
        await gather(*together(engine, runner, *(job(f"again{i}") for i in range(4))))
        assert sizes(runner)[5:] == [2, 2]

    play(scenario, runner)


def test_one_image_without_memory_fails_at_once():
    runner = FakeRunner()
    runner.faults = [(lambda batch: True, MEMORY)]

    async def scenario(engine):
        assert (await finished(engine.submit(job("a"))))[-1] == MEMORY
        assert len(runner.batches) == 1
        # The other images of the job are not computed for nothing.
        assert (await finished(engine.submit(job("b", n=4))))[-1] == MEMORY
        assert len(runner.batches) == 2

    play(scenario, runner)


def test_a_worker_that_died_is_waited_for():
    runner = FakeRunner(model(**BATCHED))
    died = (lambda batch: True, WorkerDied("signal 9"))
    runner.faults = [died]

    async def scenario(engine):
        streams = [engine.submit(job(str(i), n=2, steps=40)) for i in range(2)]
        waiting = asyncio.ensure_future(gather(*streams))
        await until(lambda: runner.batches)
        runner.faults = []
        await asyncio.sleep(0)
        assert (engine.status().ready, engine.status().why) == (False, "the worker restarts")
        done = await waiting
        assert {kinds(events)[-1] for events in done} == {"Done"}
        assert engine.status().counts.restarts == 1
        assert engine.status().ready

    play(scenario, runner)


def test_a_job_that_kills_two_workers_fails_for_good():
    runner = FakeRunner()
    runner.faults = [(lambda batch: batch[0].seed == 13, WorkerDied("signal 9"))]

    async def scenario(engine):
        bad, good = await gather(engine.submit(job("bad", seed=13)), engine.submit(job("good")))
        assert bad[-1] == Failed(code="worker_died", message="the worker ended: signal 9", retry=False)
        assert isinstance(good[-1], Done)
        assert [batch[0].id for batch in runner.batches] == ["bad/0", "bad/0", "good/0"]

    play(scenario, runner)


@pytest.mark.parametrize("fault", [RuntimeError("a defect"), None])
def test_a_runner_that_breaks_its_promise_fails_the_job(fault):
    class Silent(FakeRunner):
        async def run(self, batch):
            yield batch[0].id, Started()
            if fault:
                raise fault

    async def scenario(engine):
        last = (await finished(engine.submit(job("a"))))[-1]
        assert last.code == "internal"
        assert ("a defect" if fault else "without a result") in last.message

    play(scenario, Silent())


def test_cancel_ends_a_running_job_within_a_step():
    runner = FakeRunner()

    async def scenario(engine):
        events = engine.submit(job("a", steps=50))
        assert isinstance(await anext(events), Queued)
        await until(lambda: runner.steps_run >= 3)
        assert engine.cancel("a", "delete")
        ran = runner.steps_run
        assert (await finished(events))[-1] == Cancelled(why="delete")
        await until(lambda: not engine.status().running)
        assert runner.steps_run <= ran + 1
        assert not engine.cancel("a", "delete")

    play(scenario, runner)


def test_cancel_does_not_harm_the_batch():
    runner = FakeRunner(model(**BATCHED))

    async def scenario(engine):
        waiting = asyncio.ensure_future(gather(*together(engine, runner, *(job(str(i), steps=40) for i in range(2)))))
        await until(lambda: runner.steps_run >= 6)
        engine.cancel("0", "disconnect")
        first, second = await waiting
        assert first[-1] == Cancelled(why="disconnect")
        assert isinstance(second[-1], Done)
        assert len([event for event in second if isinstance(event, Step)]) == 40
        assert sizes(runner) == [2]

    play(scenario, runner)


def test_a_cancelled_job_leaves_the_queue():
    runner = FakeRunner()
    runner.gate.clear()

    async def scenario(engine):
        first, second = engine.submit(job("a")), engine.submit(job("b", n=2))
        assert engine.status().queued == 2
        engine.cancel("b", "delete")
        assert engine.status().queued == 0
        runner.gate.set()
        done = await gather(first, second)
        assert [kinds(events)[-1] for events in done] == ["Done", "Cancelled"]
        assert len(runner.batches) == 1

    play(scenario, runner)


def test_a_client_that_stops_listening_stops_its_job():
    runner = FakeRunner()

    async def scenario(engine):
        events = engine.submit(job("a", steps=50))
        await anext(events)
        await events.aclose()
        await until(lambda: not engine.status().running)
        assert runner.steps_run < 5

    play(scenario, runner)


def test_a_deadline_stops_what_runs_and_what_waits():
    runner = FakeRunner(model(seconds={(64, 64): 0.001}))
    runner.gate.clear()

    async def scenario(engine):
        running, waiting = engine.submit(job("a", timeout=0.05)), engine.submit(job("b", timeout=0.05))
        done = await gather(running, waiting)
        assert [events[-1] for events in done] == [Cancelled(why="deadline")] * 2
        runner.gate.set()
        await until(lambda: not engine.status().running)
        assert len(runner.batches) == 1

    play(scenario, runner)


def test_a_full_queue_refuses_and_recovers():
    runner = FakeRunner()
    runner.gate.clear()

    async def scenario(engine):
        streams = [engine.submit(job(str(i))) for i in range(3)]
        with pytest.raises(Refused, match="the queue is full"):
            engine.submit(job("surplus"))
        assert (engine.status().ready, engine.status().why) == (False, "the queue is full")
        runner.gate.set()
        await gather(*streams)
        assert engine.status().ready

    play(scenario, runner, Limits(length=2))


def test_slots_run_at_the_same_time():
    runner = FakeRunner(slots=3)
    runner.gate.clear()

    async def scenario(engine):
        streams = [engine.submit(job(str(i))) for i in range(5)]
        await asyncio.sleep(0)
        assert (engine.status().running, engine.status().queued) == (3, 2)
        runner.gate.set()
        await gather(*streams)

    play(scenario, runner)


def test_nothing_is_taken_before_the_start_and_after_a_drain():
    async def scenario(engine):
        early = Dispatcher(FakeRunner())
        with pytest.raises(Refused, match="still loading") as refused:
            early.submit(job("a"))
        assert (refused.value.code, early.models(), early.status().ready) == ("not_ready", (), False)
        await engine.drain(1)
        with pytest.raises(Refused, match="shutting down") as refused:
            engine.submit(job("b"))
        assert refused.value.code == "draining"

    play(scenario)


def test_drain_finishes_jobs_and_cancels_slow_ones():
    runner = FakeRunner()

    async def scenario(engine):
        quick, slow = engine.submit(job("a")), engine.submit(job("b", steps=50))
        runner.step = 0.02
        waiting = asyncio.ensure_future(gather(quick, slow))
        await engine.drain(0.5)
        done = await waiting
        assert isinstance(done[0][-1], Done)
        assert done[1][-1] == Cancelled(why="shutdown")
        assert runner.stopped

    play(scenario, runner)
