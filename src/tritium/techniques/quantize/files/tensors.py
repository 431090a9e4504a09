"""Tensors of safetensors files, checked when they are read: a wrong file is one clear error."""

from __future__ import annotations

import contextlib
import importlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from tritium.errors import CheckpointError, MissingExtra, brief

INDEX = ".safetensors.index.json"


class Tensors:
    """The tensors of one safetensors file or of several shards. `take` removes what it returns from `names`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: dict[str, str] = {}
        # The names that were not taken yet, with an open file each.
        self.names: dict[str, Any] = {}
        for file in _files(path):
            opened = _open(file)
            self.metadata |= opened.metadata() or {}
            for name in opened.keys():  # noqa: SIM118 - the opened file is no mapping
                if name in self.names:
                    raise self.error(f"{name!r} is in two shards")
                self.names[name] = opened

    def error(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {what}")

    def dtype(self, name: str) -> str:
        """Return the dtype of a tensor in the words of the file format, such as `F8_E4M3`."""
        return str(self.names[name].get_slice(name).get_dtype())

    def take(
        self, name: str, dtypes: Sequence[torch.dtype] = (), shapes: Sequence[tuple[int, ...]] = ()
    ) -> torch.Tensor:
        """Return a tensor of one of these dtypes and shapes; raise a `CheckpointError` if there is none."""
        if name not in self.names:
            raise self.error(f"{name!r} is missing")
        tensor: torch.Tensor = self.names.pop(name).get_tensor(name)
        if dtypes and tensor.dtype not in dtypes:
            raise self.error(f"{name!r} is {tensor.dtype}, not {' or '.join(map(str, dtypes))}")
        if shapes and tuple(tensor.shape) not in shapes:
            raise self.error(f"{name!r} has shape {tuple(tensor.shape)}, not {' or '.join(map(str, shapes))}")
        return tensor

    def take_if_there(self, name: str, *rest: Any) -> torch.Tensor | None:
        return self.take(name, *rest) if name in self.names else None

    def weight(self, name: str, *dtypes: torch.dtype) -> torch.Tensor:
        """Return a weight [N, K]."""
        weight = self.take(name, dtypes)
        if weight.dim() != 2:
            raise self.error(f"{name!r} has shape {tuple(weight.shape)}, and the weight of a linear is [N, K]")
        return weight

    def scale(self, name: str, rows: int, *, whole: bool) -> torch.Tensor:
        """Return the scales of a weight as [N, 1]: one for each row, or with `whole` also one for all."""
        shapes = [(rows,), (rows, 1), *[(), (1,), (1, 1)] * whole]
        found = self.take(name, (torch.float32,), shapes).reshape(-1, 1)
        if not bool(torch.isfinite(found).all()) or bool((found <= 0).any()):
            raise self.error(f"{name!r} has scales that are not positive numbers")
        return found.expand(rows, 1).contiguous()

    def bias(self, layer: str, rows: int) -> torch.Tensor | None:
        return self.take_if_there(f"{layer}.bias", (torch.float32, torch.bfloat16, torch.float16), [(rows,)])

    def rest(self) -> dict[str, torch.Tensor]:
        """Return the tensors that were not taken."""
        return {name: self.take(name) for name in list(self.names)}

    def layers_with(self, suffix: str) -> list[str]:
        """Return the names of the layers that have a tensor of this name."""
        return [name.removesuffix(suffix) for name in self.names if name.endswith(suffix)]

    def json(self, name: str, text: str) -> Any:
        """Return the value of a text of the file."""
        try:
            return json.loads(text)
        except ValueError as error:
            raise self.error(f"{name} is no JSON: {error}") from error


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; raise a `CheckpointError` for anything else."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: {brief(error)}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path}: an object was expected, got {type(found).__name__}")
    return found


def _files(path: Path) -> list[Path]:
    """Return the shards of a file, of an index, or of a folder with one of them."""
    if path.is_dir():
        found = sorted(path.glob(f"*{INDEX}")) or sorted(path.glob("*.safetensors"))
        if len(found) != 1:
            raise CheckpointError(
                f"{path}: a folder with one safetensors file or index was expected, it has {len(found)}"
            )
        path = found[0]
    if not path.name.endswith(INDEX):
        return [path]
    parts = read_json(path).get("weight_map")
    if not isinstance(parts, dict) or not all(isinstance(part, str) for part in parts.values()):
        raise CheckpointError(f"{path}: it has no 'weight_map' of names and files")
    return [path.parent / Path(part).name for part in dict.fromkeys(parts.values())]


def _open(path: Path) -> Any:
    try:
        safetensors = importlib.import_module("safetensors")
    except ImportError as error:
        raise MissingExtra("safetensors", "diffusers", "reading a quantized checkpoint") from error
    with _as_checkpoint_error(path):
        return safetensors.safe_open(path, framework="pt")


@contextlib.contextmanager
def _as_checkpoint_error(path: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        # safetensors raises SafetensorError, OSError or FileNotFoundError.
        raise CheckpointError(f"{path}: {brief(error)}") from error
