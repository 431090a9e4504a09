"""The routes: images, edits, videos, jobs, models and probes."""

from __future__ import annotations

import functools
import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from fastapi import APIRouter, Depends, Query
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import FormData, UploadFile
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from tritium.serve import auth
from tritium.serve.engine import Cancelled, Done, Engine, Failed, Kind
from tritium.serve.faults import Fault, invalid, of_failure
from tritium.serve.gate import accept, find_model
from tritium.serve.jobs import Jobs, Record
from tritium.serve.limits import Upload, check_image
from tritium.serve.metrics import Metrics
from tritium.serve.protocol import (
    EditRequest,
    ImageRequest,
    VideoRequest,
    form_fields,
    images_response,
    model_object,
)
from tritium.serve.settings import MIB, Settings
from tritium.serve.stream import EventStream, wait

_IMAGES: tuple[Kind, ...] = ("image", "edit")
_VIDEOS: tuple[Kind, ...] = ("video",)
_MEDIA_TYPES = {"mp4": "video/mp4", "gif": "image/gif"}
_CLIENT_LEFT = 499
Body = TypeVar("Body", ImageRequest, EditRequest, VideoRequest)


@dataclass(frozen=True)
class Context:
    engine: Engine
    settings: Settings
    metrics: Metrics
    jobs: Jobs

    def owner(self, request: Request) -> str:
        """Return the digest of the request's API key; raise a `Fault` if it is wrong."""
        return auth.owner(self.settings, request.headers)

    def submit(
        self,
        request: Request,
        body: ImageRequest | VideoRequest,
        kind: Kind,
        uploads: Sequence[Upload] = (),
        mask: Upload | None = None,
    ) -> Record:
        """Check a request against its model and queue its job."""
        owned = self.owner(request)
        address = request.client.host if request.client else ""
        waits = not (isinstance(body, ImageRequest) and body.stream)
        patience = _seconds(request.headers.get("x-stainless-read-timeout")) if waits else None
        share, models = auth.share(self.settings, owned, body.identifier, address), self.engine.models()
        accepted = accept(body, kind, models, self.settings, uploads, mask, key=share, patience=patience)
        key = request.headers.get("idempotency-key")
        same = None if key is None else (key[:200], _digest(body, uploads, mask))
        return self.jobs.submit(accepted, owned, same)


def _seconds(text: str | None) -> float | None:
    try:
        seconds = float(text or "")
    except ValueError:
        return None
    return seconds if 0 < seconds < 1e9 else None


def _digest(body: ImageRequest | VideoRequest, uploads: Sequence[Upload], mask: Upload | None) -> str:
    digest = hashlib.sha256(f"{type(body).__name__}{body.model_dump_json()}".encode())
    for upload in (*uploads, *([mask] if mask else [])):
        digest.update(hashlib.sha256(upload.data).digest())
    return digest.hexdigest()


def _paging(
    after: str | None = None, limit: int = Query(20, ge=1, le=100), order: Literal["asc", "desc"] = "desc"
) -> Callable[[list[dict[str, Any]]], dict[str, Any]]:
    """Return a function that takes the requested page out of a list."""
    return functools.partial(_page, after, limit, order)


Page = Annotated[Callable[[list[dict[str, Any]]], dict[str, Any]], Depends(_paging)]


