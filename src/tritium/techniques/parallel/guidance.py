"""Share the branches of guidance between ranks, for pipelines that were not written for it.

A pipeline guides in one of two ways. It calls the denoiser once for each branch of a step; then each rank computes some
of the calls, and returns pending tensors for the others until the last call of the step, in which the ranks exchange.
Or it makes one call with all branches in one batch; then each rank computes some rows.

The calls of a step are learned in the first step, in which all ranks compute everything. Ranks run the same program, so
all decide alike, and a pending tensor is read at the same place on all of them.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from tritium import compat, device
from tritium.errors import PipelineError
from tritium.techniques.parallel import ranks
from tritium.techniques.parallel.mesh import Axis
from tritium.techniques.skip.clock import Clock, Moment
from tritium.techniques.skip.gate import signature_of
from tritium.techniques.skip.history import Structure
from tritium.techniques.technique import Part

# The largest relative error of a batch in parts against the whole batch: kernels for other sizes sum in other orders.
_BATCH_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}
_HALF_TOLERANCE = 5e-2


def apply(part: Part, axis: Axis) -> Guidance:
    """Share a part's calls between the ranks of an axis; return the function that undoes it."""
    guidance = Guidance(part, axis)
    part.around(guidance.outside, outside=True)
    part.around(guidance.inside)
    guidance.watch_contexts()
    if (others := ranks.control()) is not None:
        others.watch(guidance)
    return guidance


@dataclass(frozen=True)
class _Form:
    """The form of a tensor, without its memory: a captured call lends its results."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def empty(self) -> torch.Tensor:
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=self.device)


@dataclass(eq=False)
class Branch:
    """One call of a step: its output is computed on one rank, and pending until the ranks exchange."""

    name: str
    # The rank that computes it, on the axis.
    owner: int
    structure: Structure
    read_early: Callable[[Branch, str], None]
    settle: Callable[[], None]
    is_kept: bool = False
    tensors: list[torch.Tensor] = field(default_factory=list)
    # Called once the tensors have values.
    then: list[Callable[[], None]] = field(default_factory=list)

    def read(self, operator: str) -> None:
        self.read_early(self, operator)

    def output(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Return the output with pending tensors, which get their values in these buffers."""
        self.tensors = list(tensors)
        left = iter(self.tensors)
        leaves = [
            compat.pending.Pending(next(left), self) if isinstance(leaf, _Form) else leaf
            for leaf in self.structure.leaves
        ]
        return self.structure.rebuild(leaves)


@dataclass
class _Step:
    """The calls of one step so far."""

    image: Any = None
    index: int = -1
    names: list[str] = field(default_factory=list)


