"""Store the weights of a part's convolutions in the channels-last memory format."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from tritium.techniques.technique import Note, Part, Technique

_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}

# The strides of parameters before their memory format was changed.
Strides = dict[nn.Parameter, tuple[int, ...]]


@dataclass(frozen=True)
class ChannelsLast:
    """Convert the weights of convolutions to channels-last, until the technique is removed."""

    def __str__(self) -> str:
        return "channels-last"


def applies_to(part: Part, _config: ChannelsLast) -> str | None:
    has_images = any(parameter.dim() in _FORMATS for parameter in part.module.parameters())
    return None if has_images else "it has no convolutions over images or videos"


# In inference mode, new storage would turn the parameters into inference tensors permanently.
@torch.inference_mode(mode=False)
@torch.no_grad()
def apply(part: Part, _config: ChannelsLast) -> Strides:
    # torch 2.11 does not guard on strides of weights and would reuse code that was compiled for the other format.
    part.compile_with(apart="channels_last")
    strides: Strides = {}
    for parameter in part.module.parameters():
        if parameter.dim() in _FORMATS and parameter not in strides:
            strides[parameter] = parameter.stride()
            parameter.data = parameter.data.contiguous(memory_format=_FORMATS[parameter.dim()])
    return strides


@torch.inference_mode(mode=False)
@torch.no_grad()
def remove(_part: Part, strides: Strides) -> None:
    """Restore the strides, and keep the current values."""
    for parameter, before in strides.items():
        restored = torch.empty_strided(parameter.shape, before, dtype=parameter.dtype, device=parameter.device)
        parameter.data = restored.copy_(parameter.data)


def variants(part: Part) -> Sequence[ChannelsLast]:
    return [ChannelsLast()] if applies_to(part, ChannelsLast()) is None else []


def report(_part: Part, _config: ChannelsLast, strides: Strides) -> Note:
    return Note("weights channels-last", {"parameters": len(strides)})


TECHNIQUE = Technique(
    name="channels_last",
    config=ChannelsLast,
    applies_to=applies_to,
    apply=apply,
    remove=remove,
    variants=variants,
    report=report,
)
