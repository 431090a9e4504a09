"""The HTTP app: OpenAI's image and video API over an engine. Imports no torch."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from tritium.errors import TritiumError, nearest
from tritium.serve import page
from tritium.serve.engine import Engine, Refused
from tritium.serve.faults import Fault, of_refusal
from tritium.serve.front import Front
from tritium.serve.jobs import Jobs
from tritium.serve.metrics import Metrics
from tritium.serve.protocol import EditRequest, ImageRequest, Sampling, VideoRequest
from tritium.serve.routes import Context, api, probes
from tritium.serve.settings import Settings

_log = logging.getLogger("tritium.serve")
_CODES = {404: "not_found", 405: "method_not_allowed", 413: "too_large"}


def build_app(engine: Engine, settings: Settings | None = None) -> FastAPI:
    """Return the app of an engine. It starts the engine, answers `/healthz` while that loads, and drains it at the end.

    `app.state.drain()` refuses new jobs and returns when the running ones are done: call it on SIGTERM, before the listening
    socket closes. `app.state.starting` is the task of `Engine.start`, which raises what went wrong.
    """
    settings = settings or Settings()
    metrics = Metrics(engine)
    context = Context(engine, settings, metrics, Jobs(engine, settings, metrics))
    # The interactive pages of FastAPI load scripts from another host.
    app = FastAPI(title="Tritium", docs_url=None, redoc_url=None, lifespan=_lifespan(engine, settings))
    app.state.drain = lambda: engine.drain(settings.drain_seconds)
    app.state.metrics = metrics
    app.include_router(api(context))
    app.include_router(probes(context))
    app.include_router(page.routes())
    _handle_errors(app, metrics)
    app.add_middleware(Front, settings=settings, metrics=metrics)
    return app


def _lifespan(engine: Engine, settings: Settings) -> Any:
    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        app.state.starting = asyncio.create_task(_start(engine))
        try:
            yield
        finally:
            app.state.starting.cancel()
            await engine.drain(settings.drain_seconds)

    return lifespan


async def _start(engine: Engine) -> None:
    began = time.perf_counter()
    try:
        await engine.start()
    except TritiumError:
        # One line for users, which the caller prints.
        raise
    except Exception:
        _log.exception("the engine did not start")
        raise
    names = ", ".join(model.name for model in engine.models())
    _log.info("ready after %.1f s: %s", time.perf_counter() - began, names)


def _handle_errors(app: FastAPI, metrics: Metrics) -> None:
    def reply(fault: Fault) -> JSONResponse:
        metrics.errors.labels(fault.code).inc()
        return JSONResponse(fault.body(), fault.status, fault.all_headers())

    @app.exception_handler(Fault)
    async def on_fault(_: Request, fault: Fault) -> Response:
        return reply(fault)

    @app.exception_handler(Refused)
    async def on_refusal(_: Request, refused: Refused) -> Response:
        return reply(of_refusal(refused))

    @app.exception_handler(RequestValidationError)
    @app.exception_handler(ValidationError)
    async def on_invalid(_: Request, error: RequestValidationError | ValidationError) -> Response:
        return reply(_of_validation(error))

    @app.exception_handler(HTTPException)
    async def on_http(request: Request, error: HTTPException) -> Response:
        where = f" ({request.method} {request.url.path[:200]})" if error.status_code in (404, 405) else ""
        code = _CODES.get(error.status_code, "invalid_request")
        retry = False if error.status_code < 500 else None
        return reply(Fault(error.status_code, f"{error.detail}{where}", code, retry=retry, headers=error.headers or {}))

    @app.exception_handler(Exception)
    async def on_defect(_: Request, error: Exception) -> Response:
        # Its message may hold a part of the request, so only its type is sent.
        return reply(Fault(500, f"the server failed: {type(error).__name__}", "internal", retry=False))


def _of_validation(error: RequestValidationError | ValidationError) -> Fault:
    """Return the first mistake of a request, with the name of its field; values are not repeated."""
    first = error.errors()[0]
    names = [str(part) for part in first["loc"] if part not in ("body", "query", "path")]
    if first["type"] == "json_invalid":
        return Fault(400, "the body is not JSON", "invalid_json", retry=False)
    if first["type"] == "extra_forbidden":
        kinds = (Sampling,) if names[0] == "tritium" else (ImageRequest, EditRequest, VideoRequest)
        fields = [name for kind in kinds for name in kind.model_fields]
        message, code = f"there is no parameter {names[-1][:100]!r}; {nearest(names[-1], fields)}", "unknown_parameter"
    elif first["type"] == "missing":
        message, code = f"parameter {'.'.join(names) or 'body'!r} is missing", "missing_required_parameter"
    else:
        message, code = f"parameter {'.'.join(names)!r}: {first['msg']}", "invalid_value"
    return Fault(400, message, code, ".".join(names)[:200] or None, retry=False)
