"""A small, trained text-to-image pipeline of stock diffusers classes that ships with the package.

It generates images of coloured shapes from prompts such as "two red circles above a blue square on a yellow
background", in about a second on a CPU and without a network. Demonstrations, tests and first trials run on it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from tritium.errors import MissingWeights
from tritium.example.grammar import PROMPTS, VOCABULARY, unknown_words
from tritium.example.loading import load_pipeline

__all__ = ["PROMPTS", "RECIPE", "VOCABULARY", "WEIGHTS", "is_example", "load_example", "unknown_words"]

WEIGHTS = Path(__file__).parent / "weights"
# From `tritium tune example --min-psnr 32`; `tritium.optimize(pipe, "example")` applies it.
RECIPE = Path(__file__).parent / "recipe.json"
# Default size 128 x 128: most of the training used it, and it is fast on a CPU.
SIDE = 128


def load_example(device: str | torch.device = "cpu", dtype: torch.dtype | None = None) -> Any:
    """Load the example pipeline as a `diffusers.FluxPipeline`, by default in float32.

    Prompts use the words in `VOCABULARY`; `unknown_words` returns the other words of a prompt. Sizes are multiples of
    16 from 96 to 256. For guidance, pass `true_cfg_scale` above 1 with `negative_prompt=""`.
    """
    if not (WEIGHTS / "model_index.json").is_file():
        raise MissingWeights(
            f"the example pipeline's weights are not in {WEIGHTS}; install the package from its wheel, "
            "or train them with training/train.py and copy the saved pipeline there"
        )
    pipeline = load_pipeline(WEIGHTS, dtype or torch.float32, "the example pipeline")
    pipeline.default_sample_size = SIDE // pipeline.vae_scale_factor
    return pipeline.to(device)


def is_example(pipe: Any) -> bool:
    """Return True if a pipeline has a denoiser with the example's configuration, on any device and in any dtype."""
    # Newer versions of diffusers may add entries with defaults, so only those of the file are compared.
    shipped = json.loads((WEIGHTS / "transformer" / "config.json").read_text(encoding="utf-8"))
    own = getattr(getattr(pipe, "transformer", None), "config", {})
    names = [name for name in shipped if not name.startswith("_")]
    return all(name in own and json.loads(json.dumps(own[name])) == shipped[name] for name in names)
