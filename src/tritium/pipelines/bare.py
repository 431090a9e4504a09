"""A bare model in the place of a pipeline."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn


class BareModel:
    """What the front door reads of a pipeline, for one model: its components and its device."""

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
