"""Encoded images and videos: from PIL images to bytes and back."""

from __future__ import annotations

import importlib.util
import io
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image, ImageChops

from tritium.serve.engine import Job, Size

# Compressing more takes 300 ms for an image of 1024 x 1024, during which the device has no work.
_PNG_LEVEL = 1

# Sides of a preview: larger ones take longer to encode and show nothing more.
_PREVIEW_SIDE = 512


def encode(image: Image.Image, output_format: str, compression: int) -> bytes:
    """Return an image as PNG, JPEG or WebP; `compression` is the quality from 0 to 100, PNG has none."""
    buffer = io.BytesIO()
    if output_format == "png":
        image.save(buffer, "PNG", compress_level=_PNG_LEVEL)
    elif output_format == "jpeg":
        image.convert("RGB").save(buffer, "JPEG", quality=compression)
    else:
        image.save(buffer, "WEBP", quality=compression)
    return buffer.getvalue()


def encode_preview(image: Image.Image, job: Job) -> bytes:
    """Return a preview with the job's proportions in its format."""
    shrink = max(1.0, max(job.size) / _PREVIEW_SIDE)
    scaled = image.resize((round(job.width / shrink), round(job.height / shrink)), Image.Resampling.BILINEAR)
    return encode(scaled, job.output_format if job.kind != "video" else "jpeg", 80)


def encode_video(frames: Sequence[Image.Image], frames_per_second: int, output_format: str) -> tuple[bytes, str]:
    """Return a video and its format: MP4 if asked for and an encoder is installed, else an animated GIF."""
    if output_format == "mp4" and can_write_mp4():
        return _mp4(frames, frames_per_second), "mp4"
    buffer = io.BytesIO()
    first, *rest = frames
    first.save(buffer, "GIF", save_all=True, append_images=rest, duration=round(1000 / frames_per_second), loop=0)
    return buffer.getvalue(), "gif"


def can_write_mp4() -> bool:
    """Return True if imageio and its ffmpeg are installed. OpenCV's own encoder writes what browsers do not play."""
    return all(importlib.util.find_spec(name) is not None for name in ("imageio", "imageio_ffmpeg"))


def _mp4(frames: Sequence[Image.Image], frames_per_second: int) -> bytes:
    export: Any = importlib.import_module("diffusers.utils").export_to_video
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "video.mp4"
        export(list(frames), str(path), fps=frames_per_second)
        return path.read_bytes()


def decode(content: bytes, size: Size) -> Image.Image:
    """Return an uploaded image in RGB at a size."""
    image = Image.open(io.BytesIO(content)).convert("RGB")
    return image if image.size == size else image.resize(size, Image.Resampling.LANCZOS)


def decode_mask(content: bytes, size: Size) -> Image.Image:
    """Return an uploaded mask for diffusers, which repaints what is white; OpenAI's masks are transparent there."""
    image = Image.open(io.BytesIO(content))
    has_alpha = image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info
    mask = ImageChops.invert(image.convert("RGBA").getchannel("A")) if has_alpha else image.convert("L")
    return mask if mask.size == size else mask.resize(size, Image.Resampling.NEAREST)
