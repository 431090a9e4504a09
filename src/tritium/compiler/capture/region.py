"""One compiled piece with its captures: a callable that replays instead of launching.

Captures are kept by set of weights. Each set has separate buckets, and evicts the least recently used one.
"""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from tritium.compiler import together
from tritium.compiler.capture.auto import UNDECIDED, Decision, Decisions
from tritium.compiler.capture.bucket import Spec, bucket_text, key_of
from tritium.compiler.capture.graph import Lane, lane_of
from tritium.compiler.capture.inputs import StaticInputs
from tritium.compiler.capture.outputs import StaticOutputs, Way, way_of
from tritium.compiler.capture.weights import Captured, Entry, WeightSet, WeightSets
from tritium.config import CompilationConfig
from tritium.device import is_capturing
from tritium.errors import CaptureRefused, brief
from tritium.report.records import Capture, Failure, GraphRecord

# Moves of weights in memory before their region is disabled. Each needs new captures; offloading moves on every call.
MOST_MOVES = 8

# Number of times an evicted bucket is captured again.
MOST_RETURNS = 2

CAPTURED_AROUND = "calls inside another capture", "the caller was already capturing the launches of this thread"

PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


class Region:
    """Replay captures of `run`, or call it."""

    def __init__(
        self,
        run: Callable[..., Sequence[Any]],
        spec: Spec,
        config: CompilationConfig,
        record: GraphRecord,
        decisions: Decisions | None = None,
    ) -> None:
        self._run = run
        self._spec, self._inputs, self._weights = spec, spec.inputs, list(spec.weights)
        self._config = config
        self._record = record
        self._decisions = decisions
        self._written = set(spec.written)
        self._sets = WeightSets(self._forget)
        # The lane of the arguments' device, known from the first call on.
        self._lane: Lane | None = None
        # The reason why this region is disabled, or None.
        self.off: str | None = None
        record.regions.append(weakref.ref(self))

    def __call__(self, *args: Any) -> Any:
        if self.off is not None:
            return self._run(*args)
        if is_capturing():
            if not any((row.bucket, row.declined) == CAPTURED_AROUND for row in self._record.captures):
                self._add_row(*CAPTURED_AROUND)
            return self._run(*args)
        try:
            lane, entry = self._find(args)
        except CaptureRefused as refusal:
            self.off = str(refusal)
            self.clear()
            self._add_row("every bucket", self.off)
            return self._run(*args)
        decision = entry.decision
        if decision is not None and not self._is_captured(entry, decision, lane, args):
            return decision.call(lane.device, lambda: self._run(*args))
        with lane.lock:
            # Another thread may have evicted it.
            if entry.captured is not None and self._is_ready(entry, entry.captured, lane, args):
                return self._replayed(entry, entry.captured, lane, args)
        return self._run(*args)

    def clear(self) -> None:
        """Free the memory of all captures; the next call of each bucket captures again."""
        if self._lane is not None:
            with self._lane.lock:
                self._sets.clear()

    def __len__(self) -> int:
        return sum(entry.captured is not None for weights in self.sets for entry in weights.entries.values())

    @property
    def sets(self) -> list[WeightSet]:
        """Every set of weights that this region was called with."""
        return list(self._sets)

    def _find(self, args: Sequence[Any]) -> tuple[Lane, Entry]:
        """Return the lane and the bucket of a call; raise `CaptureRefused` if no call of the region can be captured."""
        try:
            key = key_of(args, self._inputs)
            hash(key)
        except (TypeError, RuntimeError, NotImplementedError) as error:
            raise CaptureRefused(f"an input cannot be part of a key ({type(error).__name__}: {error})") from error
        if self._lane is None:
            devices = [arg.device for arg in args if isinstance(arg, torch.Tensor)]
            self._lane = lane_of(next((device for device in devices if device.type != "cpu"), torch.device("cpu")))
        lane = self._lane
        with lane.lock:
            try:
                weights = self._sets.find(list(args), self._weights)
            except (RuntimeError, NotImplementedError) as error:
                raise CaptureRefused(f"a weight has no address ({type(error).__name__}: {error})") from error
            if weights.moves > MOST_MOVES:
                raise CaptureRefused(
                    f"its weights moved in memory {weights.moves} times (are they offloaded between calls?)"
                )
            # All calls that are declined for the same reason share an entry.
            alias = self._aliased(args)
            entry = weights.entries.get(alias or key)
            if entry is None:
                entry = self._new_entry(weights, alias or key, args)
                if alias is not None:
                    entry.row.declined = alias
                if self._spec.has_collectives:
                    self._capture_on_all_ranks(entry, lane, args)
                elif entry.row.declined is None and self._decisions is not None:
                    entry.decision, entry.row.declined = self._decisions.of((self._spec.piece, key)), UNDECIDED
                elif entry.row.declined is None:
                    self._attempt(entry, functools.partial(self._capture, entry, lane, args))
            weights.entries.move_to_end(alias or key)
            return lane, entry

    def _new_entry(self, weights: WeightSet, key: Hashable, args: Sequence[Any]) -> Entry:
        while len(weights.entries) >= self._config.max_captures:
            oldest_key, oldest = weights.entries.popitem(last=False)
            weights.evictions[oldest_key] += 1
            self._drop(oldest)
        entry = Entry(self._add_row(bucket_text(args, self._inputs, self._spec.names)))
        weights.entries[key] = entry
        if weights.evictions[key] > MOST_RETURNS:
            entry.row.declined = f"made room {weights.evictions[key]} times: more buckets are in turn than max_captures"
        return entry

    def _add_row(self, bucket: str, declined: str | None = None) -> Capture:
        row = Capture(bucket, piece=self._spec.piece, declined=declined)
        self._record.captures.append(row)
        return row

    def _aliased(self, args: Sequence[Any]) -> str | None:
        """Return a reason if a written input shares memory: copies would not see each other's changes."""
        seen: dict[int, int] = {}
        tensors = [index for index, arg in enumerate(args) if isinstance(arg, torch.Tensor)] if self._written else []
        for index in tensors:
            other = seen.setdefault(args[index].untyped_storage().data_ptr(), index)
            both_weights = {index, other} <= set(self._weights)
            if other != index and not both_weights and {index, other} & self._written and args[index].numel():
                names = self._spec.names
                return f"{names[other]} and {names[index]} share memory that is written to"
        return None

    # --- capture ---

    def _is_captured(self, entry: Entry, decision: Decision, lane: Lane, args: Sequence[Any]) -> bool:
        """Capture a bucket if its timed calls justify it; return False if it has no graph."""
        with lane.lock:
            if entry.captured is None and entry.decision is not None:
                if decision.wants_capture():
                    entry.row.declined = None
                    self._attempt(entry, functools.partial(self._capture, entry, lane, args))
                    entry.decision = decision if entry.captured is not None else None
                elif decision.declined is not None:
                    entry.row.declined, entry.decision = decision.declined, None
            return entry.captured is not None

    def _capture_on_all_ranks(self, entry: Entry, lane: Lane, args: Sequence[Any]) -> None:
        """Capture if every rank can: warming up and capturing exchange more often than a call does."""
        try:
            self._check(args, lane.device)
        except CaptureRefused as refusal:
            entry.row.declined = entry.row.declined or str(refusal)
        if not together.all_ranks(entry.row.declined is None):
            entry.row.declined = entry.row.declined or together.OTHER_RANK
            return
        self._attempt(entry, functools.partial(self._capture, entry, lane, args))
        if not together.all_ranks(entry.captured is not None) and entry.captured is not None:
            self._retire(entry)
            entry.decline(together.OTHER_RANK)

    def _attempt(self, entry: Entry, capture: Callable[[], None]) -> None:
        """Capture; if that fails, report it and leave the bucket uncaptured."""
        try:
            capture()
        except CaptureRefused as refusal:
            entry.decline(str(refusal))
        except Exception as error:
            # An error of the call itself is raised again when it runs uncaptured; other ranks would wait for that.
            if self._spec.has_collectives:
                raise
            reason = brief(error)
            entry.decline(reason)
            self._record.failures.append(Failure(f"capture of {entry.row.bucket}", reason))
            warnings.warn(
                f"tritium: a call of {self._record.function} could not be captured and runs without: {reason}",
                RuntimeWarning,
                stacklevel=4,
            )

    def _capture(self, entry: Entry, lane: Lane, args: Sequence[Any]) -> None:
        self._check(args, lane.device)
        inputs = StaticInputs(args, self._weights, lane.buffers)
        before = lane.memory()
        inputs.fill(args)
        with lane.unchanged(inputs.generators, inputs.at(self._written)):
            results = lane.warm_up(lambda: self._run(*inputs.args))
            self._written |= inputs.changed(args)
            if (alias := self._aliased(args)) is not None:
                raise CaptureRefused(alias)
        inputs.write_back_to(self._written)
        # Pieces read each other's results, so replays must not overwrite them.
        is_safe = self._config.safe_output_mode or self._spec.piece is not None
        outputs = StaticOutputs(results, inputs.args, self._way(is_safe=is_safe))
        outputs = self._capture_graph(entry, lane, inputs, outputs)
        entry.row.bytes = inputs.bytes + max(outputs.bytes, lane.memory() - before)

    def _way(self, *, is_safe: bool) -> Way:
        """Return how results are returned: a rank that still holds one would capture again, and the others would not."""
        return "copy" if self._spec.has_collectives else way_of(is_safe=is_safe)

    def _check(self, args: Sequence[Any], device: torch.device) -> None:
        """Raise `CaptureRefused` for arguments that a capture would compute wrongly with."""
        for name, arg in zip(self._spec.names, args, strict=True):
            if not isinstance(arg, torch.Tensor):
                continue
            if type(arg) not in PLAIN:
                raise CaptureRefused(f"{name} is a {type(arg).__name__}, whose memory has no one address")
            if arg.layout is not torch.strided:
                raise CaptureRefused(f"{name} is {arg.layout}")
            if arg.device != device:
                raise CaptureRefused(f"{name} is on {arg.device}: its value would be baked into a graph on {device}")
            if arg.requires_grad and torch.is_grad_enabled():
                raise CaptureRefused(f"{name} needs gradients")

    def _capture_graph(self, entry: Entry, lane: Lane, inputs: StaticInputs, outputs: StaticOutputs) -> StaticOutputs:
        """Capture a bucket, given the outputs of an uncaptured run."""
        # An emulated graph runs these arguments again; the inputs drop their weights below.
        run, static, lent = self._run, list(inputs.args), outputs

        def run_and_keep() -> tuple[()]:
            lent.keep(run(*static))
            return ()

        with lane.unchanged(inputs.generators, inputs.at(self._written)):
            if outputs.way == "lend":
                outputs.own()
                graph, _ = lane.capture(run_and_keep, inputs.generators)
            else:
                arguments = static if outputs.way == "copy" else None
                graph, results = lane.capture(lambda: run(*static), inputs.generators, arguments)
                outputs = StaticOutputs(results, static, outputs.way)
                # The counts of references below must be those of the outputs alone.
                del results
        inputs.leave_weights()
        entry.captured = Captured(inputs, graph, outputs)
        entry.row.copies = outputs.way == "copy"
        outputs.settle()
        return outputs

    def _capture_again(self, entry: Entry, lane: Lane, inputs: StaticInputs, args: Sequence[Any]) -> None:
        inputs.take_weights(args)
        # Warm up again: libraries create handles per thread, which fails in a capture, and this may be another thread.
        with lane.unchanged(inputs.generators, inputs.at(self._written)):
            results = lane.warm_up(lambda: self._run(*inputs.args))
        self._capture_graph(entry, lane, inputs, StaticOutputs(results, inputs.args, "copy"))

    # --- replay ---

    def _is_ready(self, entry: Entry, captured: Captured, lane: Lane, args: Sequence[Any]) -> bool:
        """Capture again if the last result is still referenced; return False if that fails."""
        lane.order()
        if captured.outputs.held():
            # The caller keeps that memory; from now on results are copied.
            entry.captured = None
            self._attempt(entry, functools.partial(self._capture_again, entry, lane, captured.inputs, args))
        return entry.captured is not None

    def _replayed(self, entry: Entry, captured: Captured, lane: Lane, args: Sequence[Any]) -> Any:
        """Replay a bucket; under graphs="auto", time replays until the decision is final."""
        entry.row.hits += 1
        decision = entry.decision
        if decision is None:
            return captured.replay(args)
        result = decision.replay(lane.device, functools.partial(captured.replay, args))
        if decision.is_settled:
            entry.decision = None
        if decision.declined is not None:
            self._retire(entry)
            entry.decline(decision.declined)
        return result

    # --- forget ---

    def _forget(self, weights: WeightSet) -> None:
        for entry in weights.entries.values():
            self._drop(entry)

    def _drop(self, entry: Entry) -> None:
        self._retire(entry)
        # Compare by identity: two blocks may have equal rows.
        self._record.captures[:] = [row for row in self._record.captures if row is not entry.row]

    def _retire(self, entry: Entry) -> None:
        captured, entry.captured = entry.captured, None
        if captured is not None and self._lane is not None:
            self._lane.retire(captured)
