"""The wire: requests of OpenAI's image and video API with Tritium's extension, and responses as its client reads them."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from tritium.serve.engine import Done, Fidelity, Job, Model, Preview
from tritium.serve.faults import Fault

Scale = Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)]
Prompt = Annotated[str, Field(min_length=1, max_length=32000)]
# The largest seed leaves room for one more an image.
Seed = Annotated[int, Field(ge=0, lt=2**63 - 16)]


class _Wire(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())


class LoraChoice(_Wire):
    name: str = Field(max_length=200)
    scale: float = Field(default=1.0, ge=-10, le=10, allow_inf_nan=False)


class Sampling(_Wire):
    """What Tritium adds to OpenAI's requests, as one object `tritium`."""

    steps: int | None = Field(default=None, ge=1)
    guidance_scale: Scale | None = None
    true_cfg_scale: Scale | None = None
    negative_prompt: str | None = Field(default=None, max_length=32000)
    seed: Seed | None = None
    loras: list[LoraChoice] | None = Field(default=None, max_length=8)
    fidelity: Fidelity | None = None
    recipe: str | None = Field(default=None, max_length=200)
    priority: int | None = Field(default=None, ge=-100, le=100)
    # Seconds after which the result is useless.
    timeout: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    # Return at once with a job to poll, and keep its result.
    background: bool | None = None
    # More previews than OpenAI's limit of 3, and events about the queue and the steps.
    previews: int | None = Field(default=None, ge=0, le=64)
    progress: bool | None = None
    frames: int | None = Field(default=None, ge=1)
    frames_per_second: int | None = Field(default=None, ge=1, le=120)


class _Request(_Wire):
    prompt: Prompt
    model: str | None = Field(default=None, max_length=200)
    size: str | None = Field(default=None, max_length=20)
    user: str | None = Field(default=None, max_length=512)
    safety_identifier: str | None = Field(default=None, max_length=512)
    tritium: Sampling | None = None
    # The flat names of SGLang and vLLM-Omni.
    width: int | None = None
    height: int | None = None
    num_inference_steps: int | None = Field(default=None, ge=1)
    guidance_scale: Scale | None = None
    true_cfg_scale: Scale | None = None
    negative_prompt: str | None = Field(default=None, max_length=32000)
    seed: Seed | None = None
    lora: LoraChoice | list[LoraChoice] | None = None
    flow_shift: float | None = None

    @property
    def identifier(self) -> str | None:
        """Return the end user's identifier: the new field, or OpenAI's old one."""
        return self.safety_identifier or self.user or None


class ImageRequest(_Request):
    """The body of `/v1/images/generations`."""

    n: int | None = Field(default=None, ge=1, le=10)
    quality: Literal["low", "medium", "high", "xhigh", "max", "auto", "standard", "hd"] | None = None
    output_format: Literal["png", "webp", "jpeg", "gif", "svg"] | None = None
    output_compression: int | None = Field(default=None, ge=0, le=100)
    background: Literal["transparent", "opaque", "auto"] | None = None
    # Nothing is moderated: both values mean the same.
    moderation: Literal["low", "auto"] | None = None
    response_format: Literal["url", "b64_json"] | None = None
    stream: bool | None = None
    partial_images: int | None = Field(default=None, ge=0, le=3)
    # Known to OpenAI, and refused here with a reason.
    style: str | None = None
    complexity: str | None = None
    frame_count: int | None = None
    frame_duration_ms: int | None = None
    svg: dict[str, Any] | None = None


class EditRequest(ImageRequest):
    """The fields of `/v1/images/edits`, without its uploads."""

    input_fidelity: str | None = None
    # Only uploads have these names.
    image: Any = None
    mask: Any = None


class VideoRequest(_Request):
    """The fields of `/v1/videos`, without its upload."""

    seconds: str | None = Field(default=None, max_length=10)
    output_format: Literal["mp4", "gif"] | None = None
    quality: Literal["low", "medium", "high", "xhigh", "max", "auto", "standard", "hd"] | None = None
    num_frames: int | None = Field(default=None, ge=1)
    fps: int | None = Field(default=None, ge=1, le=120)
    # Only an upload has this name.
    input_reference: Any = None


@dataclass(frozen=True, kw_only=True)
class Accepted:
    """A checked request: its job, and the other facts that its response needs."""

    job: Job
    quality: str
    # For usage: pixels of the uploads.
    pixels: int = 0
    identifier: str | None = None
    stream: bool = False
    progress: bool = False
    background: bool = False


