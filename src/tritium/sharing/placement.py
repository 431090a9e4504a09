"""Where the weights of a pipeline on a CPU are: mapped from files or from a keeper, or in this process's own memory."""

from __future__ import annotations

import json
import struct
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tritium.sharing import memory, skeleton
from tritium.sharing.lease import leases
from tritium.sharing.weights import named_tensors

# Dtypes in the header of a safetensors file.
_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn"}

# The longest header that a safetensors file may have.
_HEADER_LIMIT = 100_000_000


@dataclass(frozen=True)
class Placement:
    """Where the weights of one component are, in bytes."""

    component: str
    # Pages of a file or of a keeper: all processes that map them share them.
    mapped: int
    private: int
    dtype: str
    # The dtype of most bytes in the component's files, if it was loaded from a folder.
    stored: str | None

    @property
    def is_cast(self) -> bool:
        return self.private > self.mapped and self.stored is not None and self.stored != self.dtype


def placements(pipe: Any, folder: Path | None = None) -> list[Placement]:
    """Return the placement of each component of a pipeline; `folder` is the one that it was loaded from."""
    ranges = _mapped_ranges()
    return [
        _placement(name, module, ranges, None if folder is None else folder / name)
        for name, module in skeleton.modules_of(pipe).items()
    ]


def _placement(name: str, module: nn.Module, ranges: list[tuple[int, int]], folder: Path | None) -> Placement:
    mapped = private = 0
    dtypes: Counter[str] = Counter()
    storages = {t.untyped_storage().data_ptr(): t for _, t in named_tensors(module) if t.device.type != "meta"}
    for address, tensor in storages.items():
        size = tensor.untyped_storage().nbytes()
        dtypes[str(tensor.dtype).removeprefix("torch.")] += size
        if _is_mapped(tensor, address, ranges):
            mapped += size
        else:
            private += size
    dtype = dtypes.most_common(1)[0][0] if dtypes else ""
    return Placement(name, mapped, private, dtype, None if folder is None else stored_dtype(folder))


def _is_mapped(tensor: torch.Tensor, address: int, ranges: list[tuple[int, int]]) -> bool:
    if any(lease.maps(tensor) for lease in leases()):
        return True
    return tensor.device.type == "cpu" and any(start <= address < end for start, end in ranges)


def _mapped_ranges() -> list[tuple[int, int]]:
    """Return the addresses at which this process has mapped files of weights."""
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        addresses, *_, path = line.split(maxsplit=5)
        if path.endswith((".safetensors", ".bin", ".pt")) or f"/memfd:{memory.PREFIX}:" in path:
            start, _, end = addresses.partition("-")
            found.append((int(start, 16), int(end, 16)))
    return found


def stored_dtype(folder: Path) -> str | None:
    """Return the dtype of most bytes in the safetensors files of a folder, or None without such files."""
    sizes: Counter[str] = Counter()
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > _HEADER_LIMIT:
                continue
            header = json.loads(file.read(length))
        for name, entry in header.items():
            if name != "__metadata__":
                start, end = entry["data_offsets"]
                sizes[_DTYPES.get(entry["dtype"], entry["dtype"])] += end - start
    return sizes.most_common(1)[0][0] if sizes else None
