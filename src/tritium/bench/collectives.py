"""Explain how a model is split over ranks, in one process without a GPU: `tritium explain MODEL --parallel ... --world N`.

The published width of the model is built on fake tensors, which take no memory, with a few blocks, and split as rank 0 of a
fake process group. It is compiled, for its graphs, and called eagerly, for its collectives in the order in which a call
starts them. The times are bytes and operations divided by rates.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import tritium
from tritium import compat, models
from tritium.bench.models import MODELS, Size, StockModel
from tritium.bench.workload import Normals
from tritium.config import CompilationConfig
from tritium.errors import ConfigError, nearest
from tritium.pipelines.parts import denoiser
from tritium.pipelines.plan import Plan
from tritium.report.records import GraphRecord
from tritium.techniques.experts import group_all
from tritium.techniques.memory.estimate import Live, fake_arguments
from tritium.techniques.parallel.config import Parallel
from tritium.techniques.parallel.cost import Decision, Estimate, Rates, choose, estimate
from tritium.techniques.parallel.work import work_of

# GPUs with NVLink: operations of linears and attention, bytes a second of a collective, and seconds to start one.
NVLINK = Rates(linear=700e12, attention=600e12, bandwidth=350e9, latency=15e-6)

# Blocks of each kind in the call that is explained: the first and the last are not alike.
_FEW = 2

AFTER = "after the blocks"

# What a rank sends in a collective, in units of (P-1)/P of the bytes of its result on P ranks; 1 for others.
_SENT = {"all_reduce": 2.0}


@dataclass(frozen=True)
class Collective:
    """One collective of a call: torch's name, its block, the bytes that a rank sends, and the exposed seconds."""

    name: str
    block: str
    shape: tuple[int, ...]
    bytes: int
    ranks: int
    # Seconds that computing waits for it, in the order of the call.
    exposed: float


@dataclass(frozen=True)
class Explained:
    """The graphs and collectives of a split model, and its estimates."""

    model: str
    size: str
    world: int
    config: Parallel
    graphs: list[GraphRecord]
    collectives: list[Collective]
    # The number of blocks of each class, in the call and in the published model.
    blocks: Mapping[str, tuple[int, int]]
    estimate: Estimate
    best: Decision
    notes: list[str]

    @property
    def by_block(self) -> dict[str, list[Collective]]:
        """Return the collectives of the first block of each class, and those after the last block."""
        found: dict[str, list[Collective]] = {}
        for one in self.collectives:
            found.setdefault(one.block, []).append(one)
        first: dict[str, list[Collective]] = {}
        for path, several in found.items():
            first.setdefault(path.rpartition(".")[0] or AFTER, several)
        if not found or AFTER in first:
            return first
        last = list(found)[-1]
        rest = found[last][len(first[last.rpartition(".")[0]]) :]
        return {**first, **({AFTER: rest} if rest else {})}

    def to_dict(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "size": self.size,
            "world": self.world,
            "degrees": {axis: size for axis, size in self.estimate.degrees.items() if size > 1},
            "graphs": [{"name": graph.graph, "nodes": graph.nodes} for graph in self.graphs],
            "collectives": [dataclasses.asdict(one) for one in self.collectives],
            "blocks": {name: {"explained": few, "published": many} for name, (few, many) in self.blocks.items()},
            "milliseconds": {"computing": self.estimate.compute * 1e3, "step": self.estimate.seconds * 1e3},
            "padding": self.estimate.padding,
            "notes": self.notes,
        }


def explain(name: str, config: Parallel, world: int) -> Explained:
    """Return how a model is split over a world, by the name of the model."""
    key = name.replace("-", "_")
    if key not in MODELS:
        raise ConfigError(f"--parallel explains a published model, and {name!r} is none; {nearest(key, MODELS)}")
    model = MODELS[key]
    fakes = compat.tensors.fake_mode(allow_non_fake_inputs=True)
    published = dataclasses.replace(model.full[1], config=model.published)
    with compat.collectives.fake_world(world):
        whole, arguments = _built(model, published, fakes)
        few = dataclasses.replace(published, config=_with_few_blocks(whole, model.published))
        branches = models.branches_of(type(whole).__name__)
        work = work_of(whole, (), arguments, branches, mode=fakes)
        best = choose(work, NVLINK, world)
        if config.is_auto:
            config = best.best.config(None)
        config = dataclasses.replace(config, vae=None)
        graphs, notes = _compiled(model, few, config, fakes)
        collectives, counts = _called(model, few, config, fakes)
    many = _blocks(whole)
    return Explained(
        type(whole).__name__,
        f"latents of {' x '.join(map(str, few.grid))}, {model.tokens(few)} + {few.text} tokens",
        world,
        config,
        graphs,
        collectives,
        {kind: (count, many.get(kind, count)) for kind, count in counts.items()},
        estimate(work, NVLINK, config.degrees),
        best,
        notes,
    )


