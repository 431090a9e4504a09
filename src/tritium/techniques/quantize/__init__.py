"""Quantize a part: products and attention in 8 bits, or weights stored in 8 or 4 bits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tritium import compat
from tritium.compiler.capture import auto
from tritium.compiler.passes.quantize import Outcome, Precision, outcomes_of, quantize_linears
from tritium.config import CompilationConfig
from tritium.errors import ConfigError, PipelineError
from tritium.layers.attention.diffusers import AttentionHandle, attention_layers, set_attention
from tritium.layers.sparse.diffusers import sparse_handle
from tritium.techniques.attention import Attention
from tritium.techniques.choice import Choice
from tritium.techniques.graphs import Graphs
from tritium.techniques.quantize import calibrating, storage
from tritium.techniques.quantize.config import AUTO, Quantize, Steps
from tritium.techniques.quantize.scales import Scales
from tritium.techniques.quantize.selection import Selection, candidates, select
from tritium.techniques.quantize.storage import StoredLinear
from tritium.techniques.sparse import Sparse
from tritium.techniques.technique import Note, Part, Technique

__all__ = ["TECHNIQUE", "Quantize", "Steps"]

# Parts whose linears are quantized: denoisers, ControlNets, text encoders, and a bare model.
_PARTS = ("transformer", "unet", "controlnet", "text_encoder", "model")

# Parts that the plan's `layers` may leave out: they name those of a denoiser.
_OTHERS = ("controlnet", "text_encoder")

# accelerate's hook of enable_model_cpu_offload(), which calls `module.to`.
_MOVES_WHOLE = ("CpuOffload",)

_WAITS = "no compiled code has called it"


@dataclass
class State:
    """What was done to a part, for its removal and the report."""

    part: Part
    selection: Selection
    # Linears that store bytes, by name.
    stored: dict[str, StoredLinear] = field(default_factory=dict)
    # Static scales of the inputs, if they were measured.
    scales: Scales | None = None
    attention: AttentionHandle | None = None


def applies_to(part: Part, config: Quantize) -> str | None:
    if not part.name.startswith(_PARTS):
        return "only denoisers and text encoders have many linears"
    if config.linear is None and not config.formats:
        return None if attention_layers(part.module) else "it has no attention layers of diffusers"
    is_encoder = part.name.startswith("text_encoder")
    if is_encoder and (config.steps is not None or config.scales == "step"):
        return "it runs once an image, outside of the steps"
    if is_encoder and part.how == "eager" and config.multiplies:
        return (
            "a text encoder that runs eagerly has its weights quantized and not its products; give it "
            "Choice(how='eager', quantize='int8-weights'), or how='tritium'"
        )
    if part.how == "eager" and not config.keeps_bytes:
        return "it runs eagerly, and keep='device' rewrites compiled graphs; name it with Quantize(keep='cpu')"
    if (config.steps is not None or config.scales == "step") and not part.schedulers:
        return "steps need the scheduler; pass tritium.optimize(model, plan, scheduler=...)"
    if (reason := _decline_moves(part, config)) is not None:
        return reason
    try:
        found = candidates(part.module, config) if config.searches else select(part.module, config).chosen
    except PipelineError as error:
        if not part.name.startswith(_OTHERS):
            raise
        # The plan names layers of another part.
        return str(error)
    if config.attention and attention_layers(part.module):
        return None
    return None if found else "it has no linears in repeated blocks" + (" and no attention" if config.attention else "")


def _decline_moves(part: Part, config: Quantize) -> str | None:
    moved = _moved(part)
    if moved is not None and not config.keeps_bytes:
        return f"{moved} moves its weights, and copies of them would be made again each time; write keep='cpu'"
    if moved is not None and moved not in _MOVES_WHOLE:
        return f"{moved} moves single weights, which it has read already; use enable_model_cpu_offload(), or remove it"
    return None


def _moved(part: Part) -> str | None:
    """Return the hook that moves the weights of a part between devices, or None."""
    for module in part.module.modules():
        hook = compat.modules.accelerate_hook(module)
        if hook is not None and getattr(hook, "offload", True):
            return type(hook).__name__
        moving = [name for name in compat.modules.diffusers_hooks(module) if "offload" in name]
        if moving:
            return moving[0]
    return None


def apply(part: Part, config: Quantize) -> State:
    state = State(part, select(part.module, config))
    if config.attention and attention_layers(part.module):
        named = None if config.attention == AUTO else config.attention
        sparse = sparse_handle(part.module)
        if sparse is not None and named is not None:
            state.attention = AttentionHandle()
            state.attention.layers = sparse.layers
            state.attention.callback(sparse.attention.use_lossy(named))
        else:
            state.attention = set_attention(part.module, opt_mode="lossy", op_type=named)
    try:
        return _quantized(part, config, state)
    except BaseException:
        if state.attention is not None:
            state.attention.remove()
        raise


def _quantized(part: Part, config: Quantize, state: State) -> State:
    """Quantize the selected linears of a part."""
    selection = state.selection
    if config.keeps_bytes:
        _store(state)
        if part.how == "tritium":
            part.compile_with(passes=[quantize_linears({})], fidelity="fast", apart=("quantize", id(state)))
        return state
    rows = [quantize_linears(selection.chosen)]
    static = _with_scales(state, config)
    if config.steps is not None:
        is_plain = config.steps.instead == "none"
        other = part.compiled() if is_plain else part.compiled(passes=rows, fidelity="fast")
        part.around(_by_step(part, config.steps, other))
    part.compile_with(passes=[quantize_linears(static)], fidelity="fast")
    selection.chosen.update(static)
    if state.scales is not None and config.scales == "step":
        part.around(state.scales.around)
    return state


def _with_scales(state: State, config: Quantize) -> dict[str, Precision]:
    """Return the precisions of the selected linears with the scales of their inputs that were measured, and set these."""
    chosen = dict(state.selection.chosen)
    found = {name: scales for name, _, scales in config.measured if scales and name in chosen}
    if found:
        of_linears = {state.selection.modules[name]: scales for name, scales in found.items()}
        state.scales = Scales(state.part, of_linears, by_step=config.scales == "step")
    for name, scales in found.items():
        chosen[name] = replace(chosen[name], scales=config.scales, steps=len(scales))
    return chosen


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
        if steps.names(compat.diffusers.step_of(scheduler), compat.diffusers.steps_of(scheduler)):
            return other(*args, **kwargs)
        return call(*args, **kwargs)

    return run


def remove(_part: Part, state: State) -> None:
    _restore(state)
    if state.attention is not None:
        state.attention.remove()
    if state.scales is not None:
        state.scales.forget()


def conflicts(config: Quantize, choice: Choice) -> str | None:
    if choice.how == "inductor":
        return "quantize is Tritium's, and the part runs with 'inductor'; leave one of them out"
    if config.attention and choice.get(Attention) is not None:
        return "quantize has an attention of its own, and the part has another provider of it; leave one of them out"
    if config.attention == AUTO and choice.get(Sparse) is not None:
        return (
            "attention='auto' compares providers of dense attention alone; with sparse attention write attention='int8'"
        )
    graphs = choice.get(Graphs)
    if graphs is not None and graphs.mode == "only" and not config.keeps_bytes:
        return (
            "graphs='only' captures graphs as they are, and quantize rewrites them; leave one out, or write keep='cpu'"
        )
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


def settles_after(part: Part, config: Quantize) -> int:
    """Return the calls after which each program of the part has run, and "auto" has decided on capturing it."""
    if config.steps is None:
        return 1
    is_on_gpu = _device_type(part) == "cuda"
    calls = auto.CALLS_TO_DECIDE if part.config.graphs == "auto" and is_on_gpu else 2
    return config.steps.first + config.steps.last + calls


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


def report(part: Part, config: Quantize, state: State) -> Note:
    selection, found = state.selection, outcomes(state)
    kept = Counter(selection.kept.values())
    kept.update(outcome.declined for outcome in found.values() if outcome.declined)
    waiting = [name for name in selection.chosen if name not in found]
    used = {name: how for name, how in selection.chosen.items() if name in found and not found[name].declined}
    formats, bytes_ = Counter(map(_in_words, used.values())), _bytes(selection, used)
    figures = calibrating.figures_of(part.module)
    worst = _worst(figures, used)
    data = {
        "formats": dict(formats),
        "kept": dict(kept),
        "bytes": bytes_,
        "layers": _layers(selection, found, used, figures),
        "worst": dict(worst),
        "attention": None if state.attention is None else {"by": config.attention, "layers": state.attention.layers},
        "milliseconds": dict(figures.times.get(config, {})),
    }
    words = [f"{count} linears in {format_}" for format_, count in formats.items()]
    words += [f"{len(waiting)} that no compiled code has called"] if waiting else []
    words += [f"{count} kept ({reason})" for reason, count in kept.most_common()]
    words += [_attention_in_words(config, state.attention)] if config.attention else []
    words += [_steps_in_words(config.steps)] if config.steps is not None else []
    words += _costs_in_words(bytes_, stores=bool(state.stored))
    words += ["worst SQNR " + ", ".join(f"{name} {ratio:.1f} dB" for name, ratio in worst)] if worst else []
    return Note("quantized: " + ", ".join(words), data)


def _in_words(how: Precision) -> str:
    scales = {"row": "", "static": " with static scales", "step": " with scales by step"}
    return how.format + (f" rotated by {how.rotate}" if how.rotate else "") + scales[how.scales]


def _attention_in_words(config: Quantize, handle: AttentionHandle | None) -> str:
    if handle is None:
        return "no attention layers of diffusers"
    return f"{handle.layers} attention layers by {config.attention}"


def _steps_in_words(steps: Steps) -> str:
    instead = "unquantized" if steps.instead == "none" else "with scales by row"
    return f"first {steps.first} and last {steps.last} steps {instead}"


def _costs_in_words(bytes_: dict[str, int], *, stores: bool) -> list[str]:
    if not bytes_["after"]:
        return []
    if stores:
        return [f"their weights take {bytes_['after'] / 1e6:,.1f} MB instead of {bytes_['before'] / 1e6:,.1f} MB"]
    return [f"copies of their weights take {bytes_['after'] / 1e6:,.1f} MB more"]


def _layers(
    selection: Selection, found: dict[str, Outcome], used: dict[str, Precision], figures: calibrating.Figures
) -> dict[str, dict[str, Any]]:
    """Return the precision of every linear, with its provider and error, or the reason why it has none."""
    layers: dict[str, dict[str, Any]] = {
        name: {"precision": None, "reason": why} for name, why in selection.kept.items()
    }
    for name, how in selection.chosen.items():
        if name in used:
            layers[name] = {"precision": str(how), "provider": found[name].provider, "sqnr": figures.sqnr(name, how)}
        else:
            layers[name] = {"precision": None, "reason": found[name].declined if name in found else _WAITS}
    return {name: layers[name] for name in selection.modules}


def _worst(figures: calibrating.Figures, used: dict[str, Precision]) -> list[tuple[str, float]]:
    """Return the five quantized linears with the largest errors, if they were measured."""
    ratios = [(name, ratio) for name, how in used.items() if (ratio := figures.sqnr(name, how)) is not None]
    return sorted(ratios, key=lambda pair: pair[1])[:5]


def _bytes(selection: Selection, used: dict[str, Precision]) -> dict[str, int]:
    """Return the bytes of the weights of quantized linears, before and after."""
    before = after = 0
    for name, how in used.items():
        module: Any = selection.modules[name]
        weight = module.stored.original if isinstance(module, StoredLinear) else module.weight
        before += weight.numel() * weight.element_size()
        after += storage.bytes_of(weight.shape, how)
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
    is_lossy=True,
    reconcile=reconcile,
    settles_after=settles_after,
    # Each rank quantizes its share of the linears.
    after=("parallel",),
)
