"""The web page at `/`: three static files that talk to the same API as every other client."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

from fastapi import APIRouter
from starlette.responses import Response

_FOLDER = Path(__file__).parent
_FILES = {
    "/": ("page.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
}
# Nothing from other hosts, no inline code, no frames.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def routes() -> APIRouter:
    router = APIRouter(include_in_schema=False)
    for path, (name, media_type) in _FILES.items():
        router.add_api_route(path, _reply(name, media_type), methods=["GET"], response_class=Response)
    return router


def _reply(name: str, media_type: str) -> Callable[[], Awaitable[Response]]:
    headers = {"content-security-policy": _POLICY, "cache-control": "no-cache"}

    async def reply() -> Response:
        return Response((_FOLDER / name).read_bytes(), media_type=media_type, headers=headers)

    return reply
