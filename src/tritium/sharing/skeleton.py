"""A pipeline without weights: files of configurations and tokenizers, from which other processes build the same classes."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tritium import compat, disk
from tritium.errors import MissingExtra, SharingError

# Only classes of these packages are built.
_PACKAGES = ("diffusers", "transformers")

_INDEX = "pipeline.json"

# Values that are passed on if they were set on a pipeline or module after it was loaded, such as `use_tiling`.
_PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class Kind:
    """A class of modules that no configuration makes, and how it is rebuilt from JSON.

    `rebuild` gets the module that the configuration makes, without memory, and what `describe` returned; `finish` gets the
    module when it has its tensors.
    """

    cls: type[nn.Module]
    describe: Callable[[Any], dict[str, Any]]
    rebuild: Callable[[nn.Module, dict[str, Any]], nn.Module]
    finish: Callable[[Any], None]


Kinds = Mapping[str, Kind]


def modules_of(pipe: Any) -> dict[str, nn.Module]:
    return {name: value for name, value in pipe.components.items() if isinstance(value, nn.Module)}


def write(pipe: Any, folder: Path) -> str:
    """Write the configurations of a pipeline into a new folder, and return their fingerprint."""
    folder.mkdir(mode=0o700, parents=True)
    components = {}
    for name, component in pipe.components.items():
        components[name] = None if component is None else _address(f"component {name!r}", type(component))
        if component is not None:
            _write_component(name, component, folder / name)
    arguments = {
        name: value for name, value in pipe.config.items() if name not in components and not name.startswith("_")
    }
    index = {"class": _address("the pipeline", type(pipe)), "components": components, "arguments": arguments}
    try:
        (folder / _INDEX).write_text(json.dumps(index), encoding="utf-8")
    except TypeError as error:
        raise SharingError(f"the pipeline's configuration is no JSON ({error}), so it cannot be rebuilt") from error
    return fingerprint(folder)


def fingerprint(folder: Path) -> str:
    """Return a digest of all files of a skeleton."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return disk.digest(*(part for path in files for part in (str(path.relative_to(folder)), path)))


def _address(what: str, cls: type) -> list[str]:
    module, name = cls.__module__, cls.__qualname__
    if module.partition(".")[0] not in _PACKAGES or "." in name:
        raise SharingError(
            f"{what} is a {module}.{name}, and only classes of {' and '.join(_PACKAGES)} are rebuilt in other processes"
        )
    return [module, name]


def _class_at(address: Any) -> Any:
    module, name = address
    if module.partition(".")[0] not in _PACKAGES:
        raise SharingError(f"the keeper's files are refused: {module} is not of {' or '.join(_PACKAGES)}")
    try:
        return getattr(importlib.import_module(module), name)
    except ImportError as error:
        raise MissingExtra(error.name or module, "diffusers", "tritium.attach") from error


def _write_component(name: str, component: Any, folder: Path) -> None:
    is_model = isinstance(component, nn.Module)
    if hasattr(component, "save_config"):
        # Models and schedulers of diffusers.
        component.save_config(folder)
    elif is_model and hasattr(component, "config"):
        component.config.save_pretrained(folder)
    elif not is_model and hasattr(component, "save_pretrained"):
        component.save_pretrained(folder)
    else:
        raise SharingError(f"component {name!r}, a {type(component).__name__}, has no configuration that can be saved")


def build(folder: Path) -> Any:
    """Build the pipeline of a skeleton. Its parameters have no memory; its buffers and other tensors are computed."""
    index = json.loads((folder / _INDEX).read_text(encoding="utf-8"))
    # Some models draw random numbers for buffers.
    with torch.random.fork_rng(devices=[]), torch.inference_mode(mode=False), compat.sharing.parameters_on_meta():
        components = {
            name: None if address is None else _built(_class_at(address), folder / name)
            for name, address in index["components"].items()
        }
    return _class_at(index["class"])(**components, **index["arguments"])


