"""Generate images: load a pipeline by name, run a job, keep pixels, latents and seconds."""

from __future__ import annotations

import inspect
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tritium import device
from tritium.bench import quality
from tritium.bench.quality import Difference
from tritium.errors import ConfigError, brief
from tritium.example import PROMPTS, VOCABULARY, load_example, unknown_words
from tritium.example.loading import load_pipeline

EXAMPLE = "example"

# Image sizes are multiples of this: a VAE's factor of 8 and patches of 2.
MULTIPLE = 16

# A square of this side has 4 gigapixels, so a larger number is a typing error.
LONGEST_SIDE = 2**16

# The range that torch.Generator.manual_seed accepts.
SEEDS = range(-(2**63), 2**64)

# For pipelines other than the example.
_PROMPTS = ("a red apple on a wooden table", "a lighthouse at night, long exposure")


@dataclass(frozen=True, kw_only=True)
class Job:
    """One call of a pipeline. Sizes and steps of None mean the pipeline's defaults."""

    prompt: str
    width: int | None = None
    height: int | None = None
    steps: int | None = None
    seed: int = 0
    # Further arguments of the pipeline's call.
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("width", "height"):
            size = getattr(self, name)
            if size is not None and (size < MULTIPLE or size % MULTIPLE):
                raise ConfigError(f"{name} {size} is not a multiple of {MULTIPLE}")
            if size is not None and size > LONGEST_SIDE:
                raise ConfigError(f"{name} {size}: a side has at most {LONGEST_SIDE} pixels")
        if self.steps is not None and self.steps < 1:
            raise ConfigError(f"steps must be at least 1, got {self.steps}")
        if self.seed not in SEEDS:
            raise ConfigError(f"seed {self.seed} is out of range: torch takes -2**63 to 2**64 - 1")

    def to_dict(self) -> dict[str, Any]:
        return {**self.__dict__, "extra": dict(self.extra)}


@dataclass(frozen=True)
class Image:
    """The result of a job."""

    # [B, C, H, W] in 0..1; the frames of a video are a batch.
    pixels: Tensor
    # After the last step, before decoding; None for a pipeline that does not expose them.
    latents: Tensor | None
    seconds: float

    def difference(self, reference: Image, *, perceptual: bool = False) -> Difference:
        """Compare with another image of the same job, and with its latents if both have them."""
        latents = None
        if self.latents is not None and reference.latents is not None:
            latents = (self.latents, reference.latents)
        return quality.difference(self.pixels, reference.pixels, latents, perceptual=perceptual)


def prompts_of(model: str) -> Sequence[str]:
    """Return prompts for a pipeline; those of the example are what it was trained for."""
    return PROMPTS if model == EXAMPLE else _PROMPTS


def jobs_for(
    model: str,
    prompts: Sequence[str] | None = None,
    sizes: Sequence[str] | None = None,
    steps: int | None = None,
    seeds: Sequence[int] | None = None,
) -> list[Job]:
    """Return a job for every prompt, size (`WxH`) and seed; by default the seed is the number of the prompt."""
    prompts = prompts or prompts_of(model)
    strange = dict.fromkeys(word for prompt in prompts for word in unknown_words(prompt)) if model == EXAMPLE else None
    if strange:
        words = ", ".join(map(repr, strange))
        raise ConfigError(f"the example model does not know {words}; its words are: {' '.join(VOCABULARY)}")
    return [
        Job(prompt=prompt, width=width, height=height, steps=steps, seed=seed)
        for index, prompt in enumerate(prompts)
        for width, height in (map(_parsed, sizes) if sizes else [(None, None)])
        for seed in seeds or [index]
    ]


def _parsed(size: str) -> tuple[int, int]:
    found = re.fullmatch(r"([0-9]+)x([0-9]+)", size.lower())
    if found is None:
        raise ConfigError(f"size {size!r} is not WIDTHxHEIGHT, such as 128x128")
    return int(found[1]), int(found[2])


def load(name: str, device_type: str, dtype: torch.dtype | None = None) -> Any:
    """Load the example that ships with the package, or a pipeline from a local folder."""
    dtype = dtype or (torch.bfloat16 if device_type == "cuda" and name != EXAMPLE else torch.float32)
    check_model(name)
    if name == EXAMPLE:
        pipe = load_example(device_type, dtype)
    else:
        try:
            pipe = load_pipeline(Path(name), dtype, "loading a pipeline").to(device_type)
        except (OSError, ValueError, AttributeError, KeyError, TypeError) as error:
            # diffusers fails in these ways on a model_index.json that it does not understand.
            raise ConfigError(f"{name!r} is no diffusers pipeline: it cannot be loaded: {brief(error)}") from error
    pipe.set_progress_bar_config(disable=True)
    return pipe


def check_model(name: str) -> None:
    """Raise unless the name is the example or a folder with a pipeline."""
    if name == EXAMPLE:
        return
    if not Path(name).is_dir():
        raise ConfigError(f"there is no model {name!r}: it is neither '{EXAMPLE}' nor a folder of this machine")
    if not (Path(name) / "model_index.json").is_file():
        raise ConfigError(f"{name!r} is no diffusers pipeline: it has no model_index.json")


def generate(pipe: Any, job: Job) -> Image:
    """Run a job. The same job on the same pipeline starts from the same noise."""
    latents: Tensor | None = None

    def keep(_pipe: Any, _step: int, _time: Any, values: dict[str, Any]) -> dict[str, Any]:
        nonlocal latents
        latents = values["latents"]
        return values

    taken = inspect.signature(type(pipe).__call__).parameters
    arguments: dict[str, Any] = {"prompt": job.prompt, "output_type": "pt", **job.extra}
    # On the host, so that every device starts from the same noise.
    arguments["generator"] = torch.Generator("cpu").manual_seed(job.seed)
    asked = {"width": job.width, "height": job.height, "num_inference_steps": job.steps}
    arguments |= {name: value for name, value in asked.items() if value is not None}
    if "callback_on_step_end" in taken:
        arguments["callback_on_step_end"] = keep
    unknown = [name for name in arguments if name not in taken]
    if unknown:
        raise ConfigError(f"{type(pipe).__name__} takes no {', '.join(unknown)}")
    device.synchronize(pipe.device.type)
    start = time.perf_counter()
    output = pipe(**arguments)
    device.synchronize(pipe.device.type)
    seconds = time.perf_counter() - start
    found = output.images if hasattr(output, "images") else output.frames
    pixels = found if isinstance(found, Tensor) else torch.stack(list(found))
    # A video: [B, F, C, H, W].
    pixels = pixels.flatten(0, 1) if pixels.dim() == 5 else pixels
    pixels = pixels.detach().float().cpu().clamp(0, 1)
    return Image(pixels, latents.detach().clone() if latents is not None else None, seconds)
