"""The app as HTTP: keys, foreign pages, limits, probes, metrics, background jobs, idempotency and clients that leave."""

import logging
import re
import subprocess
import sys

import pytest

from support.fake_runner import EDIT, GENERATE, FakeRunner, error_of, model, over_http, picture, served
from tritium import envs
from tritium.errors import ConfigError
from tritium.serve.settings import Settings

KEYS = ("key-of-ann-123", "key-of-bob-456")


def bearer(key):
    return {"authorization": f"Bearer {key}"}


def test_the_app_imports_no_torch():
    script = "import sys, tritium.serve.app, tritium.serve.dispatch; print(sorted({'torch', 'diffusers', 'numpy'} & set(sys.modules)))"
    ran = subprocess.run(
        [sys.executable, "-c", script],
        env=envs.child_environment({}),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert ran.stdout == "[]\n"


def test_probes_follow_the_engine():
    async def scenario(http, app):
        assert (await http.get("/healthz")).json() == {"status": "ok"}
        loading = await http.get("/readyz")
        assert (loading.status_code, loading.json()["why"]) == (503, "the model is loading and compiling")
        assert error_of(await http.post(GENERATE, json={"prompt": "x"})) == (503, "not_ready", None)
        await app.app.state.starting
        assert (await http.get("/readyz")).json() == {
            "ready": True,
            "why": "",
            "queued": 0,
            "queued_seconds": 0,
            "running": 0,
        }
        await app.app.state.drain()
        response = await http.post(GENERATE, json={"prompt": "x"})
        assert error_of(response) == (503, "draining", None)
        assert "retry-after" in response.headers
        assert (await http.get("/readyz")).json()["why"] == "the server is shutting down"
        assert app.runner.stopped

    over_http(scenario, FakeRunner(start=0.05), warm=False)


def test_a_start_that_fails_is_raised_where_it_is_awaited():
    class Broken(FakeRunner):
        async def start(self):
            raise RuntimeError("no such model")

    async def scenario(http, app):
        with pytest.raises(RuntimeError, match="no such model"):
            await app.app.state.starting
        assert (await http.get("/readyz")).status_code == 503

    logging.getLogger("tritium.serve").disabled = True
    try:
        over_http(scenario, Broken(), warm=False)
    finally:
        logging.getLogger("tritium.serve").disabled = False


def test_metrics_have_names_and_values():
    async def scenario(http, app):
        await http.post(GENERATE, json={"prompt": "a secret prompt", "tritium": {"steps": 3}})
        await http.post(GENERATE, json={"prompt": "x", "size": "1x1"})
        await http.get("/v1/videos/video_secret")
        text = (await http.get("/metrics")).text
        names = {line.split("{")[0].split(" ")[0] for line in text.splitlines() if not line.startswith("#")}
        assert all(name.startswith("tritium_") for name in names)
        values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        assert values['tritium_requests_total{route="/v1/images/generations",status="200"}'] == "1.0"
        assert values['tritium_errors_total{code="unsupported_size"}'] == "1.0"
        assert values['tritium_images_total{kind="image",model="tiny"}'] == "1.0"
        assert values['tritium_step_seconds_count{part="step"}'] == "1.0"
        for name in (
            "tritium_queue_seconds_count",
            "tritium_batch_size_count",
            'tritium_request_seconds_count{kind="image"}',
        ):
            assert values[name] == "1.0"
        # What the fake worker counts.
        counts = {"tritium_recompiles_total": "1.0", "tritium_violations_total": "2.0", "tritium_captures": "3.0"}
        assert {name: values[name] for name in counts} == counts
        assert (values["tritium_gpu_bytes"], values["tritium_ready"], values["tritium_running"]) == (
            "4.0",
            "1.0",
            "0.0",
        )
        assert "secret" not in text

    over_http(scenario)


def test_two_apps_count_apart():
    async def scenario(http, app):
        await http.post(GENERATE, json={"prompt": "x"})
        async with served() as other, other.http() as second:
            assert "tritium_images_total{" not in (await second.get("/metrics")).text
        assert "tritium_images_total{" in (await http.get("/metrics")).text

    over_http(scenario)


def test_keys_guard_the_api_but_not_the_probes():
    async def scenario(http, app):
        for headers in (
            {},
            bearer("key-of-eve-789"),
            bearer(""),
            {"authorization": KEYS[0]},
            {"authorization": f"Basic {KEYS[0]}"},
        ):
            for response in (
                await http.get("/v1/models", headers=headers),
                await http.post(GENERATE, json={"prompt": "x"}, headers=headers),
                await http.post(EDIT, files={"image": picture()}, data={"prompt": "x"}, headers=headers),
                await http.get("/v1/videos/video_x", headers=headers),
            ):
                assert error_of(response) == (401, "invalid_api_key", None)
                assert response.headers["x-should-retry"] == "false"
        for key in KEYS:
            assert (await http.get("/v1/models", headers=bearer(key))).status_code == 200
        for path in ("/healthz", "/readyz", "/metrics", "/"):
            assert (await http.get(path)).status_code == 200
        assert app.runner.batches == []

    over_http(scenario, settings=Settings(api_keys=KEYS, drain_seconds=0.1))


def test_every_key_is_compared_in_full(monkeypatch):
    compared = []
    from tritium.serve import auth

    original = auth.hmac.compare_digest
    monkeypatch.setattr(auth.hmac, "compare_digest", lambda *pair: compared.append(pair) or original(*pair))
    settings = Settings(api_keys=KEYS)
    for key in KEYS:
        compared.clear()
        auth.owner(settings, bearer(key))
        assert len(compared) == 2
        assert {len(side) for pair in compared for side in pair} == {32}


def test_jobs_of_another_key_do_not_exist():
    async def scenario(http, app):
        made = await http.post("/v1/videos", json={"prompt": "x", "model": "film"}, headers=bearer(KEYS[0]))
        path = f"/v1/videos/{made.json()['id']}"
        for call in (http.get(path, headers=bearer(KEYS[1])), http.delete(path, headers=bearer(KEYS[1]))):
            assert error_of(await call) == (404, "not_found", "id")
        assert (await http.get("/v1/videos", headers=bearer(KEYS[1]))).json()["data"] == []
        assert (await http.get(path, headers=bearer(KEYS[0]))).status_code == 200
        # 144 random bits.
        assert re.fullmatch(r"video_[\w-]{24}", made.json()["id"])

    over_http(scenario, settings=Settings(api_keys=KEYS, drain_seconds=0.1))


def test_the_queue_is_fair_between_keys_or_users():
    async def scenario(http, app):
        for user in ("ann", "bob", "ann"):
            await http.post(GENERATE, json={"prompt": "x", "user": user})
        await http.post(GENERATE, json={"prompt": "x", "safety_identifier": "ann", "user": "other"})
        keys = [batch[0].key for batch in app.runner.batches]
        assert keys[0] == keys[2] == keys[3] != keys[1]
        assert "ann" not in "".join(keys)

    over_http(scenario)

    async def by_key(http, app):
        for key, user in ((KEYS[0], "a"), (KEYS[0], "b"), (KEYS[1], "a")):
            await http.post(GENERATE, json={"prompt": "x", "user": user}, headers=bearer(key))
        keys = [batch[0].key for batch in app.runner.batches]
        assert keys[0] == keys[1] != keys[2]

    over_http(by_key, settings=Settings(api_keys=KEYS, drain_seconds=0.1))


def test_pages_of_other_sites_are_refused():
    async def scenario(http, app):
        body = {"prompt": "x"}
        response = await http.post(GENERATE, json=body, headers={"origin": "https://evil.example"})
        assert error_of(response) == (403, "wrong_origin", None)
        response = await http.post(EDIT, files={"image": picture()}, data=body, headers={"origin": "null"})
        assert error_of(response) == (403, "wrong_origin", None)
        assert error_of(await http.get("/v1/models", headers={"host": "rebound.example"})) == (403, "wrong_host", None)
        assert (await http.post(GENERATE, json=body, headers={"origin": "http://localhost"})).status_code == 200
        # A browser asks before it sends.
        asked = {"origin": "https://evil.example", "access-control-request-method": "POST"}
        assert error_of(await http.options(GENERATE, headers=asked)) == (403, "wrong_origin", None)

    over_http(scenario, settings=Settings(hosts=("localhost", "127.0.0.1"), drain_seconds=0.1))


def test_progress_is_sent_to_those_who_ask_for_it():
    async def scenario(http, app):
        body = {"prompt": "x", "stream": True, "tritium": {"progress": True, "previews": 4}}
        response = await http.post(GENERATE, json=body)
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.headers["cache-control"] == "no-store"
        names = re.findall("^event: (.*)$", response.text, re.MULTILINE)
        assert names[:2] == ["tritium.queued", "tritium.started"]
        assert names.count("tritium.step") == names.count("image_generation.partial_image") == 4
        assert names[-1] == "image_generation.completed"
        assert response.text.endswith("data: [DONE]\n\n")

    over_http(scenario)


def test_a_silent_stream_shows_signs_of_life():
    runner = FakeRunner(step=0.05)

    async def scenario(http, app):
        response = await http.post(GENERATE, json={"prompt": "x", "stream": True})
        assert response.text.count(": waiting\n\n") >= 3

    over_http(scenario, runner, Settings(heartbeat=0.03, drain_seconds=0.1))


def test_a_defect_of_the_server_tells_nothing(monkeypatch):
    from tritium.serve import routes

    def broken(*_args, **_kwargs):
        raise KeyError("a secret prompt")

    monkeypatch.setattr(routes, "accept", broken)

    async def scenario(http, app):
        http._transport.raise_app_exceptions = False
        response = await http.post(GENERATE, json={"prompt": "a secret prompt"})
        assert error_of(response) == (500, "internal", None)
        assert "secret" not in response.text

    over_http(scenario)


def test_prompts_are_in_no_log_and_no_repr(caplog):
    caplog.set_level(logging.DEBUG)

    async def scenario(http, app):
        body = {"prompt": "a secret prompt", "tritium": {"negative_prompt": "a secret fog"}}
        await http.post(GENERATE, json=body)
        await http.post(GENERATE, json={**body, "size": "1x1"})
        assert "secret" not in repr(app.runner.batches)

    over_http(scenario)
    assert "secret" not in caplog.text


def test_the_page_loads_nothing_from_elsewhere():
    async def scenario(http, app):
        response = await http.get("/")
        policy = response.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert (await http.get("/page.js")).headers["content-type"].startswith("text/javascript")
        for path in ("/", "/page.css", "/page.js"):
            text = (await http.get(path)).text
            assert len(text) > 500
            assert re.findall(r"https?://", text) == []
        for path in ("/docs", "/redoc"):
            assert (await http.get(path)).status_code == 404

    over_http(scenario)


def test_headers_of_every_response():
    async def scenario(http, app):
        for response in (await http.get("/"), await http.get("/v1/models"), await http.get("/nowhere")):
            assert response.headers["x-content-type-options"] == "nosniff"
            assert int(response.headers["openai-processing-ms"]) >= 0
            assert "cache-control" in response.headers

    over_http(scenario)


@pytest.mark.parametrize("wrong", [{"api_keys": ("short",)}, {"timeout": 0}, {"max_pixels": -1}])
def test_settings_that_make_no_sense_are_refused(wrong):
    with pytest.raises(ConfigError):
        Settings(**wrong)


def test_requests_after_the_first_model_need_no_name():
    async def scenario(http, app):
        assert (await http.post(GENERATE, json={"prompt": "x"})).json()["tritium"]["model"] == "a"
        assert (await http.post(GENERATE, json={"prompt": "x", "model": "b"})).json()["tritium"]["model"] == "b"

    over_http(scenario, FakeRunner(model(name="a"), model(name="b")))
