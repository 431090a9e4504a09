"""Find the parts of a live pipeline, and the modules in each that are worth compiling.

A denoiser is one program: its whole forward is traced, and equal blocks in it share compiled code. Its targets, the
repeated blocks and the modules beside them, are compiled one by one if the forward does not trace in one piece.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from tritium import models
from tritium.errors import PipelineError, nearest
from tritium.pipelines.bare import BareModel
from tritium.pipelines.memory import Guard
from tritium.pipelines.plan import Choice, Plan

# Names that pipelines of diffusers give to what runs at every step.
DENOISERS = ("transformer", "transformer_2", "unet")

# Components whose names start so run at every step, too, and hand their results to the denoiser.
CONTROLNET = "controlnet"

# Parts that keep their handle alive: the others may be shared by pipelines.
KEPT = (*DENOISERS, BareModel.NAME)

# The share of a model's parameters that repeated blocks must hold to be taken for them.
_BLOCKS_HOLD = 0.5


@dataclass(frozen=True)
class Target:
    """A module that gets a compiled call of its own."""

    path: str
    module: nn.Module


@dataclass(frozen=True)
class Part:
    """What is measured, chosen and reported as one: a denoiser, one direction of a VAE, a text encoder.

    `entry` is the module through whose call everything of the part happens.
    """

    name: str
    entry: nn.Module
    targets: tuple[Target, ...]
    what: str
    default: Choice
    # Why the default is to leave it alone.
    left: str = ""
    # Dims of the entry's arguments that change from picture to picture, by name.
    varying: Mapping[str, Sequence[int]] = field(default_factory=dict)
    # Checks a call before it starts.
    guard: Guard | None = None
    # Tried as one program first; its targets are compiled one by one where that cannot be.
    whole: bool = False


def find(pipe: Any, plan: Plan) -> list[Part]:
    """The parts of a pipeline in the order in which its components are declared; a plan that names no part is an error."""
    components: Mapping[str, Any] = pipe.components
    if isinstance(pipe, BareModel):
        parts = [_bare(pipe.module, plan)]
        _check_names("blocks", plan.blocks, [pipe.NAME])
        _check_names("components", plan.components, [pipe.NAME])
        return parts
    modules = {name: value for name, value in components.items() if isinstance(value, nn.Module)}
    for name in plan.blocks:
        if name not in modules:
            raise PipelineError(f"Plan.blocks names {name!r}, which is no component; {nearest(name, modules)}")
    parts = [part for name, module in modules.items() for part in _parts_of(name, module, plan)]
    if not any(part.name in DENOISERS for part in parts):
        raise PipelineError(
            f"{type(pipe).__name__} has no denoiser that Tritium knows (it looks for {', '.join(DENOISERS)}; "
            f"the components are {', '.join(modules)})"
        )
    _check_names(
        "components", plan.components, sorted({n for part in parts for n in (part.name, part.name.partition(".")[0])})
    )
    return parts


def _check_names(field: str, names: Iterable[str], known: Sequence[str]) -> None:
    for name in names:
        if name not in known:
            raise PipelineError(f"Plan.{field} names {name!r}, which is no part; {nearest(name, known)}")


def _bare(module: nn.Module, plan: Plan) -> Part:
    """The one part of a bare model: a VAE's decoder, or the whole of anything else."""
    name = BareModel.NAME
    decoders = [part for part in _codec(name, module) if part.name.endswith(".decode")] if is_codec(module) else []
    if decoders:
        return dataclasses.replace(decoders[0], name=name)
    return denoiser(name, module, plan.blocks.get(name))


def is_codec(module: nn.Module) -> bool:
    """Whether a module decodes latents through a decoder of its own."""
    return callable(getattr(module, "decode", None)) and isinstance(getattr(module, "decoder", None), nn.Module)


def _parts_of(name: str, module: nn.Module, plan: Plan) -> Iterator[Part]:
    blocks = plan.blocks.get(name)
    if name in DENOISERS:
        yield denoiser(name, module, blocks)
    elif name.startswith(CONTROLNET):
        nets = getattr(module, "nets", None)
        several = {f"{name}.{place}": net for place, net in enumerate(nets)} if isinstance(nets, nn.ModuleList) else {}
        for path, net in (several or {name: module}).items():
            yield denoiser(path, net, blocks)
    elif name == "vae":
        yield from _codec(name, module)
    else:
        encodes = name.startswith(("text_encoder", "image_encoder"))
        if blocks is not None:
            _check_blocks(name, module, blocks)
        elif encodes:
            blocks = _repeated(module)
        targets = _targets(module, blocks) if blocks else ()
        once = "runs once an image: compiling it takes longer than it saves; Plan(measure=True) finds out"
        left = once if encodes else "not part of the denoising loop or the VAE"
        yield Part(name, module, targets, _in_words(targets), Choice(how="eager"), left)


