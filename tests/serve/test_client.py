"""OpenAI's own client against the app in process: every field, default, error and event, retries, and video jobs."""

import asyncio
import base64
import io
import time

import openai
import pytest
from PIL import Image

from support.fake_runner import FakeRunner, model, picture, served, until, video_model
from tritium.serve.engine import Failed, WorkerDied
from tritium.serve.queue import Limits
from tritium.serve.settings import Settings

pytestmark = pytest.mark.filterwarnings("ignore:The Sora API")


def play(scenario, runner=None, settings=None, limits=None, **options):
    """Run a scenario with an app and a client of it."""

    async def whole():
        async with asyncio.timeout(20), served(runner, settings, limits) as app, app.client(**options) as client:
            return await scenario(client, app)

    return asyncio.run(whole())


def decoded(text):
    return Image.open(io.BytesIO(base64.b64decode(text)))


async def refused(call):
    with pytest.raises(openai.APIStatusError) as error:
        await call
    return error.value


def test_an_image_with_defaults():
    async def scenario(client, app):
        response = await client.images.generate(prompt="a red boat")
        assert [decoded(image.b64_json).size for image in response.data] == [(64, 64)]
        assert (response.size, response.output_format, response.background) == ("64x64", "png", "opaque")
        assert (response.quality, response.safety_identifier) == (None, None)
        assert abs(response.created - time.time()) < 60
        assert response.usage.model_dump(exclude_none=True) == {
            "input_tokens": 3,
            "output_tokens": 16,
            "total_tokens": 19,
            "input_tokens_details": {"image_tokens": 0, "text_tokens": 3},
        }
        job = app.runner.batches[0][0]
        assert (job.model, job.steps, job.guidance, job.fidelity) == ("tiny", 4, None, None)
        # The client's read timeout is the deadline.
        assert job.timeout == 600
        assert response._request_id == response.tritium["id"] == job.id.removesuffix("/0")
        assert response.tritium["seed"] == job.seed
        assert {"batched", "seconds", "queue_seconds", "parts", "model", "steps"} <= set(response.tritium)

    play(scenario)


def test_every_field_of_a_generation():
    async def scenario(client, app):
        response = await client.images.generate(
            prompt="a boat",
            model="tiny",
            n=2,
            size="96x64",
            quality="low",
            output_format="webp",
            output_compression=70,
            background="opaque",
            moderation="low",
            response_format="b64_json",
            safety_identifier="user-1",
            extra_body={
                "tritium": {
                    "guidance_scale": 3,
                    "negative_prompt": "fog",
                    "seed": 9,
                    "loras": [{"name": "pastel", "scale": 0.5}, {"name": "ink"}],
                    "fidelity": "close",
                    "recipe": "fast",
                    "priority": 3,
                    "timeout": 30.5,
                }
            },
        )
        assert [decoded(image.b64_json).format for image in response.data] == ["WEBP", "WEBP"]
        assert (response.quality, response.size, response.safety_identifier) == ("low", "96x64", "user-1")
        jobs = [job for batch in app.runner.batches for job in batch]
        assert [job.seed for job in jobs] == [9, 10]
        job = jobs[0]
        assert (job.size, job.steps, job.compression, job.guidance) == ((96, 64), 2, 70, 3.0)
        assert (job.negative_prompt, job.fidelity, job.recipe, job.priority) == ("fog", "close", "fast", 3)
        assert [(lora.name, lora.scale) for lora in job.loras] == [("ink", 1.0), ("pastel", 0.5)]
        assert job.timeout == 30.5
        assert response.tritium["loras"] == [{"name": "ink", "scale": 1.0}, {"name": "pastel", "scale": 0.5}]
        assert (response.tritium["fidelity"], response.tritium["recipe"]) == ("close", "fast")

    play(scenario)


@pytest.mark.parametrize(
    "body",
    [
        {
            "num_inference_steps": 3,
            "guidance_scale": 2.5,
            "negative_prompt": "fog",
            "seed": 4,
            "width": 96,
            "height": 64,
        },
        {"tritium": {"steps": 3, "guidance_scale": 2.5, "negative_prompt": "fog", "seed": 4}, "size": "96x64"},
        {
            "num_inference_steps": 3,
            "seed": 4,
            "size": "96*64",
            "tritium": {"seed": 4, "guidance_scale": 2.5, "negative_prompt": "fog"},
        },
    ],
)
def test_names_of_other_servers_mean_the_same(body):
    async def scenario(client, app):
        await client.images.generate(prompt="x", extra_body={**body, "lora": {"name": "ink", "scale": 0.3}})
        job = app.runner.batches[0][0]
        assert (job.steps, job.guidance, job.negative_prompt, job.seed, job.size) == (3, 2.5, "fog", 4, (96, 64))
        assert job.loras[0].scale == 0.3

    play(scenario)


