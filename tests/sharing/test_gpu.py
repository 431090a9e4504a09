"""Weights on a GPU: a second process maps them by CUDA IPC."""

import json
import os
import subprocess
import sys

import pytest
import torch

from support import small_pipelines
from tritium.errors import SharingError
from tritium.pipelines import sharing
from tritium.sharing.lease import leases, unshare

pytestmark = pytest.mark.gpu

USER = """
import hashlib, json, sys
import torch, tritium
from support import small_pipelines
from tritium.errors import KeeperLost
from tritium.sharing.lease import leases

before = torch.cuda.memory_allocated()
pipe = tritium.attach("gpu", wait=5)
grown = torch.cuda.memory_allocated() - before
mapped = sum(lease.maps(t) for lease in leases() for t in pipe.transformer.parameters())
image = small_pipelines.generate(pipe)
print(json.dumps([hashlib.sha256(image.cpu().numpy().tobytes()).hexdigest(), grown, mapped, str(pipe.device)]), flush=True)
if sys.stdin.readline().strip() == "write":
    with torch.no_grad():
        pipe.transformer.x_embedder.weight.mul_(2)
try:
    while True:
        small_pipelines.generate(pipe)
except KeeperLost as error:
    print(error, flush=True)
"""


def user():
    return subprocess.Popen(
        [sys.executable, "-c", USER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=dict(os.environ)
    )


def test_a_second_process_maps_the_weights(runtime):
    import hashlib

    pipe = small_pipelines.flux(1, 1).to("cuda")
    expected = small_pipelines.generate(pipe)
    processes = [user(), user()]
    try:
        with sharing.keeper("gpu") as keeper:
            keeper.publish(pipe)
            for process in processes:
                digest, grown, mapped, where = json.loads(process.stdout.readline())
                assert digest == hashlib.sha256(expected.cpu().numpy().tobytes()).hexdigest()
                assert mapped == len(list(pipe.transformer.parameters()))
                # Mapped memory is not this process's; its buffers and constants are small.
                assert grown < 1 << 20
                assert where.startswith("cuda")
            assert len(keeper.users) == 2
            # A write in place reaches all: the keeper ends, and with it all users.
            for process, order in zip(processes, ("write", "wait"), strict=True):
                process.stdin.write(f"{order}\n")
                process.stdin.flush()
            for process in processes:
                assert "x_embedder.weight" in process.stdout.readline()
            assert "has written into transformer.x_embedder.weight" in keeper.spoiled
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def test_weights_in_expandable_segments_are_refused(runtime, monkeypatch):
    from tritium import compat

    monkeypatch.setattr(compat.sharing, "has_expandable_segments", lambda: True)
    with sharing.keeper("refused") as keeper, pytest.raises(SharingError, match="expandable_segments:False"):
        keeper.publish(small_pipelines.flux(1, 1).to("cuda"))


def test_segments_are_recognised():
    program = """
import torch
from tritium import compat
assert not compat.sharing.has_expandable_segments()
x = torch.ones(1 << 20, device="cuda")
print(compat.sharing.has_expandable_segments())
"""
    for setting in ("True", "False"):
        env = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": f"expandable_segments:{setting}"}
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=env)
        assert done.stdout.strip() == setting


def test_a_handle_opens_in_another_process_once_for_each_user(runtime):
    pipe = small_pipelines.flux(1, 1).to("cuda")
    with sharing.keeper("counted") as keeper:
        keeper.publish(pipe)
        first, second = (keeper._generation.exports.to_message()["handles"] for _ in range(2))
        assert [handle[:4] for handle in first] == [handle[:4] for handle in second]
        # Each has another counter of users.
        assert [handle[4:6] for handle in first] != [handle[4:6] for handle in second]
    assert torch.cuda.is_available()
    assert leases() == []
    assert unshare(pipe.vae) == 0