def denoiser(name: str, module: nn.Module, blocks: Sequence[str] | None = None) -> Part:
    """The part a denoiser is; `blocks` asks for its blocks to be compiled one by one."""
    class_name = type(module).__name__
    as_whole = Part(name, module, (Target("", module),), f"{class_name} as a whole", Choice(), whole=True)
    if is_wrapped(module):
        # Its blocks are inside of what torch.compile made: it is left alone as a whole, or refused.
        return dataclasses.replace(as_whole, whole=False)
    family = models.family_of(class_name)
    left = family.left if family is not None and blocks is None else {}
    if blocks is None:
        known = family.blocks if family is not None else _repeated(module)
        if not known:
            return as_whole
        targets = _targets(module, known, left)
        return dataclasses.replace(as_whole, targets=targets, what=_in_words(targets))
    _check_blocks(name, module, blocks)
    targets = _targets(module, blocks, left)
    return Part(name, module, targets, _in_words(targets), Choice())


def _check_blocks(name: str, module: nn.Module, blocks: Sequence[str]) -> None:
    """Raise a `PipelineError` if a module has no block of any of some classes."""
    classes = {type(inner).__name__ for inner in module.modules()}
    if not classes.intersection(blocks):
        raise PipelineError(f"{name!r} has no block of class {blocks[0]!r}; {nearest(blocks[0], classes)}")


def check_choice(part: Part, choice: Choice) -> None:
    """Raise a `PipelineError` for a part that is to be compiled and has nothing to compile."""
    if choice.how != "eager" and not part.targets:
        name = part.name.partition(".")[0]
        raise PipelineError(
            f"{part.name} cannot be compiled: its repeated blocks cannot be found; name their classes with "
            f"Plan(blocks={{{name!r}: ('Block',)}}), or leave it alone with Plan(components={{{part.name!r}: 'eager'}})"
        )


def _codec(name: str, module: nn.Module) -> Iterator[Part]:
    if is_wrapped(module):
        # Pipelines call `decode` and `encode` of what is inside, past the compiled call around it.
        module = module.get_submodule("_orig_mod")
    codec = models.codec_of(type(module).__name__)
    for part, attribute in ((f"{name}.encode", "encoder"), (f"{name}.decode", "decoder")):
        inner = getattr(module, attribute, None)
        if not isinstance(inner, nn.Module):
            continue
        varying = getattr(codec, attribute) if codec is not None else {}
        cache = codec.cache if codec is not None else ()
        guard = Guard(module, inner, cache) if attribute == "decoder" else None
        what = f"{type(inner).__name__} as a whole"
        yield Part(part, inner, (Target("", inner),), what, Choice(), varying=varying, guard=guard)


def _repeated(module: nn.Module) -> tuple[str, ...]:
    """The classes of which a model is a stack: declared by the model, or lists of equal modules that hold most of it."""
    declared = tuple(getattr(module, "_repeated_blocks", None) or ())
    if declared:
        return declared
    total = sum(parameter.numel() for parameter in module.parameters()) or 1
    held: Counter[str] = Counter()
    for inner in module.modules():
        if isinstance(inner, nn.ModuleList) and len(inner):
            classes = {type(item) for item in inner}
            if len(classes) == 1 and not is_single(inner[0]):
                held[classes.pop().__name__] += sum(parameter.numel() for parameter in inner.parameters())
    largest = held.most_common(1)
    if not largest or largest[0][1] / total < _BLOCKS_HOLD:
        # Two kinds of blocks may share the parameters between them.
        if sum(held.values()) / total < _BLOCKS_HOLD:
            return ()
        return tuple(held)
    return (largest[0][0],)


def _targets(module: nn.Module, blocks: Sequence[str], left: Mapping[str, str] | None = None) -> tuple[Target, ...]:
    """The outermost blocks, and the largest modules beside them that are more than one routine."""
    found: list[Target] = []

    def walk(path: str, current: nn.Module) -> None:
        if path in (left or {}):
            return
        if type(current).__name__ in blocks:
            found.append(Target(path, current))
        elif not _contains(current, blocks) and not isinstance(current, (nn.ModuleList, nn.ModuleDict)):
            if not is_single(current):
                found.append(Target(path, current))
        else:
            # Lists are never called themselves.
            for name, child in current.named_children():
                walk(f"{path}.{name}" if path else name, child)

    walk("", module)
    return tuple(found)


def _contains(module: nn.Module, blocks: Sequence[str]) -> bool:
    return any(type(inner).__name__ in blocks for inner in module.modules())


def is_wrapped(module: nn.Module) -> bool:
    """Whether this is what `torch.compile(module)` makes of a module, around it."""
    return isinstance(module, torch._dynamo.OptimizedModule)


def is_single(module: nn.Module) -> bool:
    """Whether a module is one of torch's own layers: one call of a routine, and nothing around it to fuse."""
    own = type(module).__module__.startswith("torch.nn.") and next(module.children(), None) is None
    return own or isinstance(module, (nn.Linear, nn.modules.conv._ConvNd))


def _in_words(targets: tuple[Target, ...]) -> str:
    counts = Counter(type(target.module).__name__ for target in targets)
    return ", ".join(f"{count} {name}" if count > 1 else name for name, count in counts.most_common())
