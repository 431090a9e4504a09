"""Load a pipeline by name, and list the jobs to run with it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tritium.errors import ConfigError, brief
from tritium.example import PROMPTS, VOCABULARY, load_example, unknown_words
from tritium.example.loading import load_pipeline
from tritium.pipelines.generation import Job

EXAMPLE = "example"

# For pipelines other than the example.
_PROMPTS = ("a red apple on a wooden table", "a lighthouse at night, long exposure")


def jobs_for(
    model: str,
    prompts: Sequence[str] | None = None,
    sizes: Sequence[str] | None = None,
    steps: int | None = None,
    seeds: Sequence[int] | None = None,
) -> list[Job]:
    """Return a job for every prompt, size (`WxH`) and seed; by default the seed is the number of the prompt."""
    # The example was trained for its own prompts.
    prompts = prompts or (PROMPTS if model == EXAMPLE else _PROMPTS)
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


def width_and_height(text: str) -> tuple[int, int] | None:
    """Return the sides in `WxH`, or None for another text."""
    found = re.fullmatch(r"([0-9]+)x([0-9]+)", text.lower())
    return None if found is None else (int(found[1]), int(found[2]))


def _parsed(size: str) -> tuple[int, int]:
    found = width_and_height(size)
    if found is None:
        raise ConfigError(f"size {size!r} is not WIDTHxHEIGHT, such as 128x128")
    return found


def load(name: str, device_type: str, dtype: torch.dtype | None = None, *, on_host: bool = False) -> Any:
    """Load the example that ships with the package, or a pipeline from a local folder.

    With `on_host`, the weights stay there, and a budget of memory brings them to the device.
    """
    dtype = dtype or dtype_for(name, device_type)
    check_model(name)
    device_type = "cpu" if on_host else device_type
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


def dtype_for(name: str, device_type: str) -> torch.dtype:
    """Return the dtype in which a pipeline is loaded on a device."""
    return torch.bfloat16 if device_type == "cuda" and name != EXAMPLE else torch.float32


def check_model(name: str) -> None:
    """Raise unless the name is the example or a folder with a pipeline."""
    if name == EXAMPLE:
        return
    if not Path(name).is_dir():
        raise ConfigError(f"there is no model {name!r}: it is neither '{EXAMPLE}' nor a folder of this machine")
    if not (Path(name) / "model_index.json").is_file():
        raise ConfigError(f"{name!r} is no diffusers pipeline: it has no model_index.json")
