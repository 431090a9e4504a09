"""A recipe: measurements and choices for a pipeline as JSON, with the machine's fingerprint.

A recipe that ships with the package is loaded by its name, and applies without its fingerprint. How its parts run was
measured on one machine, so a part that it changes runs with Tritium, and the others as in `optimize` without a recipe. Its
tables of steps are used everywhere, its quantized formats on devices with the same instructions.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from tritium import disk, example, techniques
from tritium.artifacts.fingerprint import Fingerprint
from tritium.errors import ConfigError, FingerprintError, RecipeError, RecipeMismatch
from tritium.pipelines.parts import modules_of
from tritium.pipelines.plan import Plan
from tritium.techniques.choice import Choice, name_of
from tritium.techniques.skip.config import OnOther, Skip

FORMAT = 2

# Recipes that ship with the package, by name.
SHIPPED = {"example": example.RECIPE}


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The choice for every part, its measurements, and the fingerprint for which they are valid."""

    choices: Mapping[str, Choice]
    figures: Mapping[str, Any]
    fingerprint: Fingerprint
    # The file it was read from, for messages.
    origin: str = "this recipe"
    # True if it came with the package.
    shipped: bool = False

    def plan_for(self, pipe: Any, *, accept_differences: bool = False) -> Plan:
        """Return the plan that applies this recipe to a pipeline; raise a `RecipeMismatch` if it does not fit."""
        if self.shipped and not accept_differences:
            return self._portable(pipe)
        differences = fingerprint_of(pipe).differences(self.fingerprint)
        if differences and not accept_differences:
            raise RecipeMismatch(
                f"{self.origin} was measured for something else ({'; '.join(differences)}): its choices may be slower here, or "
                "wrong for the model. Measure again with `tritium tune`, or go on with accept_differences=True"
            )
        return Plan(components=dict(self.choices))

    def _portable(self, pipe: Any) -> Plan:
        """Return the plan with the lossy techniques that apply to this device."""
        if not example.is_example(pipe):
            raise RecipeMismatch(
                f"{self.origin} is for the pipeline of tritium.load_example(), and this one has another denoiser; "
                "find a recipe for it with `tritium tune`"
            )
        is_alike = fingerprint_of(pipe).capability == self.fingerprint.capability
        found = {}
        for name, choice in self.choices.items():
            # What a table of steps loses does not depend on the machine; what a format gains does.
            lossy = Choice(techniques=[config for config in choice.techniques if _is_lossy(config, formats=is_alike)])
            if lossy.techniques:
                found[name] = lossy
        return Plan(components=found)

    def with_on_other(self, on_other: OnOther) -> Recipe:
        """Return the recipe with another reaction of its tables to other steps, sigmas or schedulers."""
        tables = {name: skip for name, choice in self.choices.items() if (skip := choice.get(Skip)) is not None}
        if not tables:
            raise ConfigError(f"on_other={on_other!r} concerns tables of steps, and {self.origin} skips nothing")
        changed = {
            name: self.choices[name].with_(skip=replace(skip, on_other=on_other)) for name, skip in tables.items()
        }
        return replace(self, choices={**self.choices, **changed})

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


def _is_lossy(config: Any, *, formats: bool) -> bool:
    return isinstance(config, Skip) or (formats and techniques.catalog()[name_of("Recipe", config)].is_lossy)


def load(path: Path) -> Recipe:
    """Read a recipe from a file, or by the name of one that ships with the package; raise a `RecipeError` otherwise."""
    shipped = str(path) in SHIPPED and not path.is_file()
    path = SHIPPED[str(path)] if shipped else path
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
        origin = "the shipped recipe" if shipped else f"recipe {path}"
        return Recipe(
            choices=choices, figures=found["figures"], fingerprint=fingerprint, origin=origin, shipped=shipped
        )
    except (KeyError, TypeError, AttributeError, ConfigError, FingerprintError) as error:
        raise RecipeError(f"recipe {path} cannot be understood: {error}") from error


def fingerprint_of(pipe: Any) -> Fingerprint:
    configs = {name: _config(module) for name, module in modules_of(pipe).items()}
    fingerprint = Fingerprint.current(configs, pipe.device.type)
    # Techniques, plug-ins' too, decide the results of a recipe as much as the compiler does.
    return replace(fingerprint, tritium=disk.digest(fingerprint.tritium, *techniques.files()))


def _config(module: nn.Module) -> Mapping[str, Any]:
    """Return a component's configuration: diffusers has mappings, transformers objects with `to_dict`."""
    config: Any = getattr(module, "config", {})
    as_dict = getattr(config, "to_dict", None)
    return dict(config if isinstance(config, Mapping) else as_dict() if callable(as_dict) else {})
