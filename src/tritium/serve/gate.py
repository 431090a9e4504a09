"""The front gate: check a request against its model's promises and turn it into a job, before the queue."""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from tritium.errors import nearest
from tritium.serve.engine import Job, Kind, Lora, Model, Quality, Size
from tritium.serve.faults import Fault, invalid
from tritium.serve.limits import Upload
from tritium.serve.protocol import Accepted, ImageRequest, Sampling, VideoRequest
from tritium.serve.settings import Settings

Request = ImageRequest | VideoRequest
Name = TypeVar("Name", bound=str)
# OpenAI's older names for the middle and the upper quality.
_OLD_QUALITIES = {"standard": "medium", "hd": "high"}
_UPLOAD = "upload the file itself: the server reads no paths and fetches no URLs"
_REFUSED = {
    "image": _UPLOAD,
    "mask": _UPLOAD,
    "input_reference": _UPLOAD,
    "style": "describe the style in the prompt",
    "complexity": "choose `quality` or `tritium.steps`",
    "frame_count": "this is for GIFs: use /v1/videos with a model for videos",
    "frame_duration_ms": "this is for GIFs: use /v1/videos with a model for videos",
    "svg": "images here are png, jpeg or webp",
    "input_fidelity": "no pipeline has such a setting",
    "flow_shift": "the schedule belongs to the model that the server was started with",
}


def find_model(models: Sequence[Model], name: str | None, settings: Settings) -> Model:
    """Return the model of a request; the first one if it names none."""
    if not models:
        raise Fault(503, "the model is still loading: see /readyz", "not_ready", retry=True, retry_after=2.0)
    if name is None:
        return models[0]
    wanted = settings.aliases.get(name, name)
    for model in models:
        if model.name == wanted:
            return model
    there = ", ".join(model.name for model in models)
    raise Fault(404, f"there is no model {name[:100]!r}; models: {there}", "model_not_found", "model", retry=False)


def accept(
    request: Request,
    kind: Kind,
    models: Sequence[Model],
    settings: Settings,
    uploads: Sequence[Upload] = (),
    mask: Upload | None = None,
    *,
    key: str = "",
    patience: float | None = None,
) -> Accepted:
    """Return the job of a request; raise a `Fault` that names what the model promises instead.

    `key` is for fairness, and `patience` are the seconds that the client waits.
    """
    model = find_model(models, request.model, settings)
    if kind not in model.kinds:
        able = ", ".join(other.name for other in models if kind in other.kinds) or "none"
        raise invalid(f"model {model.name!r} makes no {kind}s; models that do: {able}", "model", "unsupported_kind")
    _refuse(request)
    options = _options(request)
    quality_name, quality = _quality(request.quality, model)
    background = bool(options.background) or kind == "video"
    frames, rate = _frames(request, options, model) if isinstance(request, VideoRequest) else (1, 1)
    job = Job(
        id=f"{kind}_{secrets.token_urlsafe(18)}",
        model=model.name,
        kind=kind,
        prompt=request.prompt,
        negative_prompt=_taken("negative_prompt", options.negative_prompt, "negative_prompt", model),
        **_shape(request, kind, model, uploads),
        frames=frames,
        frames_per_second=rate,
        steps=_steps(options.steps or quality.steps or model.steps, model),
        guidance=_taken("guidance_scale", options.guidance_scale, "guidance", model),
        true_cfg=_taken("true_cfg_scale", options.true_cfg_scale, "true_cfg", model),
        seed=secrets.randbelow(2**31) if options.seed is None else options.seed,
        loras=_loras(options, model),
        fidelity=_offered("tritium.fidelity", options.fidelity or quality.fidelity, model.fidelities, model),
        recipe=_offered("tritium.recipe", options.recipe or quality.recipe, model.recipes, model),
        images=_images(uploads, kind, model),
        mask=_mask(mask, uploads, model),
        **_output(request, options),
        priority=options.priority or 0,
        key=key,
        timeout=_timeout(options.timeout, None if background else patience, settings, background=background),
    )
    return Accepted(
        job=job,
        quality=quality_name,
        pixels=sum(upload.width * upload.height for upload in uploads),
        identifier=request.identifier,
        stream=isinstance(request, ImageRequest) and bool(request.stream),
        progress=bool(options.progress),
        background=background,
    )


