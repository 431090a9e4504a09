"""The user's configuration: one frozen, keyword-only value per backend, and part of every cache key.

An argument overrides the environment, which overrides the default. `TRITIUM_<FIELD>` sets a field; two underscores
address a group: `TRITIUM_FUSION_PATTERNS__ENABLE_ROPE=0`. A wrong value, an unknown field and an unknown `TRITIUM_*`
variable each raise a `ConfigError` that names the nearest valid one.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import json
import re
import sys
import types
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Self, TypeVar, Union, get_args, get_origin, get_type_hints

from tritium import envs
from tritium.errors import ConfigError, nearest

# Settings of the earlier static configuration class, each with its replacement here.
_FORMER_NAMES = {
    "aclgraph_only": 'CompilationConfig(graphs="only")',
    "aclgraph_with_compile": 'CompilationConfig(graphs="with_compile")',
}

# Values of TRITIUM_ATTENTION: ways to choose a provider, and the providers of the op `attention`.
ATTENTIONS = (
    *("runtime", "static", "lossy"),
    *("sdpa", "cudnn", "flash", "efficient", "math", "chunked", "products", "flex", "flash3", "sage", "int8"),
)

_BOOLEANS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}

_T = TypeVar("_T")


def keywords_only(cls: type[_T]) -> type[_T]:
    """Make a frozen dataclass raise a `ConfigError` for a positional or unknown argument and for an assignment.

    A field of the configuration that is no argument comes from its environment variable, if that is set.
    """
    initialize = cls.__init__
    valid = [field.name for field in fields(cls)]  # type: ignore[arg-type]

    @functools.wraps(initialize)
    def checked(self: _T, *args: Any, **arguments: Any) -> None:
        if args:
            raise ConfigError(f"{cls.__name__} takes keyword arguments only, got {len(args)} positional")
        for name in arguments:
            if name in _FORMER_NAMES:
                raise ConfigError(f"{cls.__name__} has no field {name!r}; write {_FORMER_NAMES[name]}")
            if name not in valid:
                raise ConfigError(f"{cls.__name__} has no field {name!r}; {nearest(name, valid)}")
        initialize(self, **{**_from_environment(cls), **arguments})

    for name, method in (("__init__", checked), ("__setattr__", _refuse), ("__delattr__", _refuse)):
        setattr(cls, name, method)
    return cls


def _refuse(self: Any, name: str, *value: Any) -> NoReturn:
    advice = (
        f"cannot be assigned; write dataclasses.replace(..., {name}={value[0]!r})" if value else "cannot be deleted"
    )
    raise ConfigError(f"{type(self).__name__} is frozen, {name!r} {advice}")


class _Group:
    """Base of FusionPatterns, PassConfig and CompilationConfig: check each field's type."""

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self))
        for name, hint in hints.items():
            object.__setattr__(self, name, _check(f"{type(self).__name__}.{name}", hint, getattr(self, name)))

    def with_(self, **changes: Any) -> Self:
        """Return a copy with some fields changed.

        >>> CompilationConfig().with_(engine="eager").engine
        'eager'
        """
        return dataclasses.replace(self, **changes)  # type: ignore[type-var]


class _Switches(_Group):
    """One switch per family of fusions, also of plug-ins'. Disabling one also disables larger regions that cover it.

    `enable_fast_gelu` recognises GELU and computes it as written, never by an approximation.
    """

    def enables(self, family: str) -> bool:
        """Return True if sites of a family may be rewritten; always True for one that no installed fusion declares."""
        return bool(getattr(self, switch_of(family), True))


def switch_of(family: str) -> str:
    """Return the field of `FusionPatterns` for a family."""
    return "enable_fast_gelu" if family == "gelu" else f"enable_{family}"


if TYPE_CHECKING:

    class FusionPatterns(_Switches):
        def __init__(self, **switches: bool) -> None: ...
        def __getattr__(self, switch: str) -> bool: ...

else:

    def __getattr__(name: str) -> Any:
        """Generate `FusionPatterns` from the families that fusions declare, when it is first used."""
        if name != "FusionPatterns":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        # Imported by name: fusions are above the configuration, which they import.
        families = importlib.import_module("tritium.fusions").families()
        switches = [(switch_of(family), bool, True) for family in families]
        namespace = {"__module__": __name__, "__doc__": _Switches.__doc__}
        made = dataclasses.make_dataclass(
            name, switches, bases=(_Switches,), namespace=namespace, frozen=True, kw_only=True
        )
        return globals().setdefault(name, keywords_only(made))


def _all_enabled() -> FusionPatterns:
    enabled: FusionPatterns = sys.modules[__name__].FusionPatterns()
    return enabled


# Tilings that a kernel can be pinned to: a number of dims, or the result of Inductor's coalescing analysis.
TILINGS = ("1d", "coalesced", "2d", "3d")