def test_a_stream_has_previews_and_the_image():
    async def scenario(client, app):
        stream = await client.images.generate(prompt="a boat", stream=True, partial_images=2, quality="high")
        events = [event async for event in stream]
        assert [event.type for event in events] == ["image_generation.partial_image"] * 2 + [
            "image_generation.completed"
        ]
        assert [type(event).__name__ for event in events] == ["ImageGenPartialImageEvent"] * 2 + [
            "ImageGenCompletedEvent"
        ]
        for event in events:
            # Every required field is there: the client's own models accept them.
            type(event).model_validate(event.model_dump(), strict=True)
            assert (event.size, event.quality, event.background) == ("64x64", "high", "opaque")
        assert [event.partial_image_index for event in events[:2]] == [0, 1]
        assert events[0].tritium == {"preview": True, "step": 1, "image": 0}
        assert decoded(events[0].b64_json).size == (8, 8)
        assert decoded(events[-1].b64_json).size == (64, 64)
        assert events[-1].usage.output_tokens == 16
        assert events[-1].tritium["fidelity"] == "exact"

    play(scenario)


def test_a_stream_without_previews_is_one_event():
    async def scenario(client, app):
        stream = await client.images.generate(prompt="a boat", n=2, stream=True, safety_identifier="me")
        events = [event async for event in stream]
        assert [event.type for event in events] == ["image_generation.completed"] * 2
        assert [event.tritium["image"] for event in events] == [0, 1]
        assert events[0].safety_identifier == "me"

    play(scenario)


def test_a_failure_in_a_stream_raises_in_the_client():
    runner = FakeRunner()
    runner.faults = [(lambda batch: True, Failed(code="internal", message="it broke"))]

    async def scenario(client, app):
        stream = await client.images.generate(prompt="a boat", stream=True, partial_images=1)
        with pytest.raises(openai.APIError, match="it broke") as error:
            [event async for event in stream]
        assert (error.value.code, error.value.type) == ("internal", "server_error")

    play(scenario, runner)


def test_an_edit_with_a_mask():
    async def scenario(client, app):
        mask = picture((0, 0, 0, 0), mode="RGBA")
        images = [picture("red"), picture("blue", image_format="JPEG")]
        extra = {"tritium": {"steps": 2, "loras": [{"name": "ink", "scale": 0.5}]}, "seed": 3}
        response = await client.images.edit(prompt="make it night", image=images, mask=mask, extra_body=extra)
        job = app.runner.batches[0][0]
        assert (job.kind, job.images, job.mask, job.steps, job.seed) == ("edit", tuple(images), mask, 2, 3)
        assert job.loras[0].name == "ink"
        assert response.usage.input_tokens_details.image_tokens == 2 * 16
        stream = await client.images.edit(
            prompt="again", image=("a.png", picture()), stream=True, partial_images=1, n=1
        )
        events = [event async for event in stream]
        assert [type(event).__name__ for event in events] == ["ImageEditPartialImageEvent", "ImageEditCompletedEvent"]

    play(scenario)


def test_an_edit_takes_the_size_nearest_to_its_image():
    async def scenario(client, app):
        response = await client.images.edit(prompt="x", image=picture(size=(300, 190)))
        assert response.size == "96x64"
        assert (await client.images.edit(prompt="x", image=picture(size=(300, 290)))).size == "64x64"

    play(scenario)