def _refuse(request: Request) -> None:
    for name, why in _REFUSED.items():
        if getattr(request, name, None) is not None:
            raise invalid(f"this {name} is not supported: {why}", name, "unsupported_parameter")
    if not isinstance(request, ImageRequest):
        return
    if request.background == "transparent":
        raise invalid("background 'transparent' is not supported: images are opaque", "background")
    if request.response_format == "url":
        raise invalid(
            "response_format 'url' is not supported: the server stores no files, use 'b64_json'", "response_format"
        )
    if request.output_format in ("gif", "svg"):
        raise invalid(
            f"output_format {request.output_format!r} is not supported: use png, jpeg or webp", "output_format"
        )
    if request.stream and request.tritium is not None and request.tritium.background:
        raise invalid("a background job has no stream: leave out stream or tritium.background", "stream")
    if request.partial_images and not request.stream:
        raise invalid("partial_images needs stream=true", "partial_images")


def _options(request: Request) -> Sampling:
    """Return the extension with the flat names of other servers merged into it."""
    options = request.tritium or Sampling()
    lora = request.lora
    flat = {
        "steps": ("num_inference_steps", request.num_inference_steps),
        "guidance_scale": ("guidance_scale", request.guidance_scale),
        "true_cfg_scale": ("true_cfg_scale", request.true_cfg_scale),
        "negative_prompt": ("negative_prompt", request.negative_prompt),
        "seed": ("seed", request.seed),
        "loras": ("lora", lora if lora is None or isinstance(lora, list) else [lora]),
        "frames": ("num_frames", getattr(request, "num_frames", None)),
        "frames_per_second": ("fps", getattr(request, "fps", None)),
    }
    changes: dict[str, Any] = {}
    for name, (other, value) in flat.items():
        before = getattr(options, name)
        if value is not None and before is not None and value != before:
            raise invalid(f"{other} and tritium.{name} differ: send one of them", other)
        if value is not None:
            changes[name] = value
    return options.model_copy(update=changes)


def _shape(request: Request, kind: Kind, model: Model, uploads: Sequence[Upload]) -> dict[str, Any]:
    promised = ", ".join(f"{width}x{height}" for width, height in model.sizes)
    width, height = _requested(request) or _default_size(model, uploads if kind == "edit" else ())
    if (width, height) not in model.sizes:
        message = f"size {width}x{height} is not among the sizes that model {model.name!r} was compiled for: {promised}"
        raise invalid(message, "size", "unsupported_size")
    return {"width": width, "height": height}


def _requested(request: Request) -> Size | None:
    flat = request.width, request.height
    if request.size is None or request.size == "auto":
        if flat == (None, None):
            return None
        if request.width is None or request.height is None:
            raise invalid("width and height belong together: send both, or size", "width")
        return request.width, request.height
    parts = request.size.lower().replace("*", "x").split("x")
    if len(parts) != 2 or not all(part.isascii() and part.isdigit() for part in parts):
        raise invalid(f"size {request.size!r} is not WIDTHxHEIGHT, such as 1024x1024", "size")
    size = int(parts[0]), int(parts[1])
    if flat not in ((None, None), size):
        raise invalid("size differs from width and height: send one of them", "size")
    return size


def _default_size(model: Model, uploads: Sequence[Upload]) -> Size:
    """Return the first promised size; for an edit, the one whose aspect ratio is nearest to the first upload's."""
    if not uploads:
        return model.sizes[0]
    ratio = uploads[0].width / uploads[0].height
    return min(model.sizes, key=lambda size: abs(math.log(size[0] / size[1] / ratio)))


def _quality(name: str | None, model: Model) -> tuple[str, Quality]:
    wanted = name or "auto"
    for candidate in (wanted, _OLD_QUALITIES.get(wanted, wanted)):
        if candidate in model.qualities:
            return candidate, model.qualities[candidate]
    # Without a configuration the middle quality is the model's default.
    if wanted in ("auto", "standard", "medium"):
        return "auto" if wanted == "auto" else "medium", Quality()
    there = ", ".join(sorted({"auto", *model.qualities}))
    raise invalid(f"quality {wanted!r} is not configured for model {model.name!r}; there are: {there}", "quality")


