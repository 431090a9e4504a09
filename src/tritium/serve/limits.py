"""Limits before anything is decoded: the size of bodies, and the type, bytes and pixels of uploads."""

from __future__ import annotations

import io
from dataclasses import dataclass, field

from fastapi import HTTPException
from PIL import Image
from starlette.datastructures import Headers
from starlette.types import Message, Receive, Scope

from tritium.serve.faults import Fault, invalid
from tritium.serve.settings import MIB, Settings

# First bytes of accepted types; the upload's name and declared type do not count.
_SIGNATURES = {"PNG": (b"\x89PNG\r\n\x1a\n",), "JPEG": (b"\xff\xd8\xff",), "WEBP": (b"RIFF",)}


@dataclass(frozen=True)
class Upload:
    """An encoded image that passed the limits."""

    data: bytes = field(repr=False)
    width: int
    height: int


def check_image(data: bytes, param: str, settings: Settings) -> Upload:
    """Return an upload if its type, bytes and pixels are within the limits. Reads its header only, decodes nothing."""
    limit = settings.max_mask_bytes if param == "mask" else settings.max_upload_bytes
    if len(data) > limit:
        raise Fault(
            413, f"{param} has {len(data)} bytes; at most {limit} are accepted", "too_large", param, retry=False
        )
    kinds = [kind for kind, starts in _SIGNATURES.items() if data.startswith(starts)]
    accepted = ["PNG"] if param == "mask" else list(_SIGNATURES)
    if not kinds or kinds[0] not in accepted:
        raise invalid(f"{param} is not an image of type {', '.join(accepted)}", param, "invalid_image")
    try:
        with Image.open(io.BytesIO(data), formats=kinds) as image:
            width, height, mode = *image.size, image.mode
            alpha = "A" in mode or "transparency" in image.info
    except Image.DecompressionBombError:
        raise _too_many(param, settings) from None
    except Exception:  # noqa: BLE001 - Pillow's readers raise many types on a broken header
        raise invalid(f"{param} cannot be read as {kinds[0]}", param, "invalid_image") from None
    if width * height > settings.max_pixels:
        raise _too_many(param, settings)
    if param == "mask" and not alpha:
        raise invalid("the mask has no transparency: transparent pixels mark what is edited", param, "invalid_image")
    return Upload(data, width, height)


def _too_many(param: str, settings: Settings) -> Fault:
    return invalid(f"{param} has more than {settings.max_pixels} pixels", param, "invalid_image")


def bounded(scope: Scope, receive: Receive, settings: Settings) -> Receive:
    """Return a `receive` that refuses a body over the limit of its kind while it arrives."""
    form = Headers(scope=scope).get("content-type", "").startswith("multipart/form-data")
    limit = settings.max_body_bytes if form else settings.max_json_bytes
    read = 0

    async def counted() -> Message:
        nonlocal read
        message = await receive()
        read += len(message.get("body", b""))
        if read > limit:
            raise HTTPException(413, f"the body has more than {limit / MIB:g} MiB")
        return message

    return counted