def _with_few_blocks(module: Any, published: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration of a model with two blocks of each kind, and lists by block as long."""
    config = dict(module.config)
    counts = {name: n for name, n in config.items() if name.endswith("layers") and isinstance(n, int)}
    few = {name: min(count, _FEW) for name, count in counts.items()}
    lists = {name: value for name, value in config.items() if isinstance(value, list) and value}
    cut = {name: value[: sum(few.values())] for name, value in lists.items() if len(value) == sum(counts.values())}
    return {**published, **few, **cut}


def _built(model: StockModel, size: Size, fakes: Any, *, grouped: bool = True) -> tuple[nn.Module, dict[str, Any]]:
    """Return a model on fake tensors, with grouped experts if no technique groups them, and the arguments of a call."""
    with fakes:
        module = model.build(size.config, "cpu", torch.bfloat16)
        arguments = model.arguments(module.config, size, Normals("cpu", torch.bfloat16))
        if grouped:
            group_all(module)
        return module, arguments


def _blocks(module: nn.Module) -> dict[str, int]:
    counts: dict[str, int] = {}
    for block in denoiser("transformer", module).blocks:
        kind = type(block.module).__name__
        if isinstance(block.module, nn.Module) and kind in _repeated(module):
            counts[kind] = counts.get(kind, 0) + 1
    return counts


def _repeated(module: nn.Module) -> set[str]:
    return {type(item).__name__ for inner in module.modules() if isinstance(inner, nn.ModuleList) for item in inner}


def _plan(config: Parallel, how: str) -> Plan:
    return Plan(
        parallel=config,
        config=CompilationConfig(engine="eager"),
        components={"model": how},
        check_memory=False,
        progress=False,
    )


def _compiled(model: StockModel, size: Size, config: Parallel, fakes: Any) -> tuple[list[GraphRecord], list[str]]:
    """Return the graphs of a compiled call, and notes on the split."""
    module, arguments = _built(model, size, fakes, grouped=False)
    with torch.no_grad(), tritium.optimize(module, _plan(config, "tritium")) as handle:
        with fakes:
            module(**fake_arguments((), arguments)[1])
        refused = handle.part("model").refused
        # What follows is about the calls of this rank.
        notes = [handle.part("model").technique_notes["parallel"].text.partition(";")[0]]
        notes += [f"compiled block by block: {refused}"] if refused else []
        return list(handle.report.records), notes


def _called(model: StockModel, size: Size, config: Parallel, fakes: Any) -> tuple[list[Collective], dict[str, int]]:
    """Return the collectives of an eager call, and the number of blocks of each class."""
    module, arguments = _built(model, size, fakes)
    counts = _blocks(module)
    with torch.no_grad(), tritium.optimize(module, _plan(config, "eager")), fakes:
        named = fake_arguments((), arguments)[1]
        record = _Recorded()
        with _block_names(module, counts, record), record:
            module.forward(**named)
    return record.found, counts


@contextmanager
def _block_names(module: nn.Module, counts: Mapping[str, int], record: _Recorded) -> Iterator[None]:
    handles = []
    for path, inner in module.named_modules():
        if type(inner).__name__ in counts:
            handles.append(inner.register_forward_pre_hook(functools.partial(record.enter, path), prepend=True))
            handles.append(inner.register_forward_hook(functools.partial(record.enter, ""), always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Recorded(Live):
    """Follow a call: computing goes on while collectives run one after the other, until a result is waited for."""

    def __init__(self) -> None:
        super().__init__(counts_flops=True)
        self.found: list[Collective] = []
        self._block = ""
        # The time of computing, and of the end of the last collective; those that are not waited for, by tensor.
        self._now = self._link = 0.0
        self._running: dict[int, tuple[int, float]] = {}
        self._kept: list[Any] = []

    def enter(self, block: str, *_hook: Any) -> None:
        self._block = block

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        before = self.flops
        result = super().__torch_dispatch__(func, types, args, kwargs)
        name = func.overloadpacket.__name__
        if func.namespace == "_c10d_functional":
            if name == "wait_tensor":
                self._wait(id(args[0]))
            else:
                self._start(name.removesuffix("_"), result, str(args[-1]))
        is_attention = name.startswith("_scaled_dot_product")
        self._now += (self.flops - before) / (NVLINK.attention if is_attention else NVLINK.linear)
        return result

    def _start(self, name: str, result: torch.Tensor, group: str) -> None:
        ranks = compat.collectives.group_size(group)
        sent = int(result.nbytes * _SENT.get(name, 1.0) * (ranks - 1) / ranks)
        self._link = max(self._now, self._link) + sent / NVLINK.bandwidth + NVLINK.latency
        self._running[id(result)] = len(self.found), self._link
        # Its id must not be used again.
        self._kept.append(result)
        self.found.append(Collective(name, self._block, tuple(result.shape), sent, ranks, 0.0))

    def _wait(self, tensor: int) -> None:
        place, end = self._running.pop(tensor, (None, 0.0))
        if place is not None:
            exposed = max(0.0, end - self._now)
            self._now += exposed
            self.found[place] = dataclasses.replace(self.found[place], exposed=exposed)
