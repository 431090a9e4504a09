"""Ray Serve: the same worker in a replica, without a cluster; with one in a thorough test."""

import asyncio

import numpy as np
import pytest
from ray import serve

from support import workers
from tritium.errors import ConfigError
from tritium.serve import ray_replicas
from tritium.serve.dispatch import Dispatcher
from tritium.serve.engine import Cancelled, Counts, Done, Step
from tritium.serve.ray_replicas import RayRunner, Replicas


def local(settings):
    application = ray_replicas.application(settings, Replicas())
    return lambda: serve.run(application, _local_testing_mode=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return workers.save(tmp_path_factory.mktemp("pipeline"))


async def _used(engine, stop_at=3):
    """An image, a cancelled job, and the image again."""
    first = [event async for event in engine.submit(workers.job())]
    events = []
    async for event in engine.submit(workers.job("b", steps=500)):
        if isinstance(event, Step) and event.index == stop_at:
            engine.cancel("b", "delete")
        events.append(event)
    async with asyncio.timeout(20):
        again = [event async for event in engine.submit(workers.job("c"))]
    assert [event.index for event in first if isinstance(event, Step)] == [1, 2, 3, 4]
    assert events[-1] == Cancelled(why="delete")
    assert again[-1].images == first[-1].images
    return first[-1]


def test_a_replica_without_a_cluster(folder):
    async def main():
        engine = Dispatcher(RayRunner(local(workers.settings(folder, batches=(1, 2)))))
        await engine.start()
        assert engine.models()[0].name == "tiny"
        done = await _used(engine)
        assert engine.status().ready
        assert engine.status().counts == Counts()
        await engine.drain(1)
        assert not engine.status().ready
        return done

    done = asyncio.run(main())
    reference = workers.worker()
    reference.load()
    assert np.array_equal(workers.pixels(done), workers.library(reference.pipe, workers.job()))


def test_a_cancelled_member_of_a_batch(folder):
    """Its events end at once, and the replica goes on with the other."""

    async def main():
        runner = RayRunner(local(workers.settings(folder)))
        await runner.start()
        events = []
        async for name, event in runner.run([workers.job("a"), workers.job("b", seed=4)]):
            if event == Step(index=2, total=4):
                runner.cancel("a", "deadline")
            events.append((name, event))
        await runner.stop()
        return events

    events = asyncio.run(main())
    assert workers.of("a", events)[-1] == Cancelled(why="deadline")
    assert isinstance(workers.of("b", events)[-1], Done)
    assert not any(event == Step(index=4, total=4) for name, event in events if name == "a")


@pytest.mark.parametrize("text", ["", "x", "2:1", "0", "1:2:3", "-1"])
def test_replicas_that_are_none(text):
    with pytest.raises(ConfigError, match="replicas"):
        Replicas.parse(text)


def test_ray_scales_between_the_replicas():
    application = ray_replicas.application(workers.settings("x"), Replicas.parse("0:3", gpus=1.0))
    deployment = application._bound_deployment
    scaling = deployment._deployment_config.autoscaling_config
    assert (scaling.min_replicas, scaling.initial_replicas, scaling.max_replicas) == (0, 1, 3)
    assert deployment.ray_actor_options == {"num_cpus": 1, "num_gpus": 1.0}


@pytest.mark.thorough
def test_a_local_cluster(folder, tmp_path):
    import ray

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:

        async def main():
            runner = ray_replicas.runner(workers.settings(folder), Replicas())
            engine = Dispatcher(runner)
            await engine.start()
            await _used(engine)
            # A replica whose process is killed: Ray starts another, and the job runs there.
            actors = ray.util.list_named_actors(all_namespaces=True)
            (replica,) = [actor for actor in actors if actor["name"].startswith("SERVE_REPLICA")]
            last, killed = None, False
            async for event in engine.submit(workers.job("d", steps=900)):
                if isinstance(event, Step) and not killed:
                    killed = True
                    ray.kill(ray.get_actor(replica["name"], replica["namespace"]))
                last = event
            assert isinstance(last, Done)
            assert engine.status().counts.restarts == 1
            await engine.drain(1)

        asyncio.run(main())
    finally:
        serve.shutdown()
        ray.shutdown()
