"""Compute the attention layers of a part by a named provider, or by the fastest on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tritium import ops
from tritium.config import CompilationConfig
from tritium.errors import ConfigError, nearest
from tritium.layers.attention.diffusers import AttentionHandle, attention_layers, set_attention
from tritium.ops import attention as op
from tritium.techniques.technique import Note, Part, Technique

AUTO = "auto"


@dataclass(frozen=True)
class Attention:
    """The provider of attention: a name, or `auto` for the fastest one in a measurement on this machine."""

    provider: str = AUTO

    def __post_init__(self) -> None:
        known = [AUTO, *ops.providers(op.OP)]
        if self.provider not in known:
            raise ConfigError(f"there is no attention {self.provider!r}; {nearest(str(self.provider), known)}")

    def __str__(self) -> str:
        return f"attention {self.provider}"

    @property
    def is_lossy(self) -> bool:
        return self.provider != AUTO and ops.providers(op.OP)[self.provider].lossy


def applies_to(part: Part, _config: Attention) -> str | None:
    return None if attention_layers(part.module) else "it has no attention layers of diffusers"


def apply(part: Part, config: Attention) -> AttentionHandle:
    if config.provider == AUTO:
        return set_attention(part.module)
    if config.is_lossy:
        part.compile_with(fidelity="fast")
    return set_attention(part.module, opt_mode="manual", op_type=config.provider)


def remove(_part: Part, handle: AttentionHandle) -> None:
    handle.remove()


def reconcile(config: Attention, compilation: CompilationConfig) -> Attention:
    if config.is_lossy and compilation.states_fidelity and compilation.fidelity != "fast":
        raise ConfigError(
            f"attention by {config.provider!r} is lossy, and the configuration says fidelity={compilation.fidelity!r}; "
            "leave one of them out"
        )
    return config


def variants(part: Part) -> Sequence[Attention]:
    # On a CPU there is one provider worth trying, which models use already.
    on_gpu = any(parameter.is_cuda for parameter in part.module.parameters())
    return [Attention()] if on_gpu and applies_to(part, Attention()) is None else []


def report(_part: Part, config: Attention, handle: AttentionHandle) -> Note:
    data = {"provider": config.provider, "layers": handle.layers, "skipped": list(handle.skipped)}
    return Note(f"attention by {'the fastest provider' if config.provider == AUTO else config.provider}", data)


TECHNIQUE = Technique(
    name="attention",
    config=Attention,
    applies_to=applies_to,
    apply=apply,
    remove=remove,
    variants=variants,
    report=report,
    reconcile=reconcile,
)