def test_the_errors_of_wrong_fields():
    async def scenario(client, app):
        for arguments, param, words in (
            ({"size": "32x32"}, "size", "not among the sizes that model 'tiny' was compiled for: 64x64, 96x64"),
            ({"size": "big"}, "size", "is not WIDTHxHEIGHT"),
            ({"n": 11}, "n", "less than or equal to 10"),
            ({"quality": "max"}, "quality", "there are: auto, high, low"),
            ({"background": "transparent"}, "background", "opaque"),
            ({"response_format": "url"}, "response_format", "b64_json"),
            ({"output_format": "svg"}, "output_format", "png, jpeg or webp"),
            ({"output_compression": 50}, "output_compression", "png is lossless"),
            ({"style": "vivid"}, "style", "in the prompt"),
            ({"partial_images": 2}, "partial_images", "stream=true"),
            ({"partial_images": 4, "stream": True}, "partial_images", "less than or equal to 3"),
            ({"extra_body": {"tritium": {"step": 3}}}, "tritium.step", "did you mean 'steps'?"),
            ({"extra_body": {"tritium": {"steps": "3"}}}, "tritium.steps", "valid integer"),
            ({"extra_body": {"tritium": {"steps": 51}}}, "tritium.steps", "at most 50"),
            ({"extra_body": {"tritium": {"fidelity": "fast"}}}, "tritium.fidelity", "configured: exact, close"),
            ({"extra_body": {"tritium": {"recipe": "/etc/passwd"}}}, "tritium.recipe", "configured: fast"),
            ({"extra_body": {"tritium": {"true_cfg_scale": 2}}}, "true_cfg_scale", "takes no true_cfg_scale"),
            ({"extra_body": {"seed": 1, "tritium": {"seed": 2}}}, "seed", "differ"),
            ({"extra_body": {"seed": -1}}, "seed", "greater than or equal to 0"),
            ({"extra_body": {"flow_shift": 3.0}}, "flow_shift", "schedule"),
            ({"extra_body": {"reference_url": "http://x"}}, "reference_url", "no parameter"),
            ({"extra_body": {"width": 64}}, "width", "send both"),
            ({"prompt": ""}, "prompt", "at least 1 character"),
            ({"prompt": "x" * 32001}, "prompt", "at most 32000 characters"),
        ):
            error = await refused(client.images.generate(**{"prompt": "x", **arguments}))
            assert isinstance(error, openai.BadRequestError), arguments
            assert (error.param, error.type) == (param, "invalid_request_error"), arguments
            assert words in str(error), arguments
            assert error.response.headers["x-should-retry"] == "false"
        assert app.runner.batches == []

    play(scenario)


def test_what_does_not_exist_is_not_found():
    async def scenario(client, app):
        error = await refused(client.images.generate(prompt="x", model="gpt-image-2"))
        assert isinstance(error, openai.NotFoundError)
        assert (error.code, error.param) == ("model_not_found", "model")
        error = await refused(client.images.generate(prompt="x", extra_body={"lora": {"name": "inc"}}))
        assert (error.status_code, error.code) == (404, "lora_not_found")
        assert "did you mean 'ink'?" in str(error)
        error = await refused(client.images.generate(prompt="x", model="film"))
        assert (error.status_code, error.code) == (400, "unsupported_kind")
        for call in (client.videos.retrieve("video_x"), client.videos.delete("video_x"), client.models.retrieve("no")):
            assert (await refused(call)).status_code == 404
        error = await refused(client.images.create_variation(image=picture()))
        assert (error.status_code, error.code) == (404, "not_found")

    play(scenario)


def test_models_list_their_promises():
    async def scenario(client, app):
        models = (await client.models.list()).data
        assert [model.id for model in models] == ["tiny", "film"]
        assert models[0].tritium["sizes"] == ["64x64", "96x64"]
        assert models[0].tritium["eager_seconds"] == 0.02
        assert (await client.models.retrieve("film")).tritium["frames"] == [33, 65]
        # An alias is another name of a model.
        assert (await client.models.retrieve("gpt-image-2")).id == "tiny"
        await client.images.generate(prompt="x", model="gpt-image-2")

    play(scenario, settings=Settings(aliases={"gpt-image-2": "tiny"}, drain_seconds=0.1))


@pytest.mark.parametrize(
    ("fault", "status", "sent"),
    [
        (Failed(code="out_of_memory", message="no memory"), 500, 1),
        (Failed(code="invalid_job", message="the pipeline takes no such prompt"), 400, 1),
        (Failed(code="internal", message="cosmic rays", retry=True), 500, 3),
        (WorkerDied("signal 9"), 503, 1),
    ],
)
def test_only_what_may_help_is_sent_again(fault, status, sent):
    """The client repeats a request twice on its own: a failure that would come again must not be computed three times."""
    runner = FakeRunner()
    runner.faults = [(lambda batch: True, fault)]

    async def scenario(client, app):
        client._calculate_retry_timeout = lambda *_args: 0.0
        error = await refused(client.images.generate(prompt="x"))
        assert error.status_code == status
        assert len([request for request in app.sent if request.url.path.endswith("generations")]) == sent

    play(scenario, runner, max_retries=2)