def _built(cls: Any, folder: Path) -> Any:
    if not issubclass(cls, nn.Module):
        return cls.from_pretrained(folder)
    if hasattr(cls, "load_config"):
        return cls.from_config(cls.load_config(folder)).eval()
    return cls(cls.config_class.from_pretrained(folder)).eval()


def differences(pipe: Any, skeleton: Any, kinds: Kinds) -> dict[str, Any]:
    """Return how a pipeline differs from what its configuration makes: modules of other kinds, and changed settings.

    Raise a `SharingError` for a difference that another process cannot rebuild.
    """
    found: dict[str, Any] = {"modules": {}, "settings": {}}
    if changed := _changed(pipe, skeleton):
        found["settings"][""] = {"": changed}
    plain = modules_of(skeleton)
    for component, module in modules_of(pipe).items():
        kinds_here, settings = _compared(component, module, plain[component], kinds)
        found["modules"] |= {component: kinds_here} if kinds_here else {}
        found["settings"] |= {component: settings} if settings else {}
    return found


def _compared(
    component: str, module: nn.Module, plain: nn.Module, kinds: Kinds
) -> tuple[dict[str, Any], dict[str, Any]]:
    expected, other, settings = dict(plain.named_modules()), {}, {}
    for path, inner in module.named_modules():
        name = f"{component}.{path}" if path else component
        _check_unhooked(name, inner)
        kind = next((kind for kind, value in kinds.items() if type(inner) is value.cls), None)
        if kind is not None:
            other[path] = {"kind": kind, "state": kinds[kind].describe(inner)}
        elif path not in expected or type(inner) is not type(expected[path]):
            raise SharingError(
                f"{name} is a {type(inner).__name__}, which {component}'s configuration does not make; share the pipeline "
                "as it was loaded, without adapters and handles"
            )
        elif changed := _changed(inner, expected[path]):
            settings[path] = changed
    return other, settings


def _check_unhooked(name: str, module: nn.Module) -> None:
    if compat.modules.compiled_call(module) is not None:
        raise SharingError(
            f"{name} is compiled, and compiled code is not shared; remove the handle, or do not compile it"
        )
    hooks = compat.modules.diffusers_hooks(module)
    if hooks or compat.modules.accelerate_hook(module) is not None:
        listed = ", ".join(hooks) or type(compat.modules.accelerate_hook(module)).__name__
        raise SharingError(f"{name} has hooks that are not shared ({listed}); share the pipeline without offloading")


def _changed(value: Any, plain: Any) -> dict[str, Any]:
    """Return plain attributes of an object that differ from those of another of its class."""
    others = vars(plain)
    return {
        name: entry
        for name, entry in vars(value).items()
        if not name.startswith("_") and isinstance(entry, _PLAIN) and name in others and entry != others[name]
    }


def restore_kinds(pipe: Any, modules: Mapping[str, Any], kinds: Kinds) -> list[tuple[Kind, nn.Module]]:
    """Replace modules by those of other kinds; return them with their kinds, to be finished."""
    replaced = []
    for component, entries in modules.items():
        for path, entry in entries.items():
            kind = kinds[entry["kind"]]
            parent, _, leaf = path.rpartition(".")
            owner = _component(pipe, component).get_submodule(parent)
            rebuilt = kind.rebuild(getattr(owner, leaf), entry["state"]).eval()
            setattr(owner, leaf, rebuilt)
            replaced.append((kind, rebuilt))
    return replaced


def restore_settings(pipe: Any, settings: Mapping[str, Any]) -> None:
    for component, entries in settings.items():
        for path, changed in entries.items():
            owner = _component(pipe, component).get_submodule(path) if component else pipe
            for name, value in _plain(changed):
                if name in vars(owner):
                    setattr(owner, name, value)


def _plain(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    return ((name, value) for name, value in values.items() if not name.startswith("_") and isinstance(value, _PLAIN))


def _component(pipe: Any, name: str) -> nn.Module:
    module = pipe.components.get(name)
    if not isinstance(module, nn.Module):
        raise SharingError(f"the keeper's message is refused: the pipeline has no model {name!r}")
    return module