@keywords_only
@dataclass(frozen=True, kw_only=True)
class PassConfig(_Group):
    """Switches of single passes and of the parts of the tiling policy. A disabled pass is not registered."""

    # Convert regions of convolutions to channels-last on a GPU, and convert their weights once.
    enable_channels_last: bool = True
    # Apply the tiling policy, with its enabled parts, to generated Triton kernels.
    enable_tiling_policy: bool = True
    # Compare the tiling of each kernel with others by cost. On torch before 2.11 the policy has no other part.
    enable_nd_tiling_workaround: bool = True
    # Prove that sizes such as (H + 2) * (W + 2) are multiples of their factors.
    enable_divisibility_proof: bool = True
    # Compute indices in 32 bits where this provably gives the same result.
    enable_narrow_sizes: bool = True
    # Choose persistent, looped or split reductions by bytes, occupancy and GPU measurements.
    enable_reduction_choice: bool = True
    # After an error in Inductor's tiling analysis, skip the analysis instead of failing the graph.
    enable_tiling_retry: bool = True


class _Default(str):
    """The default of a setting, distinguishable from an equal value that the user gave."""

    __slots__ = ()


@keywords_only
@dataclass(frozen=True, kw_only=True)
class CompilationConfig(_Group):
    """All settings of a backend.

    >>> from tritium import FusionPatterns
    >>> CompilationConfig(engine="eager", fusion_patterns=FusionPatterns(enable_rope=False))  # doctest: +ELLIPSIS
    CompilationConfig(fusion_patterns=FusionPatterns(...enable_rope=False...engine='eager'...)
    """

    fusion_patterns: FusionPatterns = dataclasses.field(default_factory=_all_enabled)
    enable_freezing: bool = False
    # Compile each distinct block of a model once and reuse its code for all equal blocks.
    reuse_blocks: bool = False
    graphs: Literal["off", "only", "with_compile", "auto"] = "off"
    max_captures: int = 64
    safe_output_mode: bool = True
    graph_log_url: str | None = None
    pass_config: PassConfig = dataclasses.field(default_factory=PassConfig)
    engine: Literal["inductor", "eager"] = "inductor"
    fidelity: Literal["exact", "close", "fast"] = _Default("close")  # type: ignore[assignment]  # equal to "close"
    # Tilings by kernel name: "triton_poi_fused_add_0=2d", or a mapping kernel -> tiling. Stored as sorted pairs.
    force_tiling: str | Mapping[str, str] | tuple[tuple[str, str], ...] | None = None
    # A provider for every op, or a mapping op -> provider. Stored as sorted pairs so that the value is hashable.
    force_provider: str | Mapping[str, str] | tuple[tuple[str, str], ...] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.force_tiling, str):
            pairs = (_parse_pair("force_tiling", pair, "kernel=tiling") for pair in self.force_tiling.split(","))
            object.__setattr__(self, "force_tiling", tuple(sorted(pairs)))
        for kernel, tiling in self.tiling_pins():
            if tiling not in TILINGS:
                raise ConfigError(f"force_tiling: {kernel!r} cannot be tiled {tiling!r}; {nearest(tiling, TILINGS)}")
            if re.fullmatch(r"triton_[a-z]{3}_\w+_\d+", kernel) is None:
                raise ConfigError(f"force_tiling: {kernel!r} is not the name of a generated kernel; see the report")
        if self.max_captures < 1:
            raise ConfigError(f"CompilationConfig.max_captures must be at least 1, got {self.max_captures}")
        self._check_effects()

    def _check_effects(self) -> None:
        # Reject settings that would have no effect.
        for name, default in (("max_captures", 64), ("safe_output_mode", True)):
            if self.graphs == "off" and getattr(self, name) != default:
                raise ConfigError(f"{name} applies to captured graphs, and graphs='off' captures none; set graphs too")
        if self.graphs == "only" and self.enable_freezing:
            raise ConfigError(
                "enable_freezing changes the graph, and graphs='only' captures it unchanged; write graphs='with_compile'"
            )
        if self.fidelity == "exact" and self.engine != "eager":
            raise ConfigError(
                "fidelity='exact': code that Inductor generates is not bit-equal to eager; write engine='eager' with it"
            )
        if self.force_tiling is not None and self.engine == "eager":
            raise ConfigError(
                "force_tiling applies to generated kernels, and engine='eager' generates none; drop one of them"
            )

    @property
    def states_fidelity(self) -> bool:
        """True if the user gave the fidelity; a lossy technique changes it otherwise."""
        return not isinstance(self.fidelity, _Default)

    def tiling_pins(self) -> tuple[tuple[str, str], ...]:
        """Return pairs of a kernel name and its pinned tiling."""
        return self.force_tiling if isinstance(self.force_tiling, tuple) else ()

    def provider_for(self, op: str) -> str | None:
        """Return the provider pinned for an op, or None."""
        if self.force_provider is None or isinstance(self.force_provider, str):
            return self.force_provider
        return dict(self.force_provider).get(op)

    def identity(self) -> str:
        """Return the part of this configuration that can change compiled code, as text for a cache key.

        `graph_log_url` is left out because moving a folder does not change code. The settings of captured graphs are
        left out because capturing does not change the captured code.
        """
        plain = dataclasses.asdict(self)
        for name in ("graph_log_url", "graphs", "max_captures", "safe_output_mode"):
            plain.pop(name)
        return json.dumps(plain, sort_keys=True)


