"""A recipe: measurements and choices for a pipeline as JSON, with the machine's fingerprint."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from tritium import disk, techniques
from tritium.artifacts.fingerprint import Fingerprint
from tritium.errors import ConfigError, FingerprintError, RecipeError, RecipeMismatch
from tritium.pipelines.plan import Plan
from tritium.techniques.choice import Choice

FORMAT = 2


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The choice for every part, its measurements, and the fingerprint for which they are valid."""

    choices: Mapping[str, Choice]
    figures: Mapping[str, Any]
    fingerprint: Fingerprint
    # The file it was read from, for messages.
    origin: str = "this recipe"

    def plan_for(self, pipe: Any, *, accept_differences: bool = False) -> Plan:
        """Return the plan that applies this recipe to a pipeline; raise a `RecipeMismatch` if it does not fit."""
        differences = fingerprint_of(pipe).differences(self.fingerprint)
        if differences and not accept_differences:
            raise RecipeMismatch(
                f"{self.origin} was measured for something else ({'; '.join(differences)}): its choices may be slower here, or "
                "wrong for the model. Measure again with `tritium tune`, or go on with accept_differences=True"
            )
        return Plan(components=dict(self.choices))

    def to_dict(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "choices": {name: choice.to_dict() for name, choice in self.choices.items()},
            "figures": dict(self.figures),
            "fingerprint": self.fingerprint.to_dict(),
        }

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.to_dict(), indent=2) + "\n", encoding="utf-8")


def load(path: Path) -> Recipe:
    """Read a recipe from a file, or raise a `RecipeError` with the reason."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RecipeError(f"recipe {path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise RecipeError(f"recipe {path} is no JSON: {error}") from error
    if not isinstance(found, dict) or "format" not in found:
        raise RecipeError(f"{path} is no recipe; `tritium tune PIPELINE -o recipe.json` writes one")
    if found["format"] != FORMAT:
        raise RecipeError(f"recipe {path} has format {found['format']!r}, and this version reads {FORMAT}")
    try:
        choices = {name: Choice(**choice) for name, choice in found["choices"].items()}
        fingerprint = Fingerprint.from_dict(found["fingerprint"])
        return Recipe(choices=choices, figures=found["figures"], fingerprint=fingerprint, origin=f"recipe {path}")
    except (KeyError, TypeError, AttributeError, ConfigError, FingerprintError) as error:
        raise RecipeError(f"recipe {path} cannot be understood: {error}") from error


def fingerprint_of(pipe: Any) -> Fingerprint:
    """Return the fingerprint of a pipeline on its device."""
    configs = {name: _config(value) for name, value in pipe.components.items() if isinstance(value, nn.Module)}
    fingerprint = Fingerprint.current(configs, pipe.device.type)
    # Techniques, plug-ins' too, decide the results of a recipe as much as the compiler does.
    return replace(fingerprint, tritium=disk.digest(fingerprint.tritium, *techniques.files()))


def _config(module: nn.Module) -> Mapping[str, Any]:
    """Return a component's configuration: diffusers has mappings, transformers objects with `to_dict`."""
    config: Any = getattr(module, "config", {})
    as_dict = getattr(config, "to_dict", None)
    return dict(config if isinstance(config, Mapping) else as_dict() if callable(as_dict) else {})
