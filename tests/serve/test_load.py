"""200 clients at once on a loopback port: exactly the surplus is refused, and the event loop stays free."""

import asyncio
import gc
import json
import subprocess
import sys
import time
from collections import Counter

import pytest

from support.fake_runner import FakeRunner, Server, model
from tritium.serve.queue import Limits
from tritium.serve.settings import Settings

CLIENTS = 200
QUEUE = 16
LAG = 0.05

# A process of its own, so that clients and server do not share an interpreter lock. All connections are open before the
# first request is sent.
CLIENT = """
import asyncio, json, sys
body = json.dumps({"prompt": "x"}).encode()
head = "POST /v1/images/generations HTTP/1.1\\r\\nhost: 127.0.0.1\\r\\ncontent-type: application/json\\r\\ncontent-length: %d\\r\\nconnection: close\\r\\n\\r\\n"

async def one(port, ready, go):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    ready.release()
    await go.wait()
    writer.write((head % len(body)).encode() + body)
    answer = await reader.read()
    writer.close()
    lines = answer.split(b"\\r\\n\\r\\n", 1)[0].decode().split("\\r\\n")
    headers = dict(line.lower().split(": ", 1) for line in lines[1:])
    return int(lines[0].split(" ")[1]), "retry-after" in headers

async def main(port, clients):
    ready, go = asyncio.Semaphore(0), asyncio.Event()
    tasks = [asyncio.ensure_future(one(port, ready, go)) for _ in range(clients)]
    for _ in tasks:
        await ready.acquire()
    go.set()
    print(json.dumps(await asyncio.wait_for(asyncio.gather(*tasks), 30)))

asyncio.run(main(int(sys.argv[1]), int(sys.argv[2])))
"""


class Lag:
    """The longest time that a loop computed between two ticks, in its own CPU time: other processes do not count."""

    def __init__(self, loop):
        self.worst = 0.0
        self._task = asyncio.run_coroutine_threadsafe(self._measure(), loop)

    async def _measure(self):
        before = time.thread_time()
        while True:
            await asyncio.sleep(0.002)
            now = time.thread_time()
            self.worst = max(self.worst, now - before)
            before = now

    def stop(self):
        self._task.cancel()


@pytest.fixture
def server():
    runner = FakeRunner(model(seconds={(64, 64): 0.01}), step=0.005)
    # A server's process holds no objects of other tests, which a full collection would visit.
    gc.collect()
    gc.freeze()
    try:
        with Server(runner, Settings(drain_seconds=0.2), Limits(length=QUEUE)) as running:
            yield running
    finally:
        gc.unfreeze()


def test_exactly_the_surplus_is_refused(server):
    server.hold()
    lag = Lag(server.loop)
    port = server.address.rsplit(":", 1)[1].strip("/")
    clients = subprocess.Popen([sys.executable, "-c", CLIENT, port, str(CLIENTS)], stdout=subprocess.PIPE, text=True)
    try:
        until = time.monotonic() + 20
        while server.refused() < CLIENTS - QUEUE - 1 and time.monotonic() < until:
            time.sleep(0.01)
        server.go_on()
        answers = json.loads(clients.communicate(timeout=30)[0])
    finally:
        clients.kill()
    lag.stop()
    # One runs, 16 wait.
    assert Counter(status for status, _ in answers) == {200: QUEUE + 1, 429: CLIENTS - QUEUE - 1}
    assert all(has_time == (status == 429) for status, has_time in answers)
    assert len(server.runner.batches) == QUEUE + 1
    assert lag.worst < LAG
