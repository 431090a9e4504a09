"""Static scales of the inputs of linears, kept beside the linears' weights.

Before:  q, s = tritium::quantize_rows(x, dtype, rotate, None, None)              a scale for every row
After:   q, s = tritium::quantize_rows(x, dtype, rotate, input_scales(w), input_step(w))

A linear's forward reads no scales of its input, so that Dynamo has none in its graph, and equal blocks share compiled
code. The weight is in the graph. Scales are therefore registered by weight, and enter the graph as `freezing`'s values of
that weight: inputs at fixed addresses, other ones for each block. The step is one integer tensor on the device for all
linears of a part, which the technique writes before a call. It is read on the device when the kernel runs: another step
compiles nothing, and a captured graph follows it.

    step = torch.zeros((), dtype=torch.int64, device="cuda")
    for linear, scales in measured:                                 # scales: float32 [T], T = 1 without a step
        set_input_scales(linear.weight, scales, step)
    quantize_linears({name: Precision("int8", scales="step", steps=T), ...})
    step.fill_(3)                                                   # before each call of the part
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.utils.weak import WeakIdKeyDictionary

from tritium import compat
from tritium.compiler.passes import freezing
from tritium.errors import PipelineError


@dataclass(frozen=True)
class InputScales:
    """The scales of one linear's input, float32 [T], and the tensor that holds the step, or None."""

    scales: torch.Tensor
    step: torch.Tensor | None


_OF_WEIGHT: WeakIdKeyDictionary = WeakIdKeyDictionary()

NONE = "no scale of its input was set: measure them first, or use scales='row'"


def set_input_scales(weight: torch.Tensor, scales: torch.Tensor, step: torch.Tensor | None = None) -> None:
    """Set the static scales of the input of the linear with this weight; compiled code uses them from the next call on.

    Args:
        weight: The parameter of the linear.
        scales: One positive number, or with a step one for each step. For float8, powers of two lose nothing.
        step: An integer tensor with one element on the weight's device, whose content selects the scale.
    """
    if scales.dim() > 1 or scales.numel() == 0 or (step is None and scales.numel() != 1):
        raise ValueError(f"scales are one number, or a vector of one a step with a step; got {tuple(scales.shape)}")
    if step is not None and (step.numel() != 1 or step.dtype != torch.int64 or step.device != weight.device):
        raise ValueError(
            f"the step is one int64 on {weight.device}, got {step.dtype} {tuple(step.shape)} on {step.device}"
        )
    with torch.inference_mode(False), torch.no_grad():
        kept = scales.detach().to(weight.device, torch.float32).reshape(-1).clone()
    if not bool((kept.isfinite() & (kept > 0)).all()):
        raise ValueError("scales are positive and finite")
    _OF_WEIGHT[weight] = InputScales(kept, step)
    freezing.forget()


def forget_input_scales(weight: torch.Tensor) -> None:
    """Remove the static scales of a linear's input."""
    _OF_WEIGHT.pop(weight, None)
    freezing.forget()


def scales_of(weight: torch.Tensor) -> InputScales | None:
    found: InputScales | None = _OF_WEIGHT.get(weight)
    return found


def input_scales(weight: torch.Tensor, steps: int) -> torch.Tensor:
    """Return the registered scales of a weight, float32 [steps]."""
    if compat.tensors.fake_mode_of(weight) is not None:
        return weight.new_empty((steps,), dtype=torch.float32)
    scales = _known(weight).scales
    if scales.numel() != steps:
        raise PipelineError(
            f"scales of {steps} steps were compiled, and {scales.numel()} are set; apply quantize again"
        )
    return scales.to(weight.device)


def input_step(weight: torch.Tensor) -> torch.Tensor:
    """Return the tensor that holds the step for a weight: the registered tensor itself, so that writes to it count."""
    if compat.tensors.fake_mode_of(weight) is not None:
        return weight.new_empty((), dtype=torch.int64)
    step = _known(weight).step
    if step is None:
        raise PipelineError("scales by step were compiled, and scales without a step are set; apply quantize again")
    if step.device != weight.device:
        raise PipelineError(f"the step is on {step.device} and the weight on {weight.device}; apply quantize again")
    return step.reshape(())


def _known(weight: torch.Tensor) -> InputScales:
    found = scales_of(weight)
    if found is None:
        raise PipelineError(NONE)
    return found
