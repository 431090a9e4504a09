"""Recompile reasons, parsed from Dynamo's messages about failed guards."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from tritium.report.records import Recompile

_MISMATCH = re.compile(
    r"tensor '(?P<argument>.+?)' (?P<what>[\w ]+?) mismatch(?: at index (?P<index>\d+))?\. "
    r"expected (?P<was>.+), actual (?P<now>.+?)(?:$|[.\n])"
)
_EQUALITY = re.compile(r"^(?P<argument>[A-Za-z_][\w.\[\]']*) == (?P<was>.+)$")
_NAME = re.compile(r"[A-Za-z_]\w*")
# A path inside a module, as Dynamo writes it: the outermost step goes through the module's __dict__.
_STEP = r"(?:\.__dict__\['_(?:modules|parameters|buffers)'\]|\._(?:modules|parameters|buffers))\['([^']+)'\]"
_INSIDE = re.compile(rf"self(?:{_STEP}|\.\w+(?:\['[^']+'\])?)+")


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
    if reason.startswith("GLOBAL_STATE changed"):
        return Recompile(graph, None, None, None, reason)
    equality = _EQUALITY.match(reason)
    inside = _INSIDE.search(reason)
    if inside is not None:
        was = equality["was"].strip() if equality is not None else None
        return Recompile(graph, _inner_name(inside[0]), was, None, reason)
    named = next((name for name in _NAME.findall(reason) if name in arguments), None)
    argument = equality["argument"] if equality is not None else named
    if argument is None:
        return Recompile(graph, None, None, None, reason)
    was = equality["was"].strip() if equality is not None else None
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
