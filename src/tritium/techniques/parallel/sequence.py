"""Split the tokens of a denoiser between ranks: streams are split before its blocks, and attention exchanges them."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from tritium import compat, models
from tritium.errors import PipelineError
from tritium.models.family import Blocks, Cut, ParallelFacts
from tritium.techniques.parallel import sequence_graph
from tritium.techniques.parallel.cost import PACKED_BELOW
from tritium.techniques.parallel.exchange import Grid, Segment
from tritium.techniques.parallel.mesh import Mesh
from tritium.techniques.parallel.sequence_blocks import Installed, Place, Streams, inputs_of
from tritium.techniques.technique import Around, Part

AUTO = "auto"


def why_not(part: Part) -> str | None:
    """Return why the tokens of a part cannot be split, or None; nothing is changed."""
    facts = models.parallel_of(type(part.module).__name__)
    if facts.unsplit:
        return facts.unsplit
    if not facts.sections:
        return f"there are no facts about the streams of {type(part.module).__name__}"
    for inner in part.module.modules():
        if type(inner).__name__ in facts.whole:
            return facts.whole[type(inner).__name__]
    if part.how == "inductor":
        return "plain Inductor exchanges no tokens; use how='tritium' or how='eager'"
    return None


def apply(part: Part, mesh: Mesh, exchange: str = AUTO) -> Sequence:
    """Split the tokens of a part by the axes of a mesh; return the function that undoes it."""
    reason = why_not(part)
    if reason is not None:
        raise PipelineError(f"the tokens of {part.name} cannot be split: {reason}")
    grid = Grid.of(mesh)
    sequence = Sequence(part.module, models.parallel_of(type(part.module).__name__), grid, exchange)
    if part.how == "tritium":
        # Graphs contain this rank's place in the mesh.
        part.compile_with(passes=[sequence_graph.pass_of(grid, sequence.choose)], apart=("sequence", grid))
    if sequence.uncompiled:
        part.around_blocks(sequence.around)
    sequence.install()
    return sequence


def exchange_for(q: torch.Tensor) -> str:
    """Choose how heads are exchanged, by a rank's queries."""
    return "packed" if q.is_cuda and q.numel() * q.element_size() < PACKED_BELOW else "split"


class Sequence:
    """The split tokens of one part; a call undoes it."""

    def __init__(self, module: nn.Module, facts: ParallelFacts, grid: Grid, exchange: str) -> None:
        self._module, self._facts, self._exchange = module, facts, exchange
        self.streams = Streams(grid, self.choose)
        # The numbers of heads of attentions that exchange.
        self.heads: set[int] = set()
        self._installed = Installed()
        # Blocks whose graphs break, and run eagerly.
        self.uncompiled = {
            id(block)
            for section in facts.sections
            for blocks in section
            if blocks.eager
            for block in modules_of(module, blocks)
        }

    def install(self) -> None:
        try:
            for section in self._facts.sections:
                self._install_section(section)
            if self._facts.arguments:
                inputs = inputs_of(self._module, stream=self._facts.arguments)
                self._installed.put(self._module, Place(self.streams, inputs, is_first=True), "denoiser")
        except BaseException:
            self()
            raise

    def _install_section(self, section: tuple[Blocks, ...]) -> None:
        found = [(block, blocks) for blocks in section for block in modules_of(self._module, blocks)]
        for place, (block, blocks) in enumerate(found):
            inputs = inputs_of(block, stream=blocks.streams, table=blocks.tables, mask=blocks.masks)
            outputs = tuple(None if name is None else _cut(blocks, name) for name in blocks.outputs)
            self._installed.put(
                block,
                Place(self.streams, inputs, outputs, is_first=place == 0, is_last=place == len(found) - 1),
                "block",
            )
            for name in blocks.opaque:
                self._installed.put(block.get_submodule(name), Place(self.streams), "opaque")

    def around(self, block: nn.Module) -> Around | None:
        """Run a block eagerly whose graphs would break."""
        if id(block) not in self.uncompiled:
            return None
        return functools.partial(_eagerly, block)

    def choose(self, q: torch.Tensor) -> str:
        """Return how the heads of an attention are exchanged."""
        self.heads.add(int(q.shape[1]))
        return exchange_for(q) if self._exchange == AUTO else self._exchange

    def __call__(self) -> None:
        """Undo it."""
        self._installed.remove()

    def note(self) -> str:
        grid = self.streams.grid
        lengths = {
            name: (length, Segment(length).share(grid.size) * grid.size)
            for name, length in self.streams.lengths.items()
        }
        padded = [
            f"{name} from {length} to {size} tokens" for name, (length, size) in lengths.items() if size != length
        ]
        ranks = grid.ulysses.size
        padded += [f"{heads} heads to {-(-heads // ranks) * ranks}" for heads in sorted(self.heads) if heads % ranks]
        return f"padded {', '.join(padded)}" if padded else ""


@compat.dynamo.untraced
def _eagerly(block: nn.Module, _call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return compat.modules.eager_call(block)(*args, **kwargs)


def _cut(blocks: Blocks, name: str) -> Cut:
    cut = blocks.streams[name]
    assert isinstance(cut, Cut)
    return cut


def modules_of(module: nn.Module, blocks: Blocks) -> Iterator[nn.Module]:
    """Yield the blocks at a path: the items of a list, or one module."""
    inner = getattr(module, blocks.path, None)
    if isinstance(inner, nn.ModuleList):
        yield from inner
    elif isinstance(inner, nn.Module):
        yield inner
