"""A runner of plain Python for tests of the app, the queue and the dispatcher, and clients of the app in process."""

import asyncio
import contextlib
import io
import threading

import httpx2
import openai
import uvicorn
from PIL import Image

from tritium.serve.app import build_app
from tritium.serve.dispatch import Dispatcher
from tritium.serve.engine import Cancelled, Counts, Done, Failed, Model, Preview, Quality, Started, Step, WorkerDied
from tritium.serve.settings import Settings

# One image of 4 steps takes 4 ms.
STEP = 0.001


def model(**changes):
    facts = {
        "name": "tiny",
        "sizes": ((64, 64), (96, 64)),
        "kinds": ("image", "edit"),
        "steps": 4,
        "max_steps": 50,
        "seconds": {(64, 64): 4 * STEP},
        "qualities": {"low": Quality(steps=2), "high": Quality(steps=8, fidelity="exact")},
        "fidelities": ("exact", "close"),
        "recipes": ("fast",),
        "loras": ("ink", "pastel"),
        "takes": ("negative_prompt", "guidance", "mask"),
        "max_images": 2,
        "eager_seconds": 0.02,
    }
    return Model(**{**facts, **changes})


def video_model(**changes):
    facts = {
        "name": "film",
        "sizes": ((64, 64),),
        "kinds": ("video",),
        "steps": 4,
        "frames": (33, 65),
        "takes": ("image",),
    }
    return Model(**{**facts, "frames_per_second": 8, "seconds": {(64, 64): 4 * STEP}, **changes})


def picture(color="red", size=(64, 64), image_format="PNG", mode="RGB"):
    buffer = io.BytesIO()
    Image.new(mode, size, color).save(buffer, image_format)
    return buffer.getvalue()


class FakeRunner:
    """Steps through batches in milliseconds. `faults` maps a function of a batch to an error: a `Failed` or an exception."""

    def __init__(self, *models, slots=1, step=STEP, start=0.0):
        self.slots = slots
        self.step = step
        self.batches = []
        self.faults = []
        # Held back until it is set: a test decides when steps go on.
        self.gate = asyncio.Event()
        self.gate.set()
        self.stopped = False
        self.steps_run = 0
        self._models = models or (model(), video_model())
        self._start = start
        self._cancelled = {}
        self._up = False
        self._restarts = 0

    async def start(self):
        await asyncio.sleep(self._start)
        self._up = True
        return self._models

    def ready(self):
        return self._up

    def counts(self):
        return Counts(recompiles=1, violations=2, captures=3, device_bytes=4, restarts=self._restarts)

    def cancel(self, job_id, why):
        self._cancelled[job_id] = why

    async def stop(self):
        self.stopped = True

    async def run(self, batch):
        self.batches.append(list(batch))
        fault = next((fault for applies, fault in self.faults if applies(batch)), None)
        if isinstance(fault, Exception):
            self._up = not isinstance(fault, WorkerDied)
            asyncio.get_running_loop().call_later(0.02, self._restart)
            raise fault
        for job in batch:
            yield job.id, Started(batched=len(batch))
        going = {job.id: job for job in batch}
        for index in range(1, batch[0].steps + 1):
            await self.gate.wait()
            await asyncio.sleep(self.step)
            self.steps_run += 1
            for job in list(going.values()):
                if job.id in self._cancelled:
                    del going[job.id]
                    yield job.id, Cancelled(why=self._cancelled[job.id])
                    continue
                yield job.id, Step(index=index, total=job.steps)
                if index <= job.partial_images:
                    yield job.id, Preview(index=index - 1, image=picture("gray", (8, 8)), step=index)
            if not going:
                return
        for job in going.values():
            yield job.id, fault if isinstance(fault, Failed) else Done(images=(result(job),), facts={"way": "fake"})

    def _restart(self):
        self._restarts += 0 if self._up else 1
        self._up = True


def result(job):
    """The bytes of a job: a picture of a color that its seed decides, or what begins like a video."""
    if job.kind == "video":
        return b"\x00\x00\x00\x18ftypmp42" + str(job.seed).encode()
    names = {"png": "PNG", "jpeg": "JPEG", "webp": "WEBP"}
    return picture((job.seed % 256, 0, 0), job.size, names[job.output_format])


class Served:
    """An app with its runner, and a client of it that never leaves the process."""

    def __init__(self, runner, settings, limits):
        self.runner = runner
        self.engine = Dispatcher(runner, limits)
        self.app = build_app(self.engine, settings)
        self.sent = []

    async def _note(self, request):
        self.sent.append(request)

    def http(self, **options):
        transport = httpx2.ASGITransport(self.app)
        hooks = {"request": [self._note]}
        return httpx2.AsyncClient(transport=transport, base_url="http://localhost", event_hooks=hooks, **options)

    def client(self, **options):
        chosen = {"api_key": "none-needed", "base_url": "http://localhost/v1", "max_retries": 0, **options}
        return openai.AsyncOpenAI(http_client=self.http(), **chosen)


@contextlib.asynccontextmanager
async def served(runner=None, settings=None, limits=None, *, warm=True):
    """Run an app, with its engine started."""
    here = Served(runner or FakeRunner(), settings or Settings(drain_seconds=0.5), limits)
    async with here.app.router.lifespan_context(here.app):
        if warm:
            await here.app.state.starting
        yield here


async def until(condition, seconds=5.0):
    """Wait for a condition, for a bounded time."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.001)


GENERATE = "/v1/images/generations"
EDIT = "/v1/images/edits"


def over_http(scenario, runner=None, settings=None, limits=None, **options):
    """Run `scenario(http, app)` with an app, for a bounded time."""

    async def whole():
        async with asyncio.timeout(20), served(runner, settings, limits, **options) as app, app.http() as http:
            return await scenario(http, app)

    return asyncio.run(whole())


def error_of(response):
    """Return status, code and parameter of an error of OpenAI's shape."""
    body = response.json()
    assert list(body) == ["error"]
    assert set(body["error"]) == {"message", "type", "param", "code"}
    return response.status_code, body["error"]["code"], body["error"]["param"]


class Server:
    """An app on a loopback port, in a thread."""

    def __init__(self, runner, settings, limits=None):
        self.runner = runner
        self.engine = Dispatcher(runner, limits)
        app = build_app(self.engine, settings)
        self._metrics = app.state.metrics
        self._server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", timeout_graceful_shutdown=1))
        self._thread = threading.Thread(target=self._run)
        self._begun = threading.Event()

    def _run(self):
        async def serve():
            self.loop = asyncio.get_running_loop()
            serving = asyncio.create_task(self._server.serve())
            while not self._server.started:
                await asyncio.sleep(0.01)
            self._begun.set()
            await serving

        asyncio.run(serve())

    def __enter__(self):
        self._thread.start()
        assert self._begun.wait(10)
        port = self._server.servers[0].sockets[0].getsockname()[1]
        self.address = f"http://127.0.0.1:{port}/"
        return self

    def __exit__(self, *_):
        self._server.should_exit = True
        self._thread.join(10)

    def hold(self):
        self.loop.call_soon_threadsafe(self.runner.gate.clear)

    def go_on(self):
        self.loop.call_soon_threadsafe(self.runner.gate.set)

    def refused(self):
        """Return how many jobs found the queue full."""
        return self._metrics.registry.get_sample_value("tritium_errors_total", {"code": "queue_full"}) or 0
