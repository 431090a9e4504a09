"""Store observations of code generation next to Inductor's cache, for processes that find the code compiled."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx

from tritium import compat, disk
from tritium.artifacts.digest import settings_digest
from tritium.report.graph_text import readable
from tritium.report.observation import Observation

# Version of stored observations; older ones are not found.
FORMAT = "4"

# The only key in a file that refers to another observation.
_LINK = "of"

# Keys that this process wrote or found; they are saved with its artifacts.
_used: dict[str, None] = {}


class Store:
    """Observations by key, as JSON files in Inductor's cache folder: they are moved and deleted with it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, key: str) -> Path:
        return self.folder / key[:2] / f"{key}.json"

    def load(self, key: str) -> Observation | None:
        observation = self._observation(key)
        if observation is not None:
            _used[key] = None
        return observation

    def save(self, key: str, observation: Observation) -> None:
        _used[key] = None
        self._write(key, observation.to_dict())

    def link(self, key: str, target: str) -> None:
        """Make a second key refer to an observation."""
        self._write(key, {_LINK: target})

    def linked(self, key: str) -> Observation | None:
        """Return the observation that a second key refers to, or None."""
        target = self._read(key).get(_LINK)
        return self._observation(target) if isinstance(target, str) else None

    def _observation(self, key: str) -> Observation | None:
        try:
            return Observation.from_dict(self._read(key))
        except (KeyError, TypeError):
            return None

    def _read(self, key: str) -> dict[str, Any]:
        """Return the content of a file; a missing or damaged one is empty."""
        try:
            content = json.loads(self.path(key).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return content if isinstance(content, dict) else {}

    def _write(self, key: str, content: dict[str, Any]) -> None:
        disk.write(self.path(key), json.dumps(content), make_folder=True)


def store() -> Store:
    return Store(compat.inductor.cache_dir() / "tritium")


def has_compiled() -> bool:
    """Return True if an earlier process compiled something into this cache."""
    return store().folder.exists()


def used() -> list[str]:
    """Return the keys of all observations that this process wrote or found."""
    return list(_used)


def store_key(graph: fx.Graph, identity: bytes) -> str:
    """Return a digest of all inputs of code generation: rewritten graph, shapes, identity, Inductor's settings."""
    strides = "".join(f"{node.name}{_strides(node)}" for node in graph.find_nodes(op="placeholder"))
    return disk.digest(FORMAT, identity, torch.__version__, readable(graph), strides, settings_digest())


def _strides(node: fx.Node) -> str:
    value = node.meta.get("example_value")
    return f"{value.stride()}{value.device}" if isinstance(value, torch.Tensor) else str(value)


def code_key(codes: Sequence[str]) -> str:
    """Return a second key, of the code that runs a graph.

    Inductor compiles graphs that differ only in names once. This key finds the observation of the first one.
    """
    return disk.digest(FORMAT, "code", *codes)
