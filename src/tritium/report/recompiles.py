"""Reasons of recompiles, parsed from Dynamo's messages about failed guards, and how to prevent them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tritium.report.observation import Record

_MISMATCH = re.compile(
    r"tensor '(?P<argument>.+?)' (?P<what>[\w ]+?) mismatch(?: at index (?P<index>\d+))?\. "
    r"expected (?P<was>.+), actual (?P<now>.+?)(?:$|[.\n])"
)
_EQUALITY = re.compile(r"^(?P<argument>[A-Za-z_][\w.\[\]']*) == (?P<was>.+)$")
_NAME = re.compile(r"[A-Za-z_]\w*")
# A path inside a module, as Dynamo writes it: the outermost step goes through the module's __dict__.
_STEP = r"(?:\.__dict__\['_(?:modules|parameters|buffers)'\]|\._(?:modules|parameters|buffers))\['([^']+)'\]"
_INSIDE = re.compile(rf"self(?:{_STEP}|\.\w+(?:\['[^']+'\])?)+")
_SIZE = re.compile(r"size (\d+) at dim (\d+)")


@dataclass(frozen=True)
class Recompile(Record):
    """The reason why a frame was compiled again."""

    graph: str
    argument: str | None
    was: str | None
    now: str | None
    reason: str

    @property
    def suggestion(self) -> str | None:
        """The line to write to prevent this recompile, or None."""
        return suggest(self.argument, self.was, self.now, self.reason)

    def to_dict(self) -> dict[str, Any]:
        return {**super().to_dict(), "suggestion": self.suggestion}


def parse_guard_failure(graph: str, text: str, arguments: Mapping[str, Any]) -> Recompile:
    """Parse Dynamo's message about a failed guard into argument, was and now.

    >>> parse_guard_failure("0/1", "0/0: tensor 'x' size mismatch at index 1. expected 8, actual 16", {})
    Recompile(graph='0/1', argument='x', was='size 8 at dim 1', now='size 16 at dim 1', reason="tensor 'x' size mismatch at index 1. expected 8, actual 16")
    """
    first = re.sub(r"^\d+/\d+(?:_\d+)?: ", "", text.splitlines()[0])
    reason = first.split("  #")[0].strip()
    mismatch = _MISMATCH.search(reason)
    if mismatch is not None:
        what, index = mismatch["what"], mismatch["index"]
        place = f" at dim {index}" if index is not None else ""
        values = [f"{what} {mismatch[key].strip()}{place}" for key in ("was", "now")]
        if what == "dispatch key set":
            # Ordinary use changes only this key: tensors created under inference_mode lack it.
            values = ["normal tensor" if "ADInplaceOrView" in value else "inference tensor" for value in values]
        return Recompile(graph, _argument_name(mismatch["argument"]), values[0], values[1], reason)
    equality = _EQUALITY.match(reason)
    was = equality["was"].strip() if equality is not None else None
    inside = _INSIDE.search(reason)
    if inside is not None:
        return Recompile(graph, _inner_name(inside[0]), was, None, reason)
    named = next((name for name in _NAME.findall(reason) if name in arguments), None)
    argument = equality["argument"] if equality is not None else named
    if argument is None:
        return Recompile(graph, None, None, None, reason)
    now = _brief(arguments[argument]) if argument in arguments else None
    return Recompile(graph, _argument_name(argument), was, now, reason)


def _argument_name(text: str) -> str:
    """Return `hidden_states` for `kwargs['hidden_states']`, the name that Dynamo sees behind a decorator."""
    return re.sub(r"^(?:kw)?args\['?([\w.]+)'?\]", r"\1", text)


def _inner_name(path: str) -> str:
    """Return a path inside a module in the user's notation.

    >>> _inner_name("self._modules['attn']._modules['to_q'].scaling['one']")
    "attn.to_q.scaling['one']"
    >>> _inner_name("self.__dict__['_modules']['blocks']._modules['0'].scale")
    'blocks.0.scale'
    """
    return re.sub(_STEP, r".\1", path).removeprefix("self.")


def _brief(value: Any) -> str:
    shape = getattr(value, "shape", None)
    if shape is not None and hasattr(value, "dtype"):
        return f"tensor of shape {tuple(shape)}, {value.dtype}"
    text = repr(value)
    return text if len(text) <= 60 else f"{type(value).__name__} object"


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
