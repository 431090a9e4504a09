"""What a worker serves: plain data, without torch, that a parent process passes to its workers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tritium.serve.engine import Quality, Size

# The recipe of this name is the way of running of requests that name none.
DEFAULT_RECIPE = "default"


@dataclass(frozen=True, kw_only=True)
class WorkerSettings:
    """One pipeline, the requests that it is compiled for, and the way it runs."""

    # A diffusers folder, or "example".
    pipeline: str
    # The name in requests.
    name: str
    # Width and height; empty for the pipeline's default.
    sizes: tuple[Size, ...] = ()
    # Batch sizes that are compiled and measured.
    batches: tuple[int, ...] = (1,)
    # Default steps of a request; None for the pipeline's.
    steps: int | None = None
    # Numbers of frames of a video; empty for the pipeline's default.
    frames: tuple[int, ...] = ()
    # `max_sequence_length` of every call; None for the pipeline's.
    text_tokens: int | None = None
    # Files of recipes and LoRAs by the name that requests use.
    recipes: Mapping[str, str] = field(default_factory=dict)
    loras: Mapping[str, str] = field(default_factory=dict)
    # What OpenAI's `quality` stands for.
    qualities: Mapping[str, Quality] = field(default_factory=dict)
    # Rank of the LoRA layers; None for the largest rank of the files.
    lora_rank: int | None = None
    # Also serve pipelines of the same components that edit images, where diffusers has them.
    edits: bool = True
    # Compiled code: read if the file exists, else written after the warm-up.
    artifacts: str | None = None
    # Keyword arguments of `Plan`: techniques by name.
    techniques: Mapping[str, Any] = field(default_factory=dict)
    # Fields of `CompilationConfig`.
    config: Mapping[str, Any] = field(default_factory=dict)
    # Run the stock pipeline, without Tritium.
    eager: bool = False
    # Also time an eager image, for the web page.
    measure_eager: bool = False
    # "cuda" or "cpu"; None for a GPU if there is one.
    device: str | None = None
    # The index of the worker's GPU.
    gpu: int = 0
