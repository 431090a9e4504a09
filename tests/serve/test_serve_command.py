"""`tritium serve`: its options, a whole server in a process, and its end on SIGTERM."""

import contextlib
import json
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request

import pytest
import typer.testing

from tritium.cli import app, serve
from tritium.errors import ConfigError
from tritium.serve import server
from tritium.serve.app import build_app
from tritium.serve.dispatch import Dispatcher
from tritium.serve.engine import Quality
from tritium.serve.runner import LocalRunner
from tritium.serve.worker import PipelineWorker
from tritium.serve.worker_settings import WorkerSettings
from tritium.techniques.parallel.config import Parallel


@pytest.fixture
def served(monkeypatch):
    """Call the command; return the settings of its worker, its runner, and what the server would get."""

    def call(*options):
        found = {}
        monkeypatch.setattr(serve, "_serve", lambda runner, **rest: found.update(runner=runner, **rest))
        result = typer.testing.CliRunner().invoke(app.app, ["serve", *options])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result, found

    return call


def test_options_reach_worker_queue_and_app(served, tmp_path):
    keys, lora = tmp_path / "keys", tmp_path / "style.safetensors"
    keys.write_text("a-long-key\n\nanother-key\n")
    lora.touch()
    result, found = served(
        *("example", "--device", "cpu", "--size", "128x96", "--size", "96x96", "--batch", "2", "--steps", "4"),
        *("--lora", f"style={lora}", "--lora-rank", "8", "--recipe", "fast=example", "--technique", "graphs=off"),
        *("--artifacts", "code", "--queue", "5", "--queue-seconds", "9", "--timeout", "7", "--drain-seconds", "3"),
        *("--api-key-file", str(keys), "--alias", "gpt-image-1", "--gpus", "2", "--measure-eager", "--no-edits"),
        *("--quality", "low=2,fast", "--quality", "high=50,exact"),
    )
    assert result.exit_code == 0, result.output
    lanes = [lane.worker._settings for lane in found["runner"]._lanes]
    assert [lane.gpu for lane in lanes] == [0, 1]
    assert lanes[0] == WorkerSettings(
        pipeline="example",
        name="example",
        sizes=((128, 96), (96, 96)),
        batches=(2,),
        steps=4,
        loras={"style": str(lora)},
        lora_rank=8,
        edits=False,
        recipes={"fast": "example"},
        qualities={"low": Quality(steps=2, fidelity="fast"), "high": Quality(steps=50, fidelity="exact")},
        techniques={"graphs": "off"},
        artifacts="code",
        measure_eager=True,
        device="cpu",
    )
    assert found["listen_on"] == ("127.0.0.1", 8000)
    assert found["limits"] == {"length": 5, "seconds": 9.0}
    assert found["settings"] == {
        "api_keys": ("a-long-key", "another-key"),
        "hosts": ("127.0.0.1", "localhost", "::1"),
        "aliases": {"gpt-image-1": "example"},
        "timeout": 7.0,
        "drain_seconds": 3.0,
    }


