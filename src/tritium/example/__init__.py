"""A small text-to-image pipeline that ships with the package, trained, made of stock diffusers classes.

It draws coloured shapes from prompts such as "two red circles above a blue square on a yellow background" in a second
or so on a CPU, needs no network, and is what the demonstrations, the tests and first tries run on.
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
# The plain call draws 128 x 128: the size most of the training was spent on, and quick on a CPU.
SIDE = 128


def load_example(device: str | torch.device = "cpu", dtype: torch.dtype | None = None) -> Any:
    """The example pipeline as a `diffusers.FluxPipeline`, in float32 unless `dtype` says otherwise.

    Prompts are made of the words in `VOCABULARY`; `unknown_words` names those of a prompt that are not. Sizes are
    multiples of 16 from 96 to 256. Guidance is `true_cfg_scale` above 1 with `negative_prompt=""`.
    """
    if not (WEIGHTS / "model_index.json").is_file():
        raise MissingWeights(
            f"the example pipeline's weights are not in {WEIGHTS}; install the package from its wheel, "
            "or train them with training/train.py and copy the saved pipeline there"
        )
    pipeline = load_pipeline(WEIGHTS, dtype or torch.float32, "the example pipeline")
    pipeline.default_sample_size = SIDE // pipeline.vae_scale_factor
    return pipeline.to(device)
