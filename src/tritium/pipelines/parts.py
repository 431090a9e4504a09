"""Find the parts of a pipeline, and the modules in each that are worth compiling.

A denoiser is one program: its whole forward is traced, and equal blocks share compiled code. Its blocks and the
remaining modules are compiled one by one if the forward does not trace as one graph.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from tritium import compat, models
from tritium.errors import PipelineError, nearest
from tritium.pipelines.memory import Guard
from tritium.pipelines.plan import Plan
from tritium.techniques.choice import Choice


class BareModel:
    """Wrap a model with the attributes of a pipeline that `optimize` reads: components, scheduler and device."""

    NAME = "model"

    def __init__(self, module: nn.Module, scheduler: Any = None) -> None:
        self.module = module
        self.scheduler = scheduler

    @property
    def components(self) -> Mapping[str, Any]:
        return {self.NAME: self.module}

    @property
    def device(self) -> torch.device:
        tensors = (*self.module.parameters(), *self.module.buffers())
        return tensors[0].device if tensors else torch.device("cpu")


# Component names in diffusers pipelines of the models that run at every step.
DENOISERS = ("transformer", "transformer_2", "unet")

# Components with this prefix also run at every step and pass their results to the denoiser.
CONTROLNET = "controlnet"

# Parts that keep their handle alive; other parts may be shared by several pipelines.
KEPT = (*DENOISERS, BareModel.NAME)

# Repeated blocks are accepted if they hold at least this share of a model's parameters.
_BLOCKS_HOLD = 0.5


@dataclass(frozen=True)
class Block:
    """A module with a separate compiled call."""

    path: str
    module: nn.Module


@dataclass(frozen=True)
class PartSpec:
    """What is known about a part: a denoiser, one direction of a VAE, a text encoder.

    All of the part runs inside calls of `module`.
    """

    name: str
    module: nn.Module
    blocks: tuple[Block, ...]
    what: str
    default: Choice
    # Why the default leaves the part eager.
    left: str = ""
    # Dims of the module's arguments that vary with the image, by argument name.
    varying: Mapping[str, Sequence[int]] = field(default_factory=dict)
    # Checks each call before it starts.
    guard: Guard | None = None
    # Compile as one program first; fall back to the blocks one by one.
    whole: bool = False
    # The component that contains the module, if it is another one.
    component: nn.Module | None = None


def modules_of(pipe: Any) -> dict[str, nn.Module]:
    """Return the components of a pipeline that are modules, by name."""
    return {name: value for name, value in pipe.components.items() if isinstance(value, nn.Module)}


def find(pipe: Any, plan: Plan) -> list[PartSpec]:
    """Return a pipeline's parts in the order of its components; raise if the plan names no part."""
    if isinstance(pipe, BareModel):
        parts = [_bare(pipe.module, plan)]
        _check_names("blocks", plan.blocks, [pipe.NAME])
        _check_names("components", plan.components, [pipe.NAME])
        return parts
    modules = modules_of(pipe)
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


def _bare(module: nn.Module, plan: Plan) -> PartSpec:
    """Return the single part of a bare model: a VAE's decoder, or any other model as a whole."""
    name = BareModel.NAME
    decodes = callable(getattr(module, "decode", None))
    decoders = [part for part in _codec(name, module) if part.name.endswith(".decode")] if decodes else []
    if decoders:
        return dataclasses.replace(decoders[0], name=name)
    return denoiser(name, module, plan.blocks.get(name))


def _parts_of(name: str, module: nn.Module, plan: Plan) -> Iterator[PartSpec]:
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
        found = _blocks_of(module, blocks) if blocks else ()
        once = "runs once an image: compiling it takes longer than it saves; Plan(measure=True) finds out"
        left = once if encodes else "not part of the denoising loop or the VAE"
        yield PartSpec(name, module, found, _in_words(found), Choice(how="eager"), left)