def test_a_group_of_ranks(served):
    _, found = served("example", "--device", "cpu", "--gpus", "2", "--parallel", "cfg=2")
    (lane,) = found["runner"]._lanes
    assert (lane.worker._ranks, lane.worker._settings.techniques) == (2, {"parallel": Parallel(cfg=2)})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--size", "100x100"], "multiples of 16"),
        (["--quality", "lo=3"], "did you mean 'low'?"),
        (["--quality", "low=0"], "'0' is neither a number of steps nor one of exact, close, fast"),
        (["--lora", "file"], "has no name"),
        (["--lora", "x=absent"], "there is no file absent"),
        (["--recipe", "absent.json"], "cannot be read"),
        (["--recipe", "a=x", "--recipe", "a=y"], "given twice"),
        (["--lora-rank", "4"], "name one with --lora"),
        (["--eager", "--technique", "graphs=off"], "leave out --recipe"),
        (["--replicas", "2"], "add --ray"),
        (["--ray", "--gpus", "2"], "use --replicas"),
        (["--ray", "--replicas", "3:1"], "MIN <= MAX"),
        (["--parallel", "cfg=2"], "say how many with --gpus"),
        (["--parallel", "ulises=2", "--gpus", "2"], "--parallel has no axis 'ulises'; did you mean 'ulysses'?"),
        (["--parallel", "cfg=2", "--gpus", "4"], "uses 2 ranks and the world has 4"),
        (["--parallel", "cfg=2", "--gpus", "2", "--technique", "parallel={}"], "leave one of them out"),
        (["--technique", "quantise=fp8"], "Plan has no field 'quantise'; did you mean 'quantize'?"),
        (["--technique", "graphs=sometimes"], "graphs cannot be 'sometimes'"),
        (["--api-key-file", "absent"], "cannot be read"),
    ],
)
def test_options_that_cannot_be(served, options, message):
    result, found = served("example", "--device", "cpu", *options)
    assert result.exit_code == 2
    assert message in result.output
    assert not found


def test_a_folder_that_is_no_pipeline(served, tmp_path):
    result, _ = served(str(tmp_path))
    assert (result.exit_code, "no model_index.json" in result.output) == (2, True)


def test_others_are_warned_about(served):
    result, found = served("example", "--device", "cpu", "--host", "0.0.0.0")
    assert "anyone who reaches 0.0.0.0 can use this server" in result.output
    assert found["settings"]["hosts"] == ()


def test_an_address_that_is_taken():
    with server.listen("127.0.0.1", 0) as taken, pytest.raises(ConfigError, match="choose another with --port"):
        server.listen("127.0.0.1", taken.getsockname()[1])


@contextlib.contextmanager
def running(*options):
    """A server in a process, and its address once it is ready."""
    command = [sys.executable, "-m", "tritium", "serve", *options, "--port", "0", "--device", "cpu"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        lines = []
        for line in process.stdout:
            lines.append(line)
            ready = re.search(r"ready on (http://127.0.0.1:\d+) after", line)
            if ready:
                yield process, ready[1]
                return
        pytest.fail("".join(lines))
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def _post(address, **body):
    request = urllib.request.Request(
        f"{address}/v1/images/generations", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)


def test_a_server_finishes_its_requests_on_sigterm():
    """The example, as users start it; a request that runs during the signal gets its image."""
    with running("example", "--eager", "--steps", "4") as (process, address):
        body = {"prompt": "a red circle", "tritium": {"seed": 1}}
        image = _post(address, **body)["data"][0]["b64_json"]
        assert _post(address, **body)["data"][0]["b64_json"] == image
        with pytest.raises(urllib.error.HTTPError) as refused:
            _post(address, prompt="a red circle", size="512x512")
        assert (refused.value.code, "128x128" in refused.value.read().decode()) == (400, True)

        stream = urllib.request.Request(
            f"{address}/v1/images/generations",
            json.dumps({**body, "stream": True, "partial_images": 1, "tritium": {"steps": 12}}).encode(),
            {"content-type": "application/json"},
        )
        with urllib.request.urlopen(stream, timeout=60) as response:
            first = response.readline()
            process.send_signal(signal.SIGTERM)
            rest = response.read().decode()
        assert first
        assert "image_generation.completed" in rest
        assert process.wait(20) == 0


def test_a_pipeline_that_does_not_load(tmp_path):
    """The server ends with the worker's error, and its port is free again."""
    application = build_app(Dispatcher(LocalRunner([PipelineWorker(WorkerSettings(pipeline="absent", name="x"))])))
    listening = server.listen("127.0.0.1", 0)
    address = listening.getsockname()
    lines = []
    with pytest.raises(ConfigError, match="there is no model 'absent'"):
        server.serve(application, listening, lines.append)
    (line,) = lines
    assert line.startswith(f"starting on http://127.0.0.1:{address[1]}")
    server.listen(*address).close()