class Guidance:
    """Shares the calls of one part between the ranks of an axis."""

    def __init__(self, part: Part, axis: Axis) -> None:
        self.axis = axis
        self._part = part
        self._clock = Clock(lambda: part.schedulers)
        self._context: str | None = None
        self._step = _Step()
        # The names of the calls of a step, or None before a step was complete.
        self.pattern: tuple[str, ...] | None = None
        # Whether this image had a step with these calls, and whether it had steps with others.
        self._is_confirmed = self._is_irregular = False
        # The form of the output, by call and the form of its arguments.
        self._structures: dict[tuple[str, Any], Structure] = {}
        # Outputs that the ranks have not exchanged, and the branch of the current call.
        self._open: list[Branch] = []
        self._branch: Branch | None = None
        # Batches that were compared in parts and whole: None if they agree, or else the reason.
        self._batches: dict[Any, str | None] = {}
        self._shares_batch = False
        # Calls that this rank computed, and those that it left to others.
        self.computed = self.left = 0
        # Why calls are not shared, each said once.
        self.declined: dict[str, None] = {}

    def watch_contexts(self) -> None:
        """Note the names in `cache_context`, by which diffusers' pipelines tell branches."""
        module: Any = self._part.module
        inner = getattr(module, "cache_context", None)
        if inner is None:
            return

        @contextlib.contextmanager
        def cache_context(name: str, **fields: Any) -> Iterator[None]:
            self._context = name
            try:
                with inner(name, **fields):
                    yield
            finally:
                self._context = None

        module.__dict__["cache_context"] = cache_context

    def __call__(self) -> None:
        """Undo it."""
        self._part.module.__dict__.pop("cache_context", None)

    def note(self) -> str:
        words = f"this rank computed {self.computed} calls of guidance and left {self.left} to others"
        return "; ".join([words, *self.declined])

    # --- around the other techniques ---

    def outside(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Follow the calls of a step, and exchange after the last one."""
        if compat.dynamo.is_compiling() or device.is_capturing():
            return call(*args, **kwargs)
        moment = self._clock.now()
        if isinstance(moment, str):
            self._settle()
            self.declined.setdefault(moment)
            return call(*args, **kwargs)
        try:
            return self._at(moment, call, args, kwargs)
        except BaseException:
            self._clock.back()
            self._forget()
            raise
        finally:
            self._branch, self._shares_batch = None, False

    def _at(self, moment: Moment, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if (self._step.image, self._step.index) != (moment.image, moment.step):
            self._begin(moment)
        place = len(self._step.names)
        name = self._name()
        self._step.names.append(name)
        key = (name, signature_of(args, kwargs))
        structure = self._structures.get(key)
        if self.pattern is None or self.pattern[place : place + 1] != (name,) or structure is None:
            # An unknown call: learn the calls of a step again.
            self.pattern = None
            self._is_irregular |= self._is_confirmed
            self._settle()
            output = call(*args, **kwargs)
            self._structures[key] = _structure_of(output)
            return output
        if len(self.pattern) == 1:
            self._shares_batch = True
            return call(*args, **kwargs)
        self._branch = Branch(name, place % self.axis.size, structure, self._read_early, self._settle)
        output = call(*args, **kwargs)
        if place == len(self.pattern) - 1:
            self._settle()
        return output if compat.pending.promise_of(output) else compat.pending.with_values(output)

    def _name(self) -> str:
        """Return the name of a call: that of its context and its number among those of the same name."""
        name = self._context or "call"
        return f"{name} {number}" if (number := sum(one.startswith(name) for one in self._step.names)) else name

    def _begin(self, moment: Moment) -> None:
        """Begin a step: what the last one left open belongs to an image that was aborted, or was never read."""
        self._open.clear()
        last, names = self._step, tuple(self._step.names)
        self._step = _Step(moment.image, moment.step)
        if last.image is not moment.image:
            # Its first step may have other calls than the last image, whose last step may lack some.
            self._is_confirmed = self._is_irregular = False
            self.pattern = self.pattern or names or None
            return
        self._is_irregular |= self.pattern not in (None, names)
        self._is_confirmed, self.pattern = True, names

    # --- around the program ---

    def inside(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compute the call, a share of its batch, or nothing if it is another rank's."""
        branch = self._branch
        if branch is None:
            self.computed += 1
            return self._in_shares(call, args, kwargs) if self._shares_batch else call(*args, **kwargs)
        self._open.append(branch)
        if branch.owner != self.axis.rank:
            self.left += 1
            return branch.output([leaf.empty() for leaf in branch.structure.leaves if isinstance(leaf, _Form)])
        self.computed += 1
        structure = Structure(call(*args, **kwargs))
        if structure.key != branch.structure.key:
            raise PipelineError(
                f"{self._part.name} returned another form of output for the branch {branch.name!r} than in earlier steps, "
                "and the other ranks expect that one; run it with Parallel(cfg=1)"
            )
        return branch.output([leaf for leaf in structure.leaves if isinstance(leaf, torch.Tensor)])

    # --- exchange ---

    def _read_early(self, branch: Branch, operator: str) -> None:
        """Exchange because an operator reads a pending branch, or raise if its partner call is still to come."""
        # The step may have no such call: that of an image without guidance, or one outside of a guidance interval.
        if not self._is_confirmed or self._is_irregular or self._is_in_step_of_scheduler():
            self._settle()
            return
        assert self.pattern is not None
        waits_for = self.pattern[-1]
        raise PipelineError(
            f"{operator} reads the branch {branch.name!r} of {self._part.name} before the branch {waits_for!r} ran, so the "
            "ranks cannot share them; run this pipeline with Parallel(cfg=1)"
        )

    def _is_in_step_of_scheduler(self) -> bool:
        schedulers = self._part.schedulers
        frame = inspect.currentframe()
        while frame is not None:
            frame = frame.f_back
            if (
                frame is not None
                and frame.f_code.co_name == "step"
                and any(frame.f_locals.get("self") is one for one in schedulers)
            ):
                return True
        return False

    def _settle(self) -> None:
        """Send what each rank computed to the others."""
        pending, self._open = self._open, []
        with torch.no_grad():
            for branch in pending:
                for tensor in branch.tensors:
                    broadcast(tensor, branch.owner, self.axis)
                branch.is_kept = True
        for branch in pending:
            for function in branch.then:
                function()
            branch.then.clear()

    def after_failure(self, *, renewed: bool) -> None:
        """Learn the calls again: the ranks stopped at different ones."""
        del renewed
        self._forget()

    def _forget(self) -> None:
        self._open.clear()
        self.pattern = None
        self._step = _Step()

    # --- one call with all branches in a batch ---

    def _in_shares(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        batch = _batch_of(args, kwargs)
        if batch < 2:
            return call(*args, **kwargs)
        key = signature_of(args, kwargs)
        if self._batches.get(key) is not None:
            return call(*args, **kwargs)
        counts = [len(rows) for rows in _shares(batch, self.axis.size)]
        # A rank without rows computes the last one again.
        first = min(sum(counts[: self.axis.rank]), batch - 1)
        rows = slice(first, first + max(1, counts[self.axis.rank]))
        structure = Structure(call(*_rows(args, rows, batch), **_rows(kwargs, rows, batch)))
        tensors = [leaf for leaf in structure.leaves if isinstance(leaf, torch.Tensor)]
        has_rows = all(leaf.dim() and len(leaf) == rows.stop - rows.start for leaf in tensors)
        output = structure.rebuild([self._joined(leaf, counts) for leaf in structure.leaves]) if has_rows else None
        if key in self._batches:
            return output
        # Compare once: an argument may have as many rows as the batch by chance.
        whole = call(*args, **kwargs)
        self._batches[key] = why = self._difference(output, whole)
        if why is not None:
            self.declined.setdefault(why)
        return whole

    def _joined(self, leaf: Any, counts: Sequence[int]) -> Any:
        """Return a tensor of the rows of all ranks."""
        if not isinstance(leaf, torch.Tensor):
            return leaf
        joined = leaf.new_empty((sum(counts), *leaf.shape[1:]))
        with torch.no_grad():
            for rank, rows in enumerate(joined.split(list(counts))):
                if rank == self.axis.rank:
                    rows.copy_(leaf[: len(rows)])
                if len(rows):
                    broadcast(rows, rank, self.axis)
        return joined

    def _difference(self, output: Any, whole: Any) -> str | None:
        """Return why a batch in parts is not the whole batch, or None; the first rank decides."""
        pairs = list(zip(compat.tensors.leaves_of(output), compat.tensors.leaves_of(whole), strict=False))
        tensors = [(part, full) for part, full in pairs if isinstance(full, torch.Tensor)]
        if output is None or any(part.shape != full.shape for part, full in tensors):
            return "its output has no row for each sample of the batch, so its batch is not shared"
        for part, full in tensors:
            error = ((part - full).abs().max() / full.abs().max().clamp_min(1e-30)).float()
            broadcast(error, 0, self.axis)
            if not error <= _BATCH_TOLERANCE.get(full.dtype, _HALF_TOLERANCE):
                return f"its batch in parts differs from the whole batch by {float(error):.1g}, so it is not shared"
        return None


def _structure_of(output: Any) -> Structure:
    """Return the structure of an output with the forms of its tensors."""
    structure = Structure(output)
    structure.leaves = [
        _Form(tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.device) if isinstance(leaf, torch.Tensor) else leaf
        for leaf in structure.leaves
    ]
    return structure


def broadcast(tensor: torch.Tensor, owner: int, axis: Axis) -> None:
    """Copy a tensor from one rank of an axis into those of the others."""
    flat = tensor if tensor.is_contiguous() else tensor.contiguous()
    dist.broadcast(flat, dist.get_global_rank(axis.group, owner), group=axis.group)
    if flat is not tensor and axis.rank != owner:
        tensor.copy_(flat)


def _shares(batch: int, ranks: int) -> list[range]:
    """Return the rows of each rank.

    >>> _shares(3, 2)
    [range(0, 2), range(2, 3)]
    """
    ends = [-(-batch * (rank + 1) // ranks) for rank in range(ranks)]
    return [range(first, end) for first, end in itertools.pairwise([0, *ends])]


def _batch_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Return the batch of a call: the rows of its first tensor, or the length of its first list."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor) and value.dim() > 1:
            return len(value)
        if isinstance(value, list):
            return len(value)
    return 1


def _rows(value: Any, rows: slice, batch: int) -> Any:
    """Return arguments in which tensors and lists of one row for each sample keep only some rows."""
    if isinstance(value, dict):
        return {key: _rows(inner, rows, batch) for key, inner in value.items()}
    if isinstance(value, tuple):
        return tuple(_rows(inner, rows, batch) for inner in value)
    if (isinstance(value, torch.Tensor) and value.dim() and len(value) == batch) or (
        isinstance(value, list) and len(value) == batch
    ):
        return value[rows]
    return value
