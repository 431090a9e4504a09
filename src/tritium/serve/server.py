"""The HTTP server: listens, says when it is ready, and drains on SIGTERM."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import uvicorn

from tritium.errors import ConfigError

Notify = Callable[[str], object]


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket; raise a `ConfigError` if the address is taken. Port 0 is any free one."""
    try:
        found = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        advice = "choose another with --port" if host in ("127.0.0.1", "localhost") else "see --host and --port"
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror or error}; {advice}") from error
    found.setblocking(False)
    return found


def serve(app: Any, listening: socket.socket, notify: Notify) -> None:
    """Serve an app until SIGTERM or SIGINT; raise the error of an engine that does not start.

    The first signal refuses new jobs and finishes running ones; a second one ends at once.
    """
    config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=5)
    asyncio.run(_Server(config, app, notify).until_drained(listening))


class _Server(uvicorn.Server):
    """uvicorn closes its socket at the first signal; a drain answers until the last job is done."""

    def __init__(self, config: uvicorn.Config, app: Any, notify: Notify) -> None:
        super().__init__(config)
        self._app, self._notify = app, notify
        self._draining: asyncio.Task[None] | None = None

    async def until_drained(self, listening: socket.socket) -> None:
        self._loop = asyncio.get_running_loop()
        watch = asyncio.create_task(self._watch(listening, time.perf_counter()))
        await self.serve([listening])
        await watch

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002  # as in uvicorn
        # A signal handler may interrupt anything; the event loop does the rest.
        self._loop.call_soon_threadsafe(self._on_signal)

    def _on_signal(self) -> None:
        if self._draining is not None:
            self.should_exit = self.force_exit = True
            return
        self._notify("draining: no new requests; running ones are finished")
        self._draining = asyncio.create_task(self._drain())

    async def _drain(self) -> None:
        try:
            await self._app.state.drain()
        finally:
            self.should_exit = True

    async def _watch(self, listening: socket.socket, began: float) -> None:
        """Announce readiness; end the server if the engine does not start."""
        while not hasattr(self._app.state, "starting"):
            if self.should_exit:
                return
            await asyncio.sleep(0.01)
        host, port = listening.getsockname()[:2]
        # Compiling takes minutes on a CPU.
        self._notify(f"starting on http://{host}:{port}: /readyz returns 200 when the model is loaded and compiled")
        try:
            await self._app.state.starting
        except asyncio.CancelledError:
            return
        except Exception:
            self.should_exit = True
            raise
        self._notify(f"ready on http://{host}:{port} after {time.perf_counter() - began:.1f} s")
