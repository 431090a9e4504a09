"""Several processes: equal images, little memory each, and an end within a second of the keeper's."""

import hashlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import diffusers
import pytest
import torch
from typer.testing import CliRunner

import tritium
from support import small_pipelines
from support.keepers import KeeperProcess, until
from tritium.cli.app import app
from tritium.errors import KeeperLost

# Bytes of weights that the second keeper of these tests has, in few layers.
LARGE = 160e6

# Seconds that a call of a model in progress takes on a busy machine.
IMAGE = 1.0

# What a process of a test has attached to, by keeper.
PIPES = {}


def large_flux():
    pipe = small_pipelines.flux(1, 1)
    config = {**pipe.transformer.config, "num_attention_heads": 56}
    # Weights of zeros: drawing random numbers takes a second.
    with torch.device("meta"):
        transformer = diffusers.FluxTransformer2DModel.from_config(config)
    pipe.transformer = transformer.to_empty(device="cpu").eval().requires_grad_(requires_grad=False)
    for parameter in pipe.transformer.parameters():
        parameter.data.fill_(0.001)
    return pipe


def memory_of_process():
    text = Path("/proc/self/smaps_rollup").read_text()
    fields = dict(re.findall(r"^(\w+): +(\d+) kB$", text, re.MULTILINE))
    return {name: int(fields[name]) * 1024 for name in ("Pss", "Private_Dirty", "Private_Clean")}


def attach(runtime, name):
    os.environ["XDG_RUNTIME_DIR"] = str(runtime)
    PIPES[name] = tritium.attach(name, wait=30)


def draw(name):
    image = small_pipelines.generate(PIPES[name])
    return hashlib.sha256(image.numpy().tobytes()).hexdigest()


def grow(runtime, name, rank_first):
    """Return bytes of weights, and the memory that attaching and reading all of them took, in Pss and in own pages."""
    # What attaching imports and allocates once is not part of it.
    attach(runtime, rank_first)
    before = memory_of_process()
    attach(runtime, name)
    tensors = list(PIPES[name].transformer.parameters())
    total = sum(float(tensor.sum()) for tensor in tensors)
    torch.distributed.barrier()
    after = memory_of_process()
    torch.distributed.barrier()
    own = sum(after[key] - before[key] for key in ("Private_Dirty", "Private_Clean"))
    return sum(tensor.nbytes for tensor in tensors), after["Pss"] - before["Pss"], own, total


def stop(name, seconds):
    """Generate images until the keeper's end stops them; return when, by the clock of all processes."""
    end = time.monotonic() + seconds
    try:
        while time.monotonic() < end:
            draw(name)
    except KeeperLost as error:
        return time.monotonic(), str(error)
    return None


@pytest.fixture(scope="module")
def small(runtime):
    process = KeeperProcess("small", small_pipelines.flux, 1, 1)
    yield process
    process.kill()


def test_two_processes_draw_equal_images(runtime, small, ranks):
    ranks(2)(attach, runtime, "small")
    found = ranks(2)(draw, "small")
    attach(runtime, "small")
    assert found == [draw("small")] * 2
    assert len(set(small.ask("users"))) == 3
    PIPES.clear()


def test_a_process_takes_under_5_percent_more_memory(runtime, small, ranks):
    large = KeeperProcess("large", large_flux)
    found = ranks(2)(grow, runtime, "large", "small")
    for size, _, own, total in found:
        assert size > LARGE
        assert total == found[0][-1]
        assert own < 0.05 * size
    # The pages of the weights count once for both.
    assert sum(pss for _, pss, _, _ in found) < 1.1 * found[0][0]
    # The keeper has a copy and no pipeline.
    assert large.ask("bytes") >= found[0][0]
    shown = CliRunner().invoke(app, ["doctor", "--sharing"], env={"COLUMNS": "200"}).stdout
    assert "keeper large" in shown
    assert len(re.findall(r"user \d+ of large +it maps transformer 1\d\d\.\d MB, ", shown)) == 2
    large.kill()


def test_users_stop_within_a_second_of_a_killed_keeper(runtime, ranks):
    keeper = KeeperProcess("killed", small_pipelines.flux, 1, 1)
    ranks(2)(attach, runtime, "killed")
    killed = []

    def kill():
        time.sleep(0.5)
        killed.append(time.monotonic())
        keeper.kill()

    threading.Thread(target=kill).start()
    for when, message in ranks(2)(stop, "killed", 20.0):
        assert 0 <= when - killed[0] < 1.0 + IMAGE
        assert "the weights of keeper 'killed' are gone" in message
    with pytest.raises(tritium.errors.SharingError, match="there is no keeper named 'killed'"):
        tritium.attach("killed")


def test_the_command_keeps_reloads_and_drains(runtime, tmp_path):
    folder = tmp_path / "flux"
    small_pipelines.flux(1, 1).save_pretrained(folder)
    process = subprocess.Popen(
        [sys.executable, "-m", "tritium", "keep", str(folder), "--device", "cpu"], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout.readline().startswith("keeping 'flux': loading")
        assert re.search(r"ready, \d+\.\d MB on cpu, generation 1; tritium.attach", process.stdout.readline())
        pipe = tritium.attach("flux")
        first = small_pipelines.generate(pipe)
        process.send_signal(signal.SIGHUP)
        assert "generation 2" in process.stdout.readline()
        assert torch.equal(small_pipelines.generate(tritium.attach("flux")), first)
        process.send_signal(signal.SIGTERM)
        assert "draining" in process.stdout.readline()
        with pytest.raises(tritium.errors.SharingError, match="keeper 'flux' is draining"):
            tritium.attach("flux")
        # Users go on until they end, or until a second signal.
        small_pipelines.generate(pipe)
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
        with pytest.raises(KeeperLost):
            assert until(lambda: small_pipelines.generate(pipe) is None, 2)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