def _frames(request: VideoRequest, options: Sampling, model: Model) -> tuple[int, int]:
    rate = options.frames_per_second or model.frames_per_second
    promised = ", ".join(f"{frames} ({frames / rate:.3g} s)" for frames in model.frames)
    if request.seconds is None:
        frames = options.frames or model.frames[0]
        if frames in model.frames:
            return frames, rate
        raise invalid(f"model {model.name!r} makes no {frames} frames; it makes: {promised}", "tritium.frames")
    if options.frames is not None:
        raise invalid("seconds and frames exclude each other: send one of them", "seconds")
    try:
        seconds = float(request.seconds)
    except ValueError:
        raise invalid(f"seconds {request.seconds!r} is not a number", "seconds") from None
    nearest = min(model.frames, key=lambda frames: abs(frames / rate - seconds))
    # Models make 4 k + 1 frames and the like, so a number of seconds is met within a quarter of one.
    if not abs(nearest / rate - seconds) <= 0.25:
        raise invalid(f"model {model.name!r} makes no videos of {request.seconds} s; frames: {promised}", "seconds")
    return nearest, rate


def _steps(steps: int, model: Model) -> int:
    if steps > model.max_steps:
        raise invalid(f"{steps} steps are too many: at most {model.max_steps}", "tritium.steps")
    return steps


def _taken(name: str, value: Any, argument: str, model: Model) -> Any:
    if value is not None and argument not in model.takes:
        takes = ", ".join(model.takes) or "none"
        raise invalid(
            f"model {model.name!r} takes no {name}; optional arguments: {takes}", name, "unsupported_parameter"
        )
    return value


def _offered(param: str, value: Name | None, offered: Iterable[str], model: Model) -> Name | None:
    if value is not None and value not in offered:
        there = ", ".join(offered) or "none: the server runs one configuration"
        raise invalid(f"{param} {value!r} is not configured for model {model.name!r}; configured: {there}", param)
    return value


def _loras(options: Sampling, model: Model) -> tuple[Lora, ...]:
    names = [choice.name for choice in options.loras or ()]
    for name in names:
        if name not in model.loras:
            hint = nearest(name, model.loras) if model.loras else "the server has none"
            raise Fault(404, f"there is no LoRA {name!r}; {hint}", "lora_not_found", "tritium.loras", retry=False)
    if len(set(names)) < len(names):
        raise invalid("a LoRA is named twice: add up its scales", "tritium.loras")
    # Sorted, so that the same set is one group for batches.
    chosen = (Lora(name=choice.name, scale=choice.scale) for choice in options.loras or ())
    return tuple(sorted(chosen, key=lambda lora: lora.name))


def _images(uploads: Sequence[Upload], kind: Kind, model: Model) -> tuple[bytes, ...]:
    if kind == "edit" and not uploads:
        raise invalid("an edit needs an image: upload it as `image`", "image", "missing_required_parameter")
    if kind == "video" and uploads and "image" not in model.takes:
        raise invalid(f"model {model.name!r} takes no image", "input_reference", "unsupported_parameter")
    if len(uploads) > model.max_images:
        raise invalid(f"{len(uploads)} images, and model {model.name!r} takes at most {model.max_images}", "image")
    return tuple(upload.data for upload in uploads)


def _mask(mask: Upload | None, uploads: Sequence[Upload], model: Model) -> bytes | None:
    if mask is None:
        return None
    _taken("mask", mask, "mask", model)
    if uploads and (mask.width, mask.height) != (uploads[0].width, uploads[0].height):
        sizes = f"{mask.width}x{mask.height} and {uploads[0].width}x{uploads[0].height}"
        raise invalid(f"the mask and the first image differ in size: {sizes}", "mask")
    return mask.data


def _output(request: Request, options: Sampling) -> dict[str, Any]:
    if isinstance(request, VideoRequest):
        return {"output_format": request.output_format or "mp4"}
    output, compression = request.output_format or "png", request.output_compression
    if compression is not None and output == "png" and compression != 100:
        raise invalid("output_compression is for jpeg and webp: png is lossless", "output_compression")
    previews = options.previews if options.previews is not None else request.partial_images
    return {
        "n": request.n or 1,
        "output_format": output,
        "compression": 100 if compression is None else compression,
        "partial_images": (previews or 0) if request.stream else 0,
    }


def _timeout(wanted: float | None, patience: float | None, settings: Settings, *, background: bool) -> float:
    bound = settings.background_timeout if background else settings.timeout
    return min(limit for limit in (wanted, patience, bound) if limit is not None)
