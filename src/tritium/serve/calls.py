"""Calls of a pipeline: from jobs to its arguments, from its output to encoded results, and facts about its class."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from tritium.errors import PipelineError
from tritium.serve import images
from tritium.serve.engine import Job, Kind, Size

# Where neither the pipeline nor the command line has a default.
_STEPS = 28
_SIDE = 1024

# Pipelines that take several images to edit; all others take one.
_SEVERAL_IMAGES = {"Flux2Pipeline": 10, "Flux2KleinPipeline": 4, "QwenImageEditPlusPipeline": 3}

# Names of the pipelines that share the components of another one.
EDIT, INPAINT = "edit", "inpaint"


@dataclass(frozen=True)
class Caller:
    """One pipeline object and the arguments of its calls."""

    pipe: Any

    @cached_property
    def parameters(self) -> Mapping[str, inspect.Parameter]:
        return inspect.signature(type(self.pipe).__call__).parameters

    def default(self, name: str) -> Any:
        """Return the default of an argument; None if it has none."""
        parameter = self.parameters.get(name)
        return None if parameter is None or parameter.default is inspect.Parameter.empty else parameter.default

    @property
    def is_video(self) -> bool:
        return "num_frames" in self.parameters

    @property
    def kinds(self) -> tuple[Kind, ...]:
        if self.is_video:
            return ("video",)
        if "image" not in self.parameters:
            return ("image",)
        return ("edit",) if self.needs_image else ("image", "edit")

    @property
    def needs_image(self) -> bool:
        """Return True if every call starts from an uploaded image."""
        image = self.parameters.get("image")
        return image is not None and image.default is inspect.Parameter.empty

    @property
    def steps(self) -> int:
        return self.default("num_inference_steps") or _STEPS

    @property
    def size(self) -> Size:
        """Return the default width and height."""
        width, height = self.default("width"), self.default("height")
        if width and height:
            return width, height
        side = getattr(self.pipe, "default_sample_size", None)
        factor = getattr(self.pipe, "vae_scale_factor", None)
        return (side * factor,) * 2 if isinstance(side, int) and isinstance(factor, int) else (_SIDE, _SIDE)

    @property
    def max_images(self) -> int:
        return _SEVERAL_IMAGES.get(type(self.pipe).__name__, 1)

    @property
    def has_callback(self) -> bool:
        return "callback_on_step_end" in self.parameters

    @property
    def doubles_batch(self) -> bool:
        """Return True if guidance is a larger batch, so that calls without guidance have other shapes."""
        return hasattr(type(self.pipe), "do_classifier_free_guidance") and "guidance_scale" in self.parameters

    def takes(self) -> tuple[str, ...]:
        """Return the optional arguments that requests may have, as `Model.takes` names them."""
        names = {"negative_prompt": "negative_prompt", "guidance": "guidance_scale", "true_cfg": "true_cfg_scale"}
        return tuple(name for name, argument in names.items() if argument in self.parameters)

    def arguments(self, jobs: Sequence[Job], text_tokens: int | None = None) -> dict[str, Any]:
        """Return the arguments of one call for a batch of jobs of one group."""
        job = jobs[0]
        found: dict[str, Any] = {
            "prompt": [one.prompt for one in jobs],
            "height": job.height,
            "width": job.width,
            "num_inference_steps": job.steps,
            # On the host, so that every device starts from the same noise.
            "generator": [torch.Generator("cpu").manual_seed(one.seed) for one in jobs],
            "output_type": "pil",
        }
        optional = {
            "num_frames": job.frames if self.is_video else None,
            "max_sequence_length": text_tokens,
            "guidance_scale": job.guidance,
            "true_cfg_scale": job.true_cfg,
            "negative_prompt": [one.negative_prompt for one in jobs] if job.negative_prompt is not None else None,
            **self._uploads(jobs),
        }
        found |= {name: value for name, value in optional.items() if value is not None}
        for name in found:
            if name not in self.parameters and name not in ("height", "width"):
                raise PipelineError(f"{type(self.pipe).__name__} takes no {name}")
        return {name: value for name, value in found.items() if name in self.parameters}

    def _uploads(self, jobs: Sequence[Job]) -> dict[str, Any]:
        if not jobs[0].images:
            return {}
        uploads = [[images.decode(content, job.size) for content in job.images] for job in jobs]
        found: dict[str, Any] = {"image": uploads[0] if self.max_images > 1 else [first for first, *_ in uploads]}
        masks = [images.decode_mask(job.mask, job.size) for job in jobs if job.mask is not None]
        if masks:
            found["mask_image"] = masks
        if "_auto_resize" in self.parameters:
            # The uploads have the promised size already.
            found["_auto_resize"] = False
        return found

    def total_steps(self, job: Job) -> int:
        """Return the steps of the running call: fewer than asked for if it starts from an image."""
        return int(getattr(self.pipe, "num_timesteps", None) or job.steps)


def results(output: Any) -> list[Any]:
    """Return the PIL images of a call, or the frames of each video."""
    found = output.images if hasattr(output, "images") else output.frames
    return list(found)


def related(pipe: Any) -> dict[str, Any]:
    """Return pipelines that edit images with the components of another pipeline, where diffusers has such classes."""
    found = {}
    for name, words in ((EDIT, "Img2Img"), (INPAINT, "Inpaint")):
        # AutoPipelineForImage2Image has these classes too, and imports all pipelines of diffusers: 2 s of a start.
        cls = getattr(importlib.import_module("diffusers"), _class_name(pipe, words), None)
        other = _sharing(pipe, cls) if cls is not None else None
        if other is not None:
            other.set_progress_bar_config(disable=True)
            found[name] = other
    return found


def _class_name(pipe: Any, words: str) -> str:
    return type(pipe).__name__.removesuffix("Pipeline") + f"{words}Pipeline"


def _sharing(pipe: Any, cls: Any) -> Any:
    """Return a pipeline of a class with another one's components; None if it needs further ones."""
    parameters = dict(list(inspect.signature(cls.__init__).parameters.items())[1:])
    given = {name: value for name, value in {**pipe.config, **pipe.components}.items() if name in parameters}
    needed = {name for name, parameter in parameters.items() if parameter.default is inspect.Parameter.empty}
    return cls(**given) if needed <= given.keys() else None
