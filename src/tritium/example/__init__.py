"""A small, trained text-to-image pipeline of stock diffusers classes that ships with the package.

It generates images of coloured shapes from prompts such as "two red circles above a blue square on a yellow
background", in about a second on a CPU and without a network. Demonstrations, tests and first trials run on it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tritium.errors import MissingWeights
from tritium.example.grammar import PROMPTS, VOCABULARY, unknown_words
from tritium.example.loading import load_pipeline

__all__ = ["PROMPTS", "VOCABULARY", "WEIGHTS", "load_example", "unknown_words"]

WEIGHTS = Path(__file__).parent / "weights"
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
