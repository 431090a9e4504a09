"""Wait for a job on behalf of a client, with one response or a stream of events, and notice when the client leaves."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tritium.serve.engine import Cancelled, Done, Event, Failed, Preview, Queued, Started, Step
from tritium.serve.faults import of_failure
from tritium.serve.jobs import Jobs, Record
from tritium.serve.protocol import completed_events, partial_event


@contextmanager
def watching(jobs: Jobs, record: Record) -> Iterator[None]:
    """Count a client of a job; the job is stopped when the last one leaves."""
    record.watchers += 1
    try:
        yield
    finally:
        record.watchers -= 1
        jobs.leave(record)


async def wait(request: Request, jobs: Jobs, record: Record) -> Done | None:
    """Return the result of a job; None if the client left before."""
    with watching(jobs, record):
        result = asyncio.ensure_future(record.result())
        gone = asyncio.ensure_future(_left(request.receive))
        try:
            await asyncio.wait({result, gone}, return_when=asyncio.FIRST_COMPLETED)
            return await result if result.done() else None
        finally:
            result.cancel()
            gone.cancel()


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events of a job, as OpenAI's client parses them."""

    media_type = "text/event-stream"

    def __init__(self, jobs: Jobs, record: Record, heartbeat: float, headers: dict[str, str]) -> None:
        super().__init__(headers={**headers, "cache-control": "no-store", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._jobs = jobs
        self._record = record
        self._heartbeat = heartbeat

    async def __call__(self, _: Scope, receive: Receive, send: Send) -> None:
        """Send events until the last one, and signs of life between them."""
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        events = self._record.watch()
        with watching(self._jobs, self._record):
            gone = asyncio.ensure_future(_left(receive))
            upcoming = asyncio.ensure_future(_next(events))
            try:
                while not gone.done():
                    await asyncio.wait({upcoming, gone}, timeout=self._heartbeat, return_when=asyncio.FIRST_COMPLETED)
                    chunk = b": waiting\n\n"
                    if upcoming.done():
                        event = await upcoming
                        if event is None:
                            await send({"type": "http.response.body", "body": b"", "more_body": False})
                            return
                        chunk = self._chunk(event)
                        upcoming = asyncio.ensure_future(_next(events))
                    if chunk:
                        await send({"type": "http.response.body", "body": chunk, "more_body": True})
            finally:
                upcoming.cancel()
                gone.cancel()

    def _chunk(self, event: Event) -> bytes:
        accepted, now = self._record.accepted, int(time.time())
        if isinstance(event, Preview):
            return _encode(partial_event(accepted, event, now))
        if isinstance(event, Done):
            sent = b"".join(_encode(part) for part in completed_events(accepted, event, now))
            return sent + b"data: [DONE]\n\n"
        if isinstance(event, (Failed, Cancelled)):
            return _encode({"type": "error", **of_failure(event).body()})
        return _encode(_progress(event)) if accepted.progress else b""


async def _next(events: AsyncIterator[Event]) -> Event | None:
    return await anext(events, None)


def _progress(event: Queued | Started | Step) -> dict[str, Any]:
    return {"type": f"tritium.{type(event).__name__.lower()}", **vars(event)}


def _encode(data: dict[str, Any]) -> bytes:
    return f"event: {data['type']}\ndata: {json.dumps(data, separators=(',', ':'))}\n\n".encode()
