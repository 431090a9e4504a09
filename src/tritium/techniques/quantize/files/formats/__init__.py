"""The formats of quantized checkpoints that can be read: one module each, which declares a `FORMAT`."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tritium.errors import CheckpointError
from tritium.techniques.quantize.files.layer import Checkpoint, QuantizedLayer
from tritium.techniques.quantize.files.tensors import Tensors

# The layers of a file. A format takes its tensors; the others stay as they are.
Layers = dict[str, QuantizedLayer]


@dataclass(frozen=True)
class FileFormat:
    """One format.

    Args:
        name: Its name in messages.
        recognises: Returns True for files of this format, by names and dtypes alone.
        read: Takes the quantized layers from the file.
        order: Formats with smaller numbers are asked first, because others would recognise their files too.
    """

    name: str
    recognises: Callable[[Tensors], bool]
    read: Callable[[Tensors], Layers]
    order: int = 0


def catalog() -> list[FileFormat]:
    modules = (importlib.import_module(f"{__name__}.{found.name}") for found in pkgutil.iter_modules(__path__))
    return sorted((module.FORMAT for module in modules), key=lambda format_: (format_.order, format_.name))


def read(path: Path) -> Checkpoint:
    """Read a safetensors file, an index of shards, or a folder with one of them."""
    tensors = Tensors(path)
    formats = catalog()
    for format_ in formats:
        if format_.recognises(tensors):
            layers = format_.read(tensors)
            if not layers:
                raise tensors.error(f"it looks like {format_.name}, and has no quantized layer")
            return Checkpoint(format_.name, layers, tensors.rest())
    known = ", ".join(format_.name for format_ in formats)
    raise CheckpointError(f"{path}: no quantized checkpoint of a known format; these are: {known}")