_PREFIXES = {"CompilationConfig": "", "FusionPatterns": "FUSION_PATTERNS__", "PassConfig": "PASS_CONFIG__"}


def environment_names() -> dict[str, tuple[type, str]]:
    """Return every valid environment variable with the group and field that it sets."""
    groups = {getattr(sys.modules[__name__], name): prefix for name, prefix in _PREFIXES.items()}
    return {
        envs.PREFIX + prefix + field.name.upper(): (group, field.name)
        for group, prefix in groups.items()
        for field in fields(group)
        if field.name not in ("fusion_patterns", "pass_config")
    }


def check_environment() -> None:
    """Raise a `ConfigError` for an unknown `TRITIUM_*` variable, so that typing errors are visible."""
    known = [*environment_names(), envs.ATTENTION]
    for name in envs.tritium_variables():
        if name not in known:
            raise ConfigError(f"environment variable {name} is not a setting of tritium; {nearest(name, known)}")
    attention = envs.get(envs.ATTENTION)
    # Names from plug-ins are unknown until they are loaded. If a plug-in is installed, the attention call checks.
    if attention and attention not in ATTENTIONS and not importlib.metadata.entry_points(group="tritium.providers"):
        raise ConfigError(
            f"{envs.ATTENTION}={attention}: unknown attention implementation; {nearest(attention, ATTENTIONS)}"
        )


def _from_environment(cls: type) -> dict[str, Any]:
    if not issubclass(cls, _Group):
        return {}
    check_environment()
    variables, hints = envs.tritium_variables(), get_type_hints(cls)
    return {
        field: _parse(name, hints[field], variables[name])
        for name, (group, field) in environment_names().items()
        if group is cls and name in variables
    }


def _parse(variable: str, hint: Any, text: str) -> Any:
    """Parse an environment variable according to the type of its field."""
    value: Any = text
    lowered = text.strip().lower()
    if hint is bool:
        value = _BOOLEANS.get(lowered, text)
    elif hint is int and lowered.isdecimal():
        value = int(lowered)
    elif get_origin(hint) is Literal:
        value = lowered
    elif lowered in ("", "none"):
        value = None
    elif variable.endswith("FORCE_PROVIDER") and "=" in text:
        value = dict(_parse_pair(variable, pair) for pair in text.split(","))
    return _check(variable, hint, value)


def _parse_pair(variable: str, pair: str, form: str = "op=provider") -> tuple[str, str]:
    name, _, value = (part.strip() for part in pair.partition("="))
    if not name or not value:
        raise ConfigError(f"{variable}: {pair!r} is not of the form {form}")
    return name, value


def _check(name: str, hint: Any, value: Any) -> Any:
    """Return a field's value, with a mapping as sorted pairs; raise a `ConfigError` if its type is wrong."""
    origin = get_origin(hint)
    if origin is Literal:
        if value not in get_args(hint):
            raise ConfigError(f"{name} cannot be {value!r}; {nearest(str(value), get_args(hint))}")
        return value
    if origin in (Union, types.UnionType):
        if isinstance(value, (Mapping, tuple)) and any(get_origin(option) is tuple for option in get_args(hint)):
            pairs = tuple(sorted(value.items(), key=str)) if isinstance(value, Mapping) else value
            for pair in pairs:
                if not (isinstance(pair, tuple) and len(pair) == 2 and all(isinstance(part, str) for part in pair)):
                    raise ConfigError(f"{name} must map names to names, got {pair!r}")
            return pairs
        options = tuple(option for option in get_args(hint) if isinstance(option, type))
        if not isinstance(value, options):
            accepted = ", ".join("None" if option is type(None) else option.__name__ for option in options)
            raise ConfigError(f"{name} must be one of {accepted}, got {value!r}")
        return value
    # bool is a subclass of int, but True is not accepted as an integer.
    if type(value) is not hint and not (hint not in (bool, int) and isinstance(value, hint)):
        raise ConfigError(f"{name} must be {hint.__name__}, got {value!r} of type {type(value).__name__}")
    return value


def check_flag(name: str, value: Any) -> None:
    """Raise a `ConfigError` unless the value is True or False."""
    if not isinstance(value, bool):
        raise ConfigError(f"{name} must be True or False, got {value!r}")
