"""The layer around the app: it refuses foreign pages and large bodies, and adds headers to responses."""

from __future__ import annotations

import time
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tritium.serve.auth import check_origin
from tritium.serve.faults import Fault
from tritium.serve.limits import bounded
from tritium.serve.metrics import Metrics
from tritium.serve.settings import Settings


class Front:
    """Check the origin of requests and the size of bodies, add headers to responses, count both."""

    def __init__(self, app: ASGIApp, settings: Settings, metrics: Metrics) -> None:
        self._app = app
        self._settings = settings
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.perf_counter()

        async def headed(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["x-content-type-options"] = "nosniff"
                headers["referrer-policy"] = "no-referrer"
                headers["openai-processing-ms"] = str(round((time.perf_counter() - began) * 1000))
                headers.setdefault("cache-control", "no-store")
                self._metrics.requests.labels(_route(scope), str(message["status"])).inc()
            await send(message)

        try:
            check_origin(self._settings, Headers(scope=scope))
        except Fault as fault:
            self._metrics.errors.labels(fault.code).inc()
            await JSONResponse(fault.body(), fault.status, fault.all_headers())(scope, receive, headed)
            return
        await self._app(scope, bounded(scope, receive, self._settings), headed)


def _route(scope: Scope) -> str:
    """Return the pattern of the matched route: paths hold ids, and there are any number of them."""
    route: Any = scope.get("route")
    return getattr(route, "path", "none")
