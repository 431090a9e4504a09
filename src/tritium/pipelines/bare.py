"""A single model in place of a pipeline."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn


class BareModel:
    """Wrap a model with the attributes of a pipeline that `optimize` reads: components and device."""

    NAME = "model"

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    @property
    def components(self) -> Mapping[str, Any]:
        return {self.NAME: self.module}

    @property
    def device(self) -> torch.device:
        tensors = (*self.module.parameters(), *self.module.buffers())
        return tensors[0].device if tensors else torch.device("cpu")
