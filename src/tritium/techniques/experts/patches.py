"""HiDream's forward reads the number of its patches back from the device: count them on the host instead."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

_CLASS = "HiDreamImageTransformer2DModel"


def count_on_host(module: nn.Module) -> bool:
    """Let `patchify` of a model return the sizes of its patches as integers; return False for other models."""
    if not any(kind.__name__ == _CLASS for kind in type(module).__mro__) or "patchify" in module.__dict__:
        return False
    model: Any = module

    def patchify(latents: torch.Tensor) -> Any:
        tokens, mask, _sizes, positions = type(model).patchify(model, latents)
        batch, _, height, width = latents.shape
        side = model.config.patch_size
        return tokens, mask, [(height // side, width // side)] * batch, positions

    module.__dict__["patchify"] = patchify
    return True


def restore(module: nn.Module) -> None:
    del module.__dict__["patchify"]
