"""Run one pipeline on several ranks: guidance, tokens, weights, experts and VAE tiles are split over a mesh."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from tritium.errors import PipelineError
from tritium.techniques.choice import Choice
from tritium.techniques.parallel import decoder, experts, ranks, sequence, tensor
from tritium.techniques.parallel import mesh as meshes
from tritium.techniques.parallel.config import SEQUENCE, Parallel
from tritium.techniques.parallel.mesh import Axis, Mesh
from tritium.techniques.skip.config import Skip
from tritium.techniques.skip.table import ATTENTION, BLOCKS
from tritium.techniques.sparse import Sparse
from tritium.techniques.technique import Note, Part, Technique

__all__ = ["TECHNIQUE", "Parallel", "State"]

_DENOISERS = ("transformer", "transformer_2", "unet", "model")
# The modules of this folder that split a denoiser, in the order in which they are applied, each with its axis. A module
# has `apply(part, axis)`, which returns the function that undoes it; its attribute `note`, if it has one, returns words
# for the report.
_SPLITTERS = (("guidance", "cfg"), ("tensor", "tensor"), ("experts", "experts"), ("sequence", "sequence"))


@dataclass
class State:
    """The mesh of a part, and the functions that undo what was split."""

    mesh: Mesh
    undo: list[Callable[[], None]] = field(default_factory=list)
    splits: list[str] = field(default_factory=list)


def applies_to(part: Part, config: Parallel) -> str | None:
    meshes.start(device_of(part))
    meshes.check(config, dist.get_world_size())
    if _is_codec(part):
        return _why_whole(part, config)
    if part.name in _DENOISERS:
        reason = _refusal(part, config)
        if reason is not None:
            raise PipelineError(f"{part.name} cannot have {config}: {reason}")
        return None
    return "it runs on every rank"


def _is_codec(part: Part) -> bool:
    return part.component is not part.module


def _why_whole(part: Part, config: Parallel) -> str | None:
    """Return why every rank computes a whole VAE, or None; raise if a number of ranks was named for it."""
    if config.vae is None:
        return "Parallel(vae=None) leaves the VAE on every rank"
    reason = decoder.why_not(part)
    # Encoders are shared where that is possible: most pipelines only decode.
    if reason is not None and isinstance(config.vae, int) and config.vae > 1 and part.name != "vae.encode":
        raise PipelineError(f"{part.name} cannot have {config}: {reason}")
    return reason


def _refusal(part: Part, config: Parallel) -> str | None:
    """Return why a denoiser cannot be split in the named ways, or None."""
    reason = sequence.why_not(part) if any(config.degrees[axis] > 1 for axis in SEQUENCE) else None
    if reason is not None:
        return f"its tokens cannot be split: {reason}"
    reason = experts.why_not(part.module) if config.degrees["experts"] > 1 else None
    if reason is not None:
        return f"its experts cannot be split: {reason}"
    degree = config.degrees["tensor"]
    reason = tensor.why_not(part.module, degree) if degree > 1 else None
    return f"its weights cannot be split: {reason}" if reason is not None else None


def device_of(part: Part) -> torch.device:
    return next((parameter.device for parameter in part.module.parameters()), torch.device("cpu"))


def apply(part: Part, config: Parallel) -> State:
    mesh = meshes.mesh_of(config, device_of(part))
    state = State(mesh)
    others = ranks.control()
    if others is not None and not _is_codec(part):
        part.around(others.count_call, outside=True)
        part.around(others.around_call)
    try:
        for name, axis in _splits_of(part, config, mesh):
            module = importlib.import_module(f"{__name__}.{name}")
            how = (config.exchange,) if name == "sequence" else ()
            state.undo.append(module.apply(part, axis, *how))
            state.splits.append(name)
    except BaseException:
        remove(part, state)
        raise
    return state


def _splits_of(part: Part, config: Parallel, mesh: Mesh) -> list[tuple[str, Axis | Mesh]]:
    """Return the modules that split this part, each with its axis; `sequence` has three axes and gets the mesh."""
    if _is_codec(part):
        size = mesh.world.size if config.vae == "auto" else config.vae or 1
        return [("decoder", meshes.axis_of(size, device_of(part)))] if size > 1 else []
    found: list[tuple[str, Axis | Mesh]] = []
    for name, axis in _SPLITTERS:
        if axis == "sequence":
            found += [(name, mesh)] if any(mesh[one].size > 1 for one in SEQUENCE) else []
        elif mesh[axis].size > 1:
            found.append((name, mesh[axis]))
    return found


def remove(_part: Part, state: State) -> None:
    while state.undo:
        state.undo.pop()()
    state.splits.clear()


def conflicts(config: Parallel, choice: Choice) -> str | None:
    return _conflict_with_sparse(config, choice.get(Sparse)) or _conflict_with_skip(config, choice.get(Skip))


def _conflict_with_sparse(config: Parallel, sparse: Sparse | None) -> str | None:
    if sparse is None:
        return None
    if config.is_auto:
        return "no mesh is chosen for sparse attention, whose work depends on values; name degrees, such as ulysses=2"
    if config.degrees["ring"] > 1 or config.degrees["gather"] > 1:
        return (
            "sparse attention needs all tokens of a head on one rank, and with ring or gather a rank has some queries; "
            "leave out sparse, or name ulysses in place of ring and gather"
        )
    if config.exchange.startswith("chunks"):
        return "sparse attention keeps blocks for all heads of a rank at once; use exchange='auto' in place of chunks"
    return None


def _conflict_with_skip(config: Parallel, skip: Skip | None) -> str | None:
    is_by_branch = skip is not None and (skip.uses(BLOCKS) or skip.uses(ATTENTION))
    if is_by_branch and (config.is_auto or config.degrees["cfg"] > 1):
        return (
            "skip leaves out blocks by what a rank kept of a branch, and cfg computes a branch on one rank; leave out B "
            "and A, or name other degrees than cfg"
        )
    return None


def report(_part: Part, config: Parallel, state: State) -> Note:
    axes = {name: axis.size for name, axis in state.mesh.axes.items() if axis.size > 1}
    notes = [words for undo in state.undo if (words := getattr(undo, "note", str)())]
    return Note(
        "; ".join([f"{', '.join(state.splits) or 'nothing'} split on {state.mesh}", *notes]),
        {"mesh": axes, "world": state.mesh.world.size, "splits": list(state.splits), "vae": config.vae},
    )


TECHNIQUE = Technique(
    name="parallel",
    config=Parallel,
    applies_to=applies_to,
    apply=apply,
    remove=remove,
    conflicts=conflicts,
    report=report,
    # Ranks that all compute everything are not what the degrees name.
    is_required=True,
    after=("experts", "sparse"),
)