def form_fields(items: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """Return the nested dict that form fields describe, with names such as `tritium[steps]` and `tritium[loras][][name]`."""
    fields: dict[str, Any] = {}
    for name, value in items:
        head, *rest = (part.rstrip("]") for part in name.split("[", 4))
        here, key = fields, head
        for part in rest:
            here = _place(here, key, {}, head)
            key = part
        _place(here, key, [], head).append(value)
    return {name: _plain(name, value) for name, value in fields.items()}


def _place(fields: dict[str, Any], key: str, empty: Any, head: str) -> Any:
    """Return the dict or list at a key, which is created as `empty`."""
    place = fields.setdefault(key, empty)
    if type(place) is not type(empty):
        raise Fault(400, f"form fields named {head!r} contradict each other", "invalid_value", head, retry=False)
    return place


def _plain(name: str, value: Any) -> Any:
    """Return a form's value: the only one of a list, a list of objects for `[]`, and JSON for `tritium`."""
    if isinstance(value, list):
        if len(value) > 1:
            raise Fault(400, f"form field {name!r} was sent {len(value)} times", "invalid_value", name, retry=False)
        return _json(name, value[0]) if name in ("tritium", "lora", "svg") else value[0]
    if set(value) != {""}:
        return {key: _plain(key, entry) for key, entry in value.items()}
    entries = value[""]
    if isinstance(entries, list):
        return entries
    lengths = {len(column) for column in entries.values()}
    if len(lengths) != 1:
        message = f"the objects of {name!r} differ in their fields, which a form cannot say: send `tritium` as JSON"
        raise Fault(400, message, "invalid_value", name, retry=False)
    return [dict(zip(entries, row, strict=True)) for row in zip(*entries.values(), strict=True)]


def _json(name: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise Fault(400, f"form field {name!r} is not JSON", "invalid_value", name, retry=False) from None


def _size(job: Job) -> str:
    return f"{job.width}x{job.height}"


def usage(accepted: Accepted, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return sizes in OpenAI's form: patches of 16 x 16 pixels, and the tokens of the prompt or else its words."""
    job = accepted.job
    text = int(facts.get("text_tokens", len(job.prompt.split())))
    drawn = job.n * job.frames * -(-job.width * job.height // 256)
    seen = -(-accepted.pixels // 256)
    return {
        "input_tokens": text + seen,
        "output_tokens": drawn,
        "total_tokens": text + seen + drawn,
        "input_tokens_details": {"image_tokens": seen, "text_tokens": text},
    }


def extension(accepted: Accepted, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return what was used and measured, for the object `tritium` of a response."""
    job = accepted.job
    chosen = {
        "id": job.id,
        "model": job.model,
        "seed": job.seed,
        "steps": job.steps,
        "guidance_scale": job.guidance,
        "true_cfg_scale": job.true_cfg,
        "loras": [{"name": lora.name, "scale": lora.scale} for lora in job.loras] or None,
        "fidelity": job.fidelity,
        "recipe": job.recipe,
    }
    return {**{name: value for name, value in chosen.items() if value is not None}, **facts}


def images_response(accepted: Accepted, done: Done, created: int) -> dict[str, Any]:
    job = accepted.job
    response = {
        "created": created,
        "data": [{"b64_json": base64.b64encode(image).decode()} for image in done.images],
        "size": _size(job),
        "output_format": job.output_format,
        "background": "opaque",
        "usage": usage(accepted, done.facts),
        "tritium": extension(accepted, done.facts),
    }
    if accepted.quality != "auto":
        response["quality"] = accepted.quality
    if accepted.identifier:
        response["safety_identifier"] = accepted.identifier
    return response


def _event(accepted: Accepted, kind: str, image: bytes, created: int) -> dict[str, Any]:
    family = "image_edit" if accepted.job.kind == "edit" else "image_generation"
    return {
        "type": f"{family}.{kind}",
        "b64_json": base64.b64encode(image).decode(),
        "created_at": created,
        "size": _size(accepted.job),
        "quality": accepted.quality,
        "background": "opaque",
        "output_format": accepted.job.output_format,
    }


def partial_event(accepted: Accepted, preview: Preview, created: int) -> dict[str, Any]:
    """Return the event of a preview: an image from unfinished latents, marked as a preview."""
    event = _event(accepted, "partial_image", preview.image, created)
    about = {"preview": True, "step": preview.step, "image": preview.image_index}
    return {**event, "partial_image_index": preview.index, "tritium": about}


def completed_events(accepted: Accepted, done: Done, created: int) -> list[dict[str, Any]]:
    """Return the last events of a stream, one an image."""
    facts: dict[str, Any] = {"usage": usage(accepted, done.facts)}
    if accepted.identifier:
        facts["safety_identifier"] = accepted.identifier
    about = extension(accepted, done.facts)
    return [
        {**_event(accepted, "completed", image, created), **facts, "tritium": {**about, "image": index}}
        for index, image in enumerate(done.images)
    ]


def model_object(model: Model, created: int) -> dict[str, Any]:
    """Return a model as `/v1/models` lists it, with its promises."""
    promises = {
        "kinds": model.kinds,
        "sizes": [f"{width}x{height}" for width, height in model.sizes],
        "steps": model.steps,
        "max_steps": model.max_steps,
        "frames": model.frames,
        "frames_per_second": model.frames_per_second,
        "batches": {f"{size[0]}x{size[1]}": batches for size, batches in model.batches.items()},
        "seconds": {f"{size[0]}x{size[1]}": seconds for size, seconds in model.seconds.items()},
        "eager_seconds": model.eager_seconds,
        "fidelities": model.fidelities,
        "recipes": model.recipes,
        "loras": model.loras,
        "qualities": sorted(model.qualities),
        "takes": model.takes,
    }
    return {"id": model.name, "object": "model", "created": created, "owned_by": "tritium", "tritium": promises}
