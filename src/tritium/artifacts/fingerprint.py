"""The validity of compiled code and measurements: a fingerprint of machine, versions and model.

    here = Fingerprint.current({"transformer": pipe.transformer.config}, "cuda")
    here.differences(there)      # ["torch: 2.13.0 there, 2.11.0 here"]

Paths are not part of it: moving a model or the package to another folder does not change the fingerprint.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from enum import Enum
from typing import Any

import torch

from tritium import compat, device, disk
from tritium.artifacts.digest import package_digest
from tritium.errors import FingerprintError, nearest

# Configuration entries that only record the origin, in addition to names that start with an underscore.
_ORIGIN = {"transformers_version"}


@dataclass(frozen=True)
class Fingerprint:
    """The ingredients, compared one by one."""

    # The name of the GPU or the CPU model.
    device: str
    # A GPU's compute capability, or the CPU vector instructions that PyTorch and Inductor use.
    capability: str | None
    # Instruction sets that compilers may use on this CPU; empty for a GPU.
    instructions: tuple[str, ...]
    # Generated C++ assumes a fixed number of threads. None for a GPU.
    threads: int | None
    torch: str
    triton: str | None
    # Digest of this package's code.
    tritium: str
    diffusers: str | None
    python: str
    # Digests of the components' configurations, sorted by component name.
    models: tuple[tuple[str, str], ...]

    @classmethod
    def current(
        cls, models: Mapping[str, Mapping[str, Any]] | None = None, device_type: str | None = None
    ) -> Fingerprint:
        """Return the fingerprint of this process for components with these configurations."""
        found = device.describe(device_type)
        is_cpu = found.type == "cpu"
        capability = found.capability
        if is_cpu:
            capability = " ".join([capability or "", *compat.inductor.vector_isas()])
        versions = compat.versions.versions()
        return cls(
            device=found.name,
            capability=capability,
            instructions=device.cpu_instructions() if is_cpu else (),
            threads=found.threads,
            torch=torch.__version__,
            triton=versions["triton"],
            tritium=package_digest(),
            diffusers=versions["diffusers"],
            python=f"{sys.version_info.major}.{sys.version_info.minor}",
            models=tuple((name, config_digest(config)) for name, config in sorted((models or {}).items())),
        )

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "instructions": list(self.instructions), "models": dict(self.models)}

    @classmethod
    def from_dict(cls, found: object) -> Fingerprint:
        """Read the result of `to_dict`; raise a `FingerprintError` for anything else."""
        if not isinstance(found, Mapping):
            raise FingerprintError(f"a fingerprint is a mapping, got {type(found).__name__}")
        names = [field.name for field in fields(cls)]
        if unknown := [name for name in found if name not in names]:
            raise FingerprintError(f"a fingerprint has no ingredient {unknown[0]!r}; {nearest(str(unknown[0]), names)}")
        if missing := [name for name in names if name not in found]:
            raise FingerprintError(f"the fingerprint lacks {', '.join(missing)}")
        try:
            instructions, models = tuple(found["instructions"]), tuple(sorted(found["models"].items()))
        except (TypeError, AttributeError) as error:
            raise FingerprintError(f"instructions are a list and models a mapping: {error}") from error
        return cls(**{**found, "instructions": instructions, "models": models})

    def differences(self, there: Fingerprint) -> list[str]:
        """Return one line per ingredient that differs between this fingerprint (`here`) and another (`there`)."""
        lines = []
        for field in fields(self):
            mine, theirs = getattr(self, field.name), getattr(there, field.name)
            if mine != theirs:
                lines.append(f"{field.name}: {_worded(field.name, mine, theirs)}")
        return lines


def _worded(name: str, mine: Any, theirs: Any) -> str:
    if name == "instructions":
        return _sides(set(mine) - set(theirs), set(theirs) - set(mine))
    if name == "models":
        here, there = dict(mine), dict(theirs)
        changed = sorted(part for part in here.keys() & there.keys() if here[part] != there[part])
        sides = _sides(here.keys() - there.keys(), there.keys() - here.keys())
        return "; ".join([*(f"{part} is configured otherwise" for part in changed), *([sides] if sides else [])])
    if name == "tritium":
        return f"other code there ({theirs[:12]}), {mine[:12]} here"
    return f"{_named(theirs)} there, {_named(mine)} here"


def _sides(here: Iterable[str], there: Iterable[str]) -> str:
    sides = [(sorted(there), "only there"), (sorted(here), "only here")]
    return ", ".join(f"{' '.join(names)} {where}" for names, where in sides if names)


def _named(value: object) -> str:
    return "none" if value is None else str(value)


def config_digest(config: Mapping[str, Any]) -> str:
    """Return a digest of a component's configuration without entries that record its origin."""
    return disk.digest(json.dumps(_canonical(config), sort_keys=True))


def _canonical(value: Any) -> Any:
    """Convert a value to JSON data that is equal for equal configurations in any container types."""
    if isinstance(value, Enum):
        return _canonical(value.value)
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    if isinstance(value, Mapping):
        return {
            str(name): _canonical(inner)
            for name, inner in value.items()
            if not str(name).startswith("_") and name not in _ORIGIN
        }
    if isinstance(value, (list, tuple)):
        return [_canonical(inner) for inner in value]
    if isinstance(value, (set, frozenset)):
        return sorted((_canonical(inner) for inner in value), key=json.dumps)
    if isinstance(value, (torch.dtype, torch.device)):
        return str(value)
    # Use only the type of other objects: their repr may contain an address, which differs between processes.
    return f"{type(value).__module__}.{type(value).__qualname__}"
