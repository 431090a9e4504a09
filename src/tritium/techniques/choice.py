"""How one part of a pipeline runs: its engine and its techniques."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, get_args

from tritium.errors import ConfigError, nearest
from tritium.techniques import catalog

How = Literal["tritium", "inductor", "eager"]
HOWS: tuple[How, ...] = get_args(How)

T = TypeVar("T")


@dataclass(frozen=True)
class Off:
    """In place of a config: the part does without a technique that the plan or its default would give it."""

    name: str

    def __str__(self) -> str:
        return f"without {self.name}"


@dataclass(frozen=True, init=False, repr=False)
class Choice:
    """The setting for one part of a pipeline.

    `how` selects Tritium, plain torch.compile (`inductor`), or neither (`eager`). `techniques` are configs, such as
    `ChannelsLast()`. Each can be written by its technique's name instead, as `channels_last=True`; False leaves the
    technique out, and None takes the plan's setting, as without the argument.

    >>> Choice(how="eager", channels_last=True)
    Choice(how='eager', channels_last=ChannelsLast())
    """

    how: How
    techniques: tuple[Any, ...]

    def __init__(self, *positional: Any, how: How = "tritium", techniques: Iterable[Any] = (), **by_name: Any) -> None:
        check_keywords("Choice", ("how", "techniques"), positional, by_name)
        if how not in HOWS:
            raise ConfigError(f"a part cannot run with {how!r}; {nearest(str(how), HOWS)}")
        inherited = [name for name, value in by_name.items() if value is None]
        collected = collect("Choice", techniques, {n: v for n, v in by_name.items() if v is not None})
        object.__setattr__(self, "how", how)
        object.__setattr__(self, "techniques", tuple(c for c in collected if name_of("Choice", c) not in inherited))
        for name, config in self.configs().items():
            conflict = catalog()[name].conflicts(config, self)
            if conflict is not None:
                raise ConfigError(conflict)

    def __repr__(self) -> str:
        return f"Choice({', '.join([f'how={self.how!r}', *spelled(self.techniques)])})"

    def __str__(self) -> str:
        return ", ".join([self.how, *map(str, self.techniques)])

    def configs(self) -> dict[str, Any]:
        """Return the configs of this choice by the name of their technique."""
        return {name_of("Choice", config): config for config in self.techniques if not isinstance(config, Off)}

    def get(self, config: type[T]) -> T | None:
        """Return the config of this type, or None."""
        return next((found for found in self.techniques if isinstance(found, config)), None)

    @property
    def is_lossy(self) -> bool:
        """True if one of its techniques changes images."""
        return any(catalog()[name].is_lossy for name in self.configs())

    def with_(self, **changes: Any) -> Choice:
        """Return a copy with other fields or techniques.

        >>> Choice(graphs="auto").with_(how="inductor", graphs=None)
        Choice(how='inductor')
        """
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values; `Choice(**values)` is the same choice.

        >>> Choice(graphs="auto", channels_last=False).to_dict()
        {'how': 'tritium', 'channels_last': False, 'graphs': {'mode': 'auto'}}
        """
        values = {
            name_of("Choice", config): False if isinstance(config, Off) else dataclasses.asdict(config)
            for config in self.techniques
        }
        return {"how": self.how, **values}


def check_keywords(owner: str, fields: Sequence[str], positional: Sequence[Any], by_name: Mapping[str, Any]) -> None:
    """Raise a `ConfigError` for positional arguments, and for names that are neither fields nor techniques."""
    if positional:
        raise ConfigError(f"{owner} takes keyword arguments only, got {len(positional)} positional")
    for name in by_name:
        if name not in catalog():
            raise ConfigError(f"{owner} has no field {name!r}; {nearest(name, [*fields, *catalog()])}")


def collect(owner: str, techniques: Iterable[Any], by_name: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return configs in the order of the catalogue; those given by name replace those in `techniques`."""
    if not isinstance(techniques, Iterable) or isinstance(techniques, (str, Mapping)):
        raise ConfigError(f"{owner}.techniques takes configs such as (ChannelsLast(),), got {techniques!r}")
    chosen: dict[str, Any] = {}
    for config in techniques:
        name = name_of(owner, config)
        if name in chosen:
            raise ConfigError(f"{owner}.techniques has {chosen[name]!r} and {config!r}; give one of them")
        chosen[name] = config
    chosen |= {name: configured(owner, name, value) for name, value in by_name.items()}
    return tuple(chosen[name] for name in catalog() if name in chosen)


def configured(owner: str, name: str, value: Any) -> Any:
    """Return a technique's config from a config, True, a string or a mapping, and `Off` from False."""
    config = catalog()[name].config
    try:
        if value is False:
            return Off(name)
        if value is True:
            return config()
        if isinstance(value, str):
            return config(value)
        if isinstance(value, Mapping):
            return config(**{key: _tuples(inner) for key, inner in value.items()})
    except ConfigError as error:
        raise ConfigError(f"{owner}.{name}: {error}") from error
    except TypeError:
        # Missing, unknown or superfluous arguments: the message below lists the right ones.
        pass
    if not isinstance(value, config):
        arguments = ", ".join(field.name for field in dataclasses.fields(config))
        raise ConfigError(f"{owner}.{name} cannot be {value!r}; write {name}={config.__name__}({arguments})")
    return value


def _tuples(value: Any) -> Any:
    """Return JSON lists as tuples, which are hashable."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def name_of(owner: str, config: Any) -> str:
    """Return the name of the technique that a config belongs to; raise a `ConfigError` for other values."""
    if isinstance(config, Off):
        return config.name
    types = {technique.config: name for name, technique in catalog().items()}
    if type(config) not in types:
        known = ", ".join(sorted(kind.__name__ for kind in types))
        raise ConfigError(f"{owner}.techniques has {config!r}, which is no technique's config; they are {known}")
    return types[type(config)]


def spelled(techniques: Iterable[Any]) -> list[str]:
    """Return configs as the keyword arguments that create them."""
    return [f"{name_of('Choice', config)}={False if isinstance(config, Off) else config!r}" for config in techniques]
