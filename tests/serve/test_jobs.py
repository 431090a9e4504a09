"""Jobs that outlive their clients, and clients that leave: background, idempotency keys, expiry, deletion."""

import asyncio
import random

from support.fake_runner import GENERATE, FakeRunner, error_of, model, over_http, picture, until, video_model
from tritium.serve.engine import Failed
from tritium.serve.settings import Settings


def test_a_client_that_leaves_stops_its_job():
    async def scenario(http, app):
        for body in ({"prompt": "x"}, {"prompt": "x", "stream": True, "partial_images": 1}):
            ran = app.runner.steps_run
            request = asyncio.ensure_future(http.post(GENERATE, json={**body, "tritium": {"steps": 50}}))
            await until(lambda ran=ran: app.runner.steps_run >= ran + 2)
            request.cancel()
            await until(lambda: not app.engine.status().running)
            assert app.runner.steps_run < ran + 10
        assert 'tritium_cancelled_total{why="disconnect"} 2.0' in (await http.get("/metrics")).text

    over_http(scenario)


def test_a_background_job_survives_its_client():
    runner = FakeRunner()
    runner.gate.clear()

    async def scenario(http, app):
        body = {"prompt": "x", "tritium": {"background": True, "seed": 3}}
        response = await http.post(GENERATE, json=body)
        assert response.status_code == 202
        job = response.json()
        assert (job["object"], job["result"], job["error"]) == ("job", None, None)
        path = f"/v1/jobs/{job['id']}"
        assert (await http.get(path)).json()["status"] == "in_progress"
        runner.gate.set()
        await until(lambda: not app.engine.status().running)
        done = (await http.get(path)).json()
        assert (done["status"], done["progress"], done["result"]["tritium"]["seed"]) == ("completed", 100, 3)
        listed = (await http.get("/v1/jobs")).json()
        assert [(entry["id"], entry["result"]) for entry in listed["data"]] == [(job["id"], None)]
        assert (await http.delete(path)).json() == {"id": job["id"], "object": "job.deleted", "deleted": True}
        assert (await http.get(path)).status_code == 404

    over_http(scenario, runner)


def test_delete_stops_a_request_that_is_waited_for():
    async def scenario(http, app):
        request = asyncio.ensure_future(http.post(GENERATE, json={"prompt": "x", "tritium": {"steps": 50}}))
        await until(lambda: app.runner.steps_run >= 2)
        job_id = app.runner.batches[0][0].id.removesuffix("/0")
        await http.delete(f"/v1/jobs/{job_id}")
        response = await request
        assert error_of(response) == (409, "cancelled", None)
        # OpenAI's client would send a 409 again.
        assert response.headers["x-should-retry"] == "false"
        assert response.headers["x-request-id"] == job_id

    over_http(scenario)


def test_results_expire_and_have_a_limit():
    async def scenario(http, app):
        body = {"prompt": "x", "tritium": {"background": True}}
        ids = []
        for _ in range(3):
            ids.append((await http.post(GENERATE, json=body)).json()["id"])
            await until(lambda: not app.engine.status().running)
        await asyncio.sleep(0)
        # Two of the jobs fit into the bytes that are kept.
        assert [(await http.get(f"/v1/jobs/{job_id}")).status_code for job_id in ids] == [404, 200, 200]
        await asyncio.sleep(1.1)
        assert [(await http.get(f"/v1/jobs/{job_id}")).status_code for job_id in ids] == [404, 404, 404]

    over_http(
        scenario, settings=Settings(keep_seconds=1.0, keep_bytes=int(2.5 * (4096 + len(picture()))), drain_seconds=0.1)
    )


def test_an_idempotency_key_means_one_job():
    async def scenario(http, app):
        async def send(key, prompt="x"):
            return await http.post(GENERATE, json={"prompt": prompt}, headers={"idempotency-key": key})

        same = await asyncio.gather(*(send("k1") for _ in range(5)))
        again = await send("k1")
        assert len({response.json()["tritium"]["id"] for response in (*same, again)}) == 1
        assert len(app.runner.batches) == 1
        assert error_of(await send("k1", "another")) == (400, "idempotency_mismatch", "Idempotency-Key")
        await send("k2")
        assert len(app.runner.batches) == 2

    over_http(scenario)


def test_a_retry_finds_the_job_of_a_client_that_left():
    async def scenario(http, app):
        body, headers = {"prompt": "x", "tritium": {"steps": 40}}, {"idempotency-key": "k"}
        first = asyncio.ensure_future(http.post(GENERATE, json=body, headers=headers))
        await until(lambda: app.runner.steps_run >= 2)
        first.cancel()
        assert (await http.post(GENERATE, json=body, headers=headers)).status_code == 200
        assert len(app.runner.batches) == 1
        # Without a retry it is stopped after the grace.
        body["prompt"], headers["idempotency-key"] = "y", "other"
        left = asyncio.ensure_future(http.post(GENERATE, json=body, headers=headers))
        app.runner.step = 0.02
        await until(lambda: len(app.runner.batches) == 2)
        left.cancel()
        await until(lambda: not app.engine.status().running)
        assert app.runner.steps_run < 40 + 35

    over_http(scenario, settings=Settings(grace=0.3, drain_seconds=0.1))


def test_a_failed_job_is_not_kept_by_its_key():
    runner = FakeRunner()
    runner.faults = [(lambda batch: True, Failed(code="internal", message="rays", retry=True))]

    async def scenario(http, app):
        async def send():
            return (await http.post(GENERATE, json={"prompt": "x"}, headers={"idempotency-key": "k"})).status_code

        assert await send() == 500
        runner.faults = []
        assert await send() == 200

    over_http(scenario, runner)


def test_fifty_requests_with_random_cancels_leave_nothing():
    runner = FakeRunner(model(batches={(64, 64): (2, 4)}, seconds={(64, 64): 0.05}), video_model(), slots=2)
    runner.faults = [(lambda batch: any(job.seed % 11 == 0 for job in batch), Failed(code="internal", message="rays"))]
    dice = random.Random(7)

    def body():
        options = {"steps": dice.choice((4, 8)), "seed": dice.randrange(100), "previews": 1, "background": False}
        kind = dice.choice(("plain", "stream", "video", "background"))
        if kind == "video":
            return "/v1/videos", {"prompt": "x", "model": "film", "seed": options["seed"]}
        options["background"] = kind == "background"
        return GENERATE, {"prompt": "x", "n": dice.choice((1, 2)), "stream": kind == "stream", "tritium": options}

    async def scenario(http, app):
        async def send():
            path, sent = body()
            await asyncio.sleep(dice.random() * 0.1)
            request = asyncio.ensure_future(http.post(path, json=sent))
            if dice.random() < 0.4:
                await asyncio.sleep(dice.random() * 0.05)
                request.cancel()
            response = (await asyncio.gather(request, return_exceptions=True))[0]
            if not isinstance(response, BaseException):
                assert response.status_code in (200, 202, 500), response.text
                if dice.random() < 0.3 and "x-request-id" in response.headers:
                    await http.delete(
                        f"{'/v1/videos' if path == '/v1/videos' else '/v1/jobs'}/{response.headers['x-request-id']}"
                    )

        await asyncio.gather(*(send() for _ in range(50)))
        await until(lambda: not app.engine.status().running and not app.engine.status().queued)
        assert app.engine._tickets == {}
        await app.app.state.drain()
        # Tasks that were cancelled need a turn of the loop to end.
        await until(lambda: asyncio.all_tasks() == {asyncio.current_task()})

    over_http(scenario, runner)
