"""Quantize the linears of a part: products in 8 bits, or weights stored in 8 or 4 bits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tritium import compat
from tritium.compiler.passes.quantize import Outcome, outcomes_of, quantize_linears
from tritium.config import CompilationConfig
from tritium.errors import ConfigError, PipelineError
from tritium.techniques.choice import Choice
from tritium.techniques.quantize import storage
from tritium.techniques.quantize.config import Quantize, Steps
from tritium.techniques.quantize.selection import Selection, select
from tritium.techniques.quantize.storage import StoredLinear
from tritium.techniques.technique import Note, Part, Technique

__all__ = ["TECHNIQUE", "Quantize", "Steps"]

# Parts whose linears are quantized: denoisers, ControlNets, text encoders, and a bare model.
_PARTS = ("transformer", "unet", "controlnet", "text_encoder", "model")


@dataclass
class State:
    """What was done to a part, for its removal and the report."""

    selection: Selection
    # Linears that store bytes, by name.
    stored: dict[str, StoredLinear] = field(default_factory=dict)


def applies_to(part: Part, config: Quantize) -> str | None:
    if not part.name.startswith(_PARTS):
        return "only denoisers and text encoders have many linears"
    if part.how == "eager" and not config.keeps_bytes:
        return "it runs eagerly, and keep='device' rewrites compiled graphs; name it with Quantize(keep='cpu')"
    if config.steps is not None and not part.schedulers:
        return "steps need the scheduler; pass tritium.optimize(model, plan, scheduler=...)"
    if not config.keeps_bytes and (moved := _moved(part)) is not None:
        return f"{moved} moves its weights, and copies of them would be made again each time; write keep='cpu'"
    try:
        selection = select(part.module, config)
    except PipelineError as error:
        return str(error)
    return None if selection.chosen else "it has no linears in repeated blocks"


def _moved(part: Part) -> str | None:
    """Return the hook that moves the weights of a part between devices, or None."""
    for module in part.module.modules():
        hook = compat.modules.accelerate_hook(module)
        if hook is not None and getattr(hook, "offload", True):
            return type(hook).__name__
    return None


def apply(part: Part, config: Quantize) -> State:
    selection = select(part.module, config)
    state = State(selection)
    if config.keeps_bytes:
        _store(state)
        if part.how == "tritium":
            part.compile_with(passes=[quantize_linears({})], fidelity="fast", apart=("quantize", id(state)))
        return state
    rows = [quantize_linears(selection.chosen)]
    if config.steps is not None:
        is_plain = config.steps.instead == "none"
        other = part.compiled() if is_plain else part.compiled(passes=rows, fidelity="fast")
        part.around(_by_step(part, config.steps, other))
    part.compile_with(passes=rows, fidelity="fast")
    return state


def _store(state: State) -> None:
    selection = state.selection
    storage.watch_merges()
    try:
        for name, how in list(selection.chosen.items()):
            linear = selection.modules[name]
            reason = storage.decline(linear, how)
            if reason is not None:
                selection.kept[name] = reason
                del selection.chosen[name]
                continue
            storage.store(linear, how)
            assert isinstance(linear, StoredLinear)
            state.stored[name] = linear
    except BaseException:
        _restore(state)
        raise


def _restore(state: State) -> None:
    for linear in state.stored.values():
        storage.restore(linear)


def _by_step(part: Part, steps: Steps, other: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that runs the steps that `steps` names by another program."""

    def run(call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        scheduler = part.schedulers[0]
        step = compat.diffusers.step_of(scheduler)
        if steps.names(step, compat.diffusers.steps_of(scheduler)):
            return other(*args, **kwargs)
        return call(*args, **kwargs)

    return run


def remove(_part: Part, state: State) -> None:
    _restore(state)


def conflicts(_config: Quantize, choice: Choice) -> str | None:
    if choice.how == "inductor":
        return "quantize is Tritium's, and the part runs with 'inductor'; leave one of them out"
    return None


def reconcile(config: Quantize, compilation: CompilationConfig) -> Quantize:
    if compilation.states_fidelity and compilation.fidelity != "fast":
        raise ConfigError(
            f"quantize is lossy, and the configuration says fidelity={compilation.fidelity!r}; leave one of them out"
        )
    return config


def variants(part: Part) -> Sequence[Quantize]:
    """Return the formats to try, if the plan allows losses."""
    if part.config.fidelity != "fast":
        return []
    kinds = [Quantize("int8")] if _device_type(part) == "cpu" else [Quantize("fp8"), Quantize("int8")]
    return [config for config in kinds if applies_to(part, config) is None]


def _device_type(part: Part) -> str:
    return next((parameter.device.type for parameter in part.module.parameters()), "cpu")


def outcomes(state: State) -> dict[str, Outcome]:
    """Return what became of each selected linear: compiled, stored, or neither yet."""
    if state.stored:
        return {name: Outcome(linear.stored.provider or "inlined") for name, linear in state.stored.items()}
    chosen = state.selection.chosen
    blocks = {name.rpartition(".")[0] for name in chosen}
    parents = {path for name in blocks for path in _prefixes(name)}
    return outcomes_of(chosen, parents)


def _prefixes(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts) + 1)]


def report(_part: Part, config: Quantize, state: State) -> Note:
    selection, found = state.selection, outcomes(state)
    kept = Counter(selection.kept.values())
    kept.update(outcome.declined for outcome in found.values() if outcome.declined)
    waiting = [name for name in selection.chosen if name not in found]
    used = {name: how for name, how in selection.chosen.items() if name in found and not found[name].declined}
    formats = Counter(str(how) for how in used.values())
    layers = {
        name: {"precision": str(how), "provider": found[name].provider}
        if name in used
        else {"precision": None, "reason": found[name].declined if name in found else "no compiled call yet"}
        for name, how in selection.chosen.items()
    } | {name: {"precision": None, "reason": reason} for name, reason in selection.kept.items()}
    data = {"formats": dict(formats), "kept": dict(kept), "bytes": _bytes(selection, used), "layers": layers}
    words = [f"{count} linears in {format_}" for format_, count in formats.items()]
    words += [f"{len(waiting)} linears wait for their first compiled call"] if waiting else []
    words += [f"{count} kept ({reason})" for reason, count in kept.most_common()]
    if config.steps is not None:
        words.append(f"first {config.steps.first} and last {config.steps.last} steps unquantized")
    return Note("quantized: " + ", ".join(words), data)


def _bytes(selection: Selection, used: dict[str, Any]) -> dict[str, int]:
    """Return the bytes of the weights of quantized linears, before and after."""
    before = after = 0
    for name, how in used.items():
        module = selection.modules[name]
        weight = module.stored.original if isinstance(module, StoredLinear) else module.weight
        before += weight.numel() * weight.element_size()
        groups = weight.shape[1] // how.group if how.format == "int4-weights" else 1
        after += weight.numel() // (2 if how.format == "int4-weights" else 1) + 4 * weight.shape[0] * groups
    return {"before": before, "after": after}


TECHNIQUE = Technique(
    name="quantize",
    config=Quantize,
    applies_to=applies_to,
    apply=apply,
    remove=remove,
    conflicts=conflicts,
    variants=variants,
    report=report,
    reconcile=reconcile,
)