def denoiser(name: str, module: nn.Module, blocks: Sequence[str] | None = None) -> PartSpec:
    """Return the part for a denoiser; with `blocks`, compile blocks of these classes one by one."""
    class_name = type(module).__name__
    as_whole = PartSpec(name, module, (Block("", module),), f"{class_name} as a whole", Choice(), whole=True)
    if compat.modules.is_wrapped(module):
        # torch.compile already wraps the blocks: leave the module as a whole eager, or refuse it.
        return dataclasses.replace(as_whole, whole=False)
    family = models.family_of(class_name)
    left = family.left if family is not None and blocks is None else {}
    if blocks is None:
        known = family.blocks if family is not None else _repeated(module)
        if not known:
            return as_whole
        found = _blocks_of(module, known, left)
        return dataclasses.replace(as_whole, blocks=found, what=_in_words(found))
    _check_blocks(name, module, blocks)
    found = _blocks_of(module, blocks, left)
    return PartSpec(name, module, found, _in_words(found), Choice())


def _check_blocks(name: str, module: nn.Module, blocks: Sequence[str]) -> None:
    """Raise a `PipelineError` if a module has no block of the given classes."""
    classes = {type(inner).__name__ for inner in module.modules()}
    if not classes.intersection(blocks):
        raise PipelineError(f"{name!r} has no block of class {blocks[0]!r}; {nearest(blocks[0], classes)}")


def _codec(name: str, module: nn.Module) -> Iterator[PartSpec]:
    if compat.modules.is_wrapped(module):
        # Pipelines call `decode` and `encode` of the inner module and bypass the compiled call around it.
        module = compat.modules.unwrapped(module)
    codec = models.codec_of(type(module).__name__)
    for part, attribute in ((f"{name}.encode", "encoder"), (f"{name}.decode", "decoder")):
        inner = getattr(module, attribute, None)
        if not isinstance(inner, nn.Module):
            continue
        varying = getattr(codec, attribute) if codec is not None else {}
        cache = codec.cache if codec is not None else ()
        guard = Guard(module, inner, cache) if attribute == "decoder" else None
        what = f"{type(inner).__name__} as a whole"
        yield PartSpec(part, inner, (Block("", inner),), what, Choice(), varying=varying, guard=guard, component=module)


def _repeated(module: nn.Module) -> tuple[str, ...]:
    """Return the block classes: declared by the model, or those of uniform lists with most parameters."""
    declared = compat.modules.repeated_blocks(module)
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
        # Two kinds of blocks may hold most of the parameters together.
        if sum(held.values()) / total < _BLOCKS_HOLD:
            return ()
        return tuple(held)
    return (largest[0][0],)


def _blocks_of(module: nn.Module, blocks: Sequence[str], left: Mapping[str, str] | None = None) -> tuple[Block, ...]:
    """Return the outermost blocks, and the largest other modules that are more than one routine."""
    found: list[Block] = []

    def walk(path: str, current: nn.Module) -> None:
        if path in (left or {}):
            return
        if type(current).__name__ in blocks:
            found.append(Block(path, current))
        elif not _contains(current, blocks) and not isinstance(current, (nn.ModuleList, nn.ModuleDict)):
            if not is_single(current):
                found.append(Block(path, current))
        else:
            # Lists and dicts of modules are never called.
            for name, child in current.named_children():
                walk(f"{path}.{name}" if path else name, child)

    walk("", module)
    return tuple(found)


def _contains(module: nn.Module, blocks: Sequence[str]) -> bool:
    return any(type(inner).__name__ in blocks for inner in module.modules())


def is_single(module: nn.Module) -> bool:
    """Return True if a module is one of torch's layers: a single routine, with nothing to fuse around it."""
    own = type(module).__module__.startswith("torch.nn.") and next(module.children(), None) is None
    return own or isinstance(module, nn.Linear) or compat.modules.is_convolution(module)


def _in_words(blocks: tuple[Block, ...]) -> str:
    counts = Counter(type(block.module).__name__ for block in blocks)
    return ", ".join(f"{count} {name}" if count > 1 else name for name, count in counts.most_common())