def test_a_full_queue_is_tried_again_after_the_time_it_says():
    runner = FakeRunner(model(seconds={(64, 64): 0.2}))
    runner.gate.clear()

    async def scenario(client, app):
        first = [asyncio.ensure_future(client.images.generate(prompt="x")) for _ in range(2)]
        await until(lambda: app.engine.status().queued == 1)
        error = await refused(client.images.generate(prompt="x"))
        assert isinstance(error, openai.RateLimitError)
        assert (error.code, error.type) == ("queue_full", "rate_limit_error")
        headers = error.response.headers
        assert (headers["retry-after"], headers["x-should-retry"]) == ("1", "true")
        assert 50 <= int(headers["retry-after-ms"]) <= 200
        patient, waits = client.with_options(max_retries=2), []
        original = patient._calculate_retry_timeout
        patient._calculate_retry_timeout = lambda *values: waits.append(original(*values)) or waits[-1]
        retried = asyncio.ensure_future(patient.images.generate(prompt="x"))
        await until(lambda: len(app.sent) == 4)
        runner.gate.set()
        await asyncio.gather(*first, retried)
        assert len(app.sent) == 5
        # The waits of the client itself begin with half a second.
        assert 0.05 <= waits[0] <= 0.2

    play(scenario, runner, limits=Limits(length=1))


def test_a_deadline_too_early_is_refused_before_the_queue():
    async def scenario(client, app):
        error = await refused(client.images.generate(prompt="x", timeout=0.5))
        assert (error.status_code, error.code, error.param) == (400, "deadline", "timeout")
        assert "about 8.0 s" in str(error)
        assert app.runner.batches == []

    play(scenario, FakeRunner(model(seconds={(64, 64): 8.0})))


def test_a_video_is_a_job_to_poll():
    runner = FakeRunner(video_model(), step=0.02)

    async def scenario(client, app):
        video = await client.videos.create(prompt="waves", seconds="8", size="64x64", input_reference=picture())
        assert (video.object, video.status, video.progress) == ("video", "in_progress", 0) or video.status == "queued"
        assert (video.model, video.size, video.prompt, video.seconds) == ("film", "64x64", "waves", "8.12")
        await until(lambda: app.runner.batches)
        job = app.runner.batches[0][0]
        assert (job.frames, job.frames_per_second, len(job.images)) == (65, 8, 1)
        error = await refused(client.videos.download_content(video.id))
        assert (error.status_code, error.code) == (400, "not_ready")
        await until(lambda: app.runner.steps_run >= 2)
        half = await client.videos.with_raw_response.retrieve(video.id)
        assert 25 <= half.parse().progress <= 75
        assert 100 <= int(half.headers["openai-poll-after-ms"]) <= 5000
        done = await client.videos.poll(video.id)
        assert (done.status, done.progress, done.error) == ("completed", 100, None)
        assert done.expires_at - done.completed_at == 3600
        content = await client.videos.download_content(video.id)
        assert content.content[4:8] == b"ftyp"
        assert content.response.headers["content-type"] == "video/mp4"
        assert (await refused(client.videos.download_content(video.id, variant="thumbnail"))).param == "variant"
        assert (await client.videos.delete(video.id)).deleted
        assert (await refused(client.videos.retrieve(video.id))).status_code == 404

    play(scenario, runner)


def test_a_video_job_that_failed_or_was_deleted():
    runner = FakeRunner(video_model())
    runner.faults = [(lambda batch: batch[0].prompt == "bad", Failed(code="internal", message="it broke"))]

    async def scenario(client, app):
        failed = await client.videos.create_and_poll(prompt="bad")
        assert (failed.status, failed.error.code, failed.error.message) == ("failed", "internal", "it broke")
        runner.gate.clear()
        video = await client.videos.create(prompt="long")
        await client.videos.delete(video.id)
        runner.gate.set()
        await until(lambda: not app.engine.status().running)
        assert (await refused(client.videos.retrieve(video.id))).status_code == 404

    play(scenario, runner)


def test_videos_are_listed_by_pages():
    async def scenario(client, app):
        made = [(await client.videos.create(prompt=str(index), extra_body={"num_frames": 33})).id for index in range(5)]
        page = await client.videos.list(limit=2)
        assert [video.id for video in page.data] == made[:2:-1]
        assert page.has_more
        assert [video.id async for video in page] == made[::-1]
        assert [video.id async for video in client.videos.list(order="asc", after=made[2])] == made[3:]

    play(scenario, FakeRunner(video_model()))


def test_the_errors_of_videos():
    async def scenario(client, app):
        error = await refused(client.videos.create(prompt="x", seconds="12", model="film"))
        assert (error.param, "33 (4.12 s), 65 (8.12 s)" in str(error)) == ("seconds", True)
        error = await refused(client.videos.create(prompt="x", model="film", extra_body={"num_frames": 40}))
        assert error.param == "tritium.frames"
        reference = {"image_url": "http://169.254.169.254/x.png"}
        body = {"input_reference": reference}
        error = await refused(client.videos.create(prompt="x", model="film", extra_body=body))
        assert (error.param, "fetches no URLs" in str(error)) == ("input_reference", True)

    play(scenario)
