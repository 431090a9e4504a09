"""Plan the memory of a pipeline without running it: `tritium plan`.

The denoiser is built on fake tensors, which take no memory, and called at two sizes. Nothing is measured: the times are
floating-point operations divided by a rate.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tritium import compat, device
from tritium.bench import generation
from tritium.bench.models import MODELS, Size, StockModel, cast_as_loading_does, diffusers
from tritium.bench.workload import Normals
from tritium.errors import ConfigError, brief, nearest
from tritium.example import load_example
from tritium.pipelines.parts import DENOISERS, denoiser, modules_of
from tritium.techniques.experts import group_all
from tritium.techniques.memory.config import FIT, bytes_of
from tritium.techniques.memory.estimate import Estimate, Peaks, estimate
from tritium.techniques.memory.planning import GIVEN, Demand, Machine
from tritium.techniques.memory.schedule import Block, Schedule
from tritium.techniques.memory.units import module_bytes, streamable

# Prompt tokens of a pipeline in a folder.
_TEXT = 512

_WEIGHTS = (".safetensors", ".bin")


@dataclass(frozen=True)
class Placement:
    """The plan for one denoiser, and the bytes of the components that take turns with it."""

    demand: Demand
    schedule: Schedule
    budget: int
    machine: Machine
    # Kinds of blocks: class, and the places of its blocks.
    kinds: dict[str, list[int]]
    others: dict[str, int]
    # What the call stands for, and the line through the activations at two sizes: constant, and bytes a token.
    size: str
    line: tuple[float, float]


def plan(name: str, budget: str, size: str | None, link: float | None, flops: float | None) -> Placement:
    """Plan a pipeline: the example, a folder, or the published size of a model by its name, such as `flux`."""
    machine = Machine.of("cuda" if device.cuda_available() else "cpu")
    source = GIVEN if link else machine.link_is
    machine = replace(machine, link=link or machine.link, flops=flops or machine.flops, link_is=source)
    limit = _budget(budget)
    fakes = compat.tensors.fake_mode(allow_non_fake_inputs=True)
    module, model, full, others = _built(name, fakes)
    if size is not None:
        full = _at(model, full, size)
    spec = denoiser("transformer", module)
    blocks = streamable(module, [block.module for block in spec.blocks])
    found = {grid: _estimated(model, module, blocks, replace(full, grid=grid), fakes) for grid in _grids(full.grid)}
    at = found[full.grid]
    peaks = Peaks()
    for grid, one in found.items():
        peaks.add(model.tokens(replace(full, grid=grid)), one.peak)
    sizes = [module_bytes(block) for block in blocks]
    timed = tuple(Block(bytes_, machine.ms(work)) for bytes_, work in zip(sizes, at.of_blocks, strict=True))
    other = machine.ms(at.flops - sum(at.of_blocks))
    demand = Demand(type(module).__name__, timed, module_bytes(module) - sum(sizes), at.reserve, other)
    kinds: dict[str, list[int]] = {}
    for place, block in enumerate(blocks):
        kinds.setdefault(type(block).__name__, []).append(place)
    words = f"latents of {' x '.join(map(str, full.grid))}, {model.tokens(full)} + {full.text} tokens"
    schedule = demand.schedule(limit, machine)
    return Placement(demand, schedule, limit, machine, kinds, others, words, peaks.line or (0.0, 0.0))


def _budget(text: str) -> int:
    if text != FIT:
        return bytes_of(text)
    free = device.free_memory(torch.device("cuda")) if device.cuda_available() else None
    if free is None:
        raise ConfigError("--vram fit needs a GPU; without one name the size of yours, such as --vram 16GB")
    return free


def _built(name: str, fakes: Any) -> tuple[Any, StockModel, Size, dict[str, int]]:
    """Return a denoiser, how it is called, its size, and the bytes of the pipeline's other components."""
    if name == generation.EXAMPLE:
        pipe = load_example("cpu", torch.float32)
        others = modules_of(pipe)
        del others["transformer"]
        full = Size(pipe.transformer.config, (8, 8), _TEXT)
        return pipe.transformer, MODELS["flux"], full, {key: module_bytes(part) for key, part in others.items()}
    if Path(name).is_dir():
        return _of_folder(Path(name), fakes)
    # The size of a workload has few blocks: that of the published model has all of them.
    key = name.replace("-", "_")
    if key not in MODELS:
        raise ConfigError(
            f"there is no pipeline {name!r}: neither a folder, 'example', nor a model; {nearest(key, MODELS)}"
        )
    model = MODELS[key]
    full = replace(model.full[1], config=model.published)
    with fakes:
        module = model.build(full.config, "cpu", torch.bfloat16)
        group_all(module)
    return module, model, full, {}


def _of_folder(folder: Path, fakes: Any) -> tuple[Any, StockModel, Size, dict[str, int]]:
    generation.check_model(str(folder))
    index = json.loads((folder / "model_index.json").read_text(encoding="utf-8"))
    part = next((part for part in DENOISERS if (folder / part / "config.json").is_file()), None)
    models = {model.class_name: model for model in MODELS.values()}
    kind = index[part][1] if part is not None else None
    if part is None or kind not in models:
        raise ConfigError(
            f"{folder}: a call of its denoiser ({kind or 'none found'}) is not known; {nearest(str(kind), models)}"
        )
    config = json.loads((folder / part / "config.json").read_text(encoding="utf-8"))
    try:
        with fakes, torch.device("cpu"):
            module = getattr(diffusers(), kind).from_config(config).eval()
            cast_as_loading_does(module, torch.bfloat16)
            group_all(module)
    except (TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{folder / part} cannot be built: {brief(error)}") from error
    others = {path.name: _weights_in(path) for path in sorted(folder.iterdir()) if path.is_dir() and path.name != part}
    full = replace(models[kind].full[1], config=module.config)
    return module, models[kind], full, {name: size for name, size in others.items() if size}


def _weights_in(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir() if path.suffix in _WEIGHTS)


def _at(model: StockModel, full: Size, size: str) -> Size:
    """Return the size of a call for an image of `WxH` pixels."""
    found = generation.width_and_height(size)
    if found is None or len(full.grid) != 2:
        words = "the model makes videos" if len(full.grid) != 2 else "it is not WIDTHxHEIGHT, such as 1024x1024"
        raise ConfigError(f"--size {size} cannot be planned: {words}; leave it out")
    # The size that the model is measured at is of 512 pixels if its name says so, else of 1024.
    name, measured = model.full
    cell = (512 if name.endswith("-512") else 1024) // measured.grid[0]
    return replace(full, grid=(found[1] // cell, found[0] // cell))


def _grids(grid: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Yield a grid, and a smaller one whose sides are multiples of the model's patches as well."""
    yield grid
    *frames, height, width = grid
    yield (*frames, max(4, height // 4 * 2), max(4, width // 4 * 2))


def _estimated(model: StockModel, module: Any, blocks: list[Any], size: Size, fakes: Any) -> Estimate:
    arguments = model.arguments(module.config, size, Normals("cpu", torch.bfloat16))
    try:
        return estimate(module, (), arguments, blocks, fakes)
    except Exception as error:
        raise ConfigError(f"{type(module).__name__} cannot be called on fake tensors: {brief(error)}") from error