def api(context: Context) -> APIRouter:
    """Return the routes under `/v1`; all of them need an API key if there are any."""
    router = APIRouter(prefix="/v1", dependencies=[Depends(context.owner)])
    _add_images(router, context)
    _add_videos(router, context)
    _add_jobs(router, context)

    @router.get("/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [model_object(model, started) for model in context.engine.models()]}

    @router.get("/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        return model_object(find_model(context.engine.models(), name, context.settings), started)

    started = int(time.time())
    return router


def _add_images(router: APIRouter, context: Context) -> None:
    @router.post("/images/generations")
    async def generations(request: Request, body: ImageRequest) -> Response:
        return await _images_reply(request, context, context.submit(request, body, "image"))

    @router.post("/images/edits")
    async def edits(request: Request) -> Response:
        body, images, mask = await _form(request, EditRequest, context.settings)
        return await _images_reply(request, context, context.submit(request, body, "edit", images, mask))


async def _images_reply(request: Request, context: Context, record: Record) -> Response:
    headers = {"x-request-id": record.id}
    if record.accepted.background:
        return JSONResponse(_job_object(context.jobs, record), 202, {**headers, **_poll(record)})
    if record.accepted.stream:
        return EventStream(context.jobs, record, context.settings.heartbeat, headers)
    try:
        done = await wait(request, context.jobs, record)
    except Fault as fault:
        fault.headers = {**fault.headers, **headers}
        raise
    if done is None:
        return Response(status_code=_CLIENT_LEFT)
    return JSONResponse(images_response(record.accepted, done, int(time.time())), headers=headers)


async def _form(request: Request, kind: type[Body], settings: Settings) -> tuple[Body, list[Upload], Upload | None]:
    """Return the fields and the checked uploads of a multipart request."""
    if not request.headers.get("content-type", "").startswith("multipart/form-data"):
        raise invalid("uploads need the content type multipart/form-data", None, "invalid_content_type")
    async with request.form(max_files=settings.max_images + 2, max_fields=200, max_part_size=MIB) as form:
        fields, images, mask = await _parts(form, settings)
    return kind.model_validate(form_fields(fields), strict=False), images, mask


async def _parts(form: FormData, settings: Settings) -> tuple[list[tuple[str, str]], list[Upload], Upload | None]:
    fields: list[tuple[str, str]] = []
    images: list[Upload] = []
    mask: Upload | None = None
    for name, value in form.multi_items():
        if not isinstance(value, UploadFile):
            fields.append((name, value))
            continue
        if name not in ("image", "image[]", "mask", "input_reference"):
            raise invalid(f"{name[:100]!r} takes no upload", name[:100], "unsupported_parameter")
        param = name.removesuffix("[]")
        upload = await run_in_threadpool(check_image, await value.read(), param, settings)
        if param == "mask":
            mask = upload
        else:
            images.append(upload)
    if len(images) > settings.max_images:
        raise invalid(f"{len(images)} images; at most {settings.max_images} are accepted", "image")
    return fields, images, mask


def _add_videos(router: APIRouter, context: Context) -> None:
    jobs = context.jobs

    @router.post("/videos")
    async def create(request: Request) -> Response:
        images: list[Upload] = []
        if request.headers.get("content-type", "").startswith("application/json"):
            body = VideoRequest.model_validate_json(await request.body())
        else:
            body, images, _ = await _form(request, VideoRequest, context.settings)
        return _video_reply(jobs, context.submit(request, body, "video", images))

    @router.get("/videos")
    async def listing(request: Request, page: Page) -> dict[str, Any]:
        return page([_video_object(jobs, record) for record in jobs.of(context.owner(request), _VIDEOS)])

    @router.get("/videos/{job_id}")
    async def retrieve(request: Request, job_id: str) -> Response:
        return _video_reply(jobs, jobs.find(job_id, context.owner(request), _VIDEOS))

    @router.delete("/videos/{job_id}")
    async def delete(request: Request, job_id: str) -> dict[str, Any]:
        jobs.delete(jobs.find(job_id, context.owner(request), _VIDEOS))
        return {"id": job_id, "object": "video.deleted", "deleted": True}

    @router.get("/videos/{job_id}/content")
    async def content(request: Request, job_id: str, variant: str = "video") -> Response:
        record = jobs.find(job_id, context.owner(request), _VIDEOS)
        if variant != "video":
            raise invalid(f"variant {variant[:50]!r} is not made: use 'video'", "variant")
        if not isinstance(record.last, Done):
            raise invalid(f"the video is not there: its job is {record.state}", "id", "not_ready")
        made = record.last.facts.get("output_format", record.accepted.job.output_format)
        return Response(record.last.images[0], media_type=_MEDIA_TYPES[made])


def _video_reply(jobs: Jobs, record: Record) -> Response:
    return JSONResponse(_video_object(jobs, record), headers={"x-request-id": record.id, **_poll(record)})


def _poll(record: Record) -> dict[str, str]:
    """Return the header that tells OpenAI's client when to look again."""
    return {"openai-poll-after-ms": str(round(min(5.0, max(0.1, record.remaining / 2)) * 1000))}


def _add_jobs(router: APIRouter, context: Context) -> None:
    jobs = context.jobs

    @router.get("/jobs")
    async def listing(request: Request, page: Page) -> dict[str, Any]:
        records = jobs.of(context.owner(request), _IMAGES)
        return page([{**_job_object(jobs, record), "result": None} for record in records])

    @router.get("/jobs/{job_id}")
    async def retrieve(request: Request, job_id: str) -> Response:
        record = jobs.find(job_id, context.owner(request), _IMAGES)
        return JSONResponse(_job_object(jobs, record), headers=_poll(record))

    @router.delete("/jobs/{job_id}")
    async def delete(request: Request, job_id: str) -> dict[str, Any]:
        jobs.delete(jobs.find(job_id, context.owner(request), _IMAGES))
        return {"id": job_id, "object": "job.deleted", "deleted": True}


def _page(after: str | None, limit: int, order: str, objects: list[dict[str, Any]]) -> dict[str, Any]:
    ordered = objects if order == "asc" else objects[::-1]
    ids = [entry["id"] for entry in ordered]
    if after is not None and after not in ids:
        raise invalid(f"there is no job {after[:80]!r} to continue after", "after")
    start = 0 if after is None else ids.index(after) + 1
    data = ordered[start : start + limit]
    ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {"first_id": None, "last_id": None}
    return {"object": "list", "data": data, **ends, "has_more": start + limit < len(ordered)}


def _state(jobs: Jobs, record: Record) -> dict[str, Any]:
    error = None
    if isinstance(record.last, (Failed, Cancelled)):
        fault = of_failure(record.last)
        error = {"code": fault.code, "message": fault.message}
    return {
        "id": record.id,
        "status": record.state,
        "progress": record.progress,
        "created_at": int(record.created),
        "completed_at": None if record.ended is None else int(record.ended),
        "expires_at": jobs.expires(record),
        "model": record.accepted.job.model,
        "size": f"{record.accepted.job.width}x{record.accepted.job.height}",
        "error": error,
    }


def _video_object(jobs: Jobs, record: Record) -> dict[str, Any]:
    job = record.accepted.job
    about = {"seed": job.seed, "steps": job.steps, "frames": job.frames, "frames_per_second": job.frames_per_second}
    if isinstance(record.last, Done):
        about |= record.last.facts
    return {
        **_state(jobs, record),
        "object": "video",
        "prompt": job.prompt,
        "seconds": f"{job.frames / job.frames_per_second:.3g}",
        "tritium": about,
    }


def _job_object(jobs: Jobs, record: Record) -> dict[str, Any]:
    done = record.last if isinstance(record.last, Done) else None
    result = images_response(record.accepted, done, int(record.ended or 0)) if done else None
    return {**_state(jobs, record), "object": "job", "result": result}


def probes(context: Context) -> APIRouter:
    """Return the routes for supervisors, which need no API key."""
    router = APIRouter()

    @router.get("/healthz")
    async def healthz() -> dict[str, str]:
        return {"status": "ok"}

    @router.get("/readyz")
    async def readyz() -> Response:
        status = context.engine.status()
        state = {
            "ready": status.ready,
            "why": status.why,
            "queued": status.queued,
            "queued_seconds": round(status.queued_seconds, 3),
            "running": status.running,
        }
        return JSONResponse(state, 200 if status.ready else 503, None if status.ready else {"retry-after": "2"})

    @router.get("/metrics")
    async def metrics() -> Response:
        return Response(context.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    return router
