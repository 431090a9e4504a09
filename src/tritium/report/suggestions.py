"""Suggestions to the user for preventing recompiles."""

from __future__ import annotations

import re

_SIZE = re.compile(r"size (\d+) at dim (\d+)")


def suggest(argument: str | None, was: str | None, now: str | None, reason: str) -> str | None:
    """Return the line that prevents a recompile, or None.

    >>> suggest("encoder_hidden_states", "size 128 at dim 1", "size 512 at dim 1", "")
    'Plan(shapes=Shapes(..., text_tokens=[128, 512])), or dynamic_dims={"encoder_hidden_states": [1]}'
    """
    if argument is not None and (shape := _suggest_shape(argument, was, now)) is not None:
        return shape
    if now == "inference tensor" or was == "inference tensor" or "GLOBAL_STATE" in reason or "grad_mode" in reason:
        return "make every call, and handle.warmup(), in one mode: with torch.inference_mode():"
    if "requires_grad mismatch" in reason:
        return "freeze the weights before warmup(): model.requires_grad_(False); loading a LoRA freezes them otherwise"
    if "peft." in reason or "lora_" in reason or "merged_adapters" in reason or (argument and ".scaling[" in argument):
        return "load LoRAs and set their scales before handle.warmup(), or merge them: pipe.fuse_lora()"
    if reason.startswith("___check_type_id(self"):
        return "replace modules, as loading a LoRA does, before handle.warmup()"
    if argument is None:
        return None
    if was is not None and was.startswith("stride"):
        return f"pass {argument} in one memory layout"
    if was is not None and "dtype" in was:
        return f"pass {argument} in one dtype"
    if re.search(rf"{re.escape(argument)}.* is None|is not None|NoneType", reason) or "None" in (was, now):
        return f"pass {argument} always, or never"
    if was is not None and re.fullmatch(r"-?\d+(\.\d+)?(e-?\d+)?|True|False|'.*'", was):
        return f"pass {argument} as a tensor if it changes from call to call"
    return None


def _suggest_shape(argument: str, was: str | None, now: str | None) -> str | None:
    sizes = [_SIZE.fullmatch(text or "") for text in (was, now)]
    if sizes[0] is None or sizes[1] is None:
        return None
    first, second, dim = sizes[0][1], sizes[1][1], sizes[0][2]
    shapes = "Shapes(sizes=[...])"
    if dim == "0":
        shapes = f"Shapes(..., batch=[{first}, {second}])"
    elif "encoder" in argument or "txt" in argument or "prompt" in argument:
        shapes = f"Shapes(..., text_tokens=[{first}, {second}])"
    return f'Plan(shapes={shapes}), or dynamic_dims={{"{argument}": [{dim}]}}'
