"""One compiled piece with its captures: a callable that replays instead of launching.

Captures are kept by set of weights. Each set has separate buckets, and evicts the least recently used one.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from tritium.compiler.capture.graph import Lane, is_recording, lane_of, unchanged
from tritium.compiler.capture.idle import UNDECIDED, Decision, Decisions
from tritium.compiler.capture.inputs import StaticInputs
from tritium.compiler.capture.key import bucket_text, key_of
from tritium.compiler.capture.outputs import StaticOutputs
from tritium.compiler.capture.spec import Spec
from tritium.compiler.capture.weights import Entry, WeightSet, WeightSets
from tritium.config import CompilationConfig
from tritium.errors import CaptureRefused
from tritium.report import Capture, Failure, GraphRecord

# Moves of weights in memory before their region is disabled. Each needs new captures; offloading moves on every call.
MOST_MOVES = 8

# Number of times an evicted bucket is captured again.
MOST_RETURNS = 2

RECORDED_ELSEWHERE = "somebody else was recording what this thread does"

PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


class Region:
    """Replay captures of `run`, or call it."""

    def __init__(
        self,
        run: Callable[..., Any],
        spec: Spec,
        config: CompilationConfig,
        record: GraphRecord,
        decisions: Decisions | None = None,
    ) -> None:
        self._run = run
        self._spec = spec
        self._inputs = spec.inputs
        self._weight_list = list(spec.weights)
        self._config = config
        self._record = record
        self._decisions = decisions
        self._written = set(spec.written)
        self._sets = WeightSets(self._forget)
        self._device: torch.device | None = None
        # The reason why this region is disabled, or None.
        self.off: str | None = None
        record.regions.append(weakref.ref(self))

    def __call__(self, *args: Any) -> Any:
        if self.off is not None:
            return self._run(*args)
        if is_recording():
            self._tell_of_other_recording()
            return self._run(*args)
        entry = self._find(args)
        if entry is None:
            return self._run(*args)
        lane = lane_of(self._device_of(args))
        if entry.graph is None:
            decision = entry.decision
            if decision is None:
                return self._run(*args)
            if not self._is_captured(entry, decision, lane, args):
                return decision.call(lane, lambda: self._run(*args))
        with lane.lock:
            if self._is_ready(entry, lane):
                return self._replayed(entry, lane, args)
        return self._run(*args)

    def clear(self) -> None:
        """Free the memory of all captures; the next call of each bucket captures again."""
        if self._device is None:
            return
        with lane_of(self._device).lock:
            self._sets.clear()

    def __len__(self) -> int:
        return sum(entry.graph is not None for weights in self.sets for entry in weights.entries.values())

    @property
    def sets(self) -> list[WeightSet]:
        """Every set of weights that this region was called with."""
        return list(self._sets)

    def _find(self, args: Sequence[Any]) -> Entry | None:
        if len(args) != len(self._spec.names):
            self._spec = self._spec.first(len(args))
            self._inputs, self._weight_list = self._spec.inputs, list(self._spec.weights)
        try:
            key = key_of(args, self._inputs)
            hash(key)
            lane = lane_of(self._device_of(args))
        except CaptureRefused as refusal:
            self._turn_off(str(refusal))
            return None
        except (TypeError, RuntimeError, NotImplementedError) as error:
            self._turn_off(f"an input cannot be part of a key ({type(error).__name__}: {error})")
            return None
        with lane.lock:
            try:
                weights = self._sets.find(list(args), self._weight_list)
            except (RuntimeError, NotImplementedError) as error:
                self._turn_off(f"a weight has no address ({type(error).__name__}: {error})")
                return None
            if weights.moves > MOST_MOVES:
                self._turn_off(f"its weights moved in memory {weights.moves} times (are they offloaded between calls?)")
                return None
            if self._written and (alias := self._aliased(args)) is not None:
                return self._declined_once(weights, args, alias)
            entry = weights.entries.get(key)
            if entry is None:
                entry = self._make(weights, key, args)
            weights.entries.move_to_end(key)
            return entry

    def _device_of(self, args: Sequence[Any]) -> torch.device:
        if self._device is None:
            devices = [arg.device for arg in args if isinstance(arg, torch.Tensor)]
            self._device = next((device for device in devices if device.type != "cpu"), torch.device("cpu"))
        return self._device

    def _forget(self, weights: WeightSet) -> None:
        for entry in weights.entries.values():
            self._drop(entry)

    def _aliased(self, args: Sequence[Any]) -> str | None:
        """Return a reason if a written input shares memory: copies would not see each other's changes."""
        seen: dict[int, int] = {}
        tensors = [index for index, arg in enumerate(args) if isinstance(arg, torch.Tensor)]
        for index in tensors:
            other = seen.setdefault(args[index].untyped_storage().data_ptr(), index)
            both_weights = {index, other} <= set(self._spec.weights)
            if other != index and not both_weights and {index, other} & self._written and args[index].numel():
                names = self._spec.names
                return f"{names[other]} and {names[index]} share memory that is written to"
        return None

    def _make(self, weights: WeightSet, key: Hashable, args: Sequence[Any]) -> Entry:
        row = Capture(bucket_text(args, self._inputs, self._spec.names), piece=self._spec.piece)
        entry = Entry(row)
        self._make_room(weights)
        weights.entries[key] = entry
        self._record.captures.append(row)
        if weights.evictions[key] > MOST_RETURNS:
            row.declined = f"made room {weights.evictions[key]} times: more buckets are in turn than max_captures"
            return entry
        if self._decisions is not None:
            entry.decision, row.declined = self._decisions.of((self._spec.piece, key)), UNDECIDED
            return entry
        self._attempt(entry, lambda: self._capture(entry, args))
        return entry

    def _is_captured(self, entry: Entry, decision: Decision, lane: Lane, args: Sequence[Any]) -> bool:
        """Capture a bucket if its timed calls justify it; return False if it has no graph."""
        with lane.lock:
            if entry.graph is None and entry.decision is not None:
                if decision.wants_capture():
                    entry.row.declined = None
                    self._attempt(entry, lambda: self._capture(entry, args))
                    entry.decision = decision if entry.graph is not None else None
                elif decision.declined is not None:
                    entry.row.declined, entry.decision = decision.declined, None
            return entry.graph is not None

    def _replayed(self, entry: Entry, lane: Lane, args: Sequence[Any]) -> Any:
        """Replay a bucket; under graphs="auto", time replays until the decision is final."""
        decision = entry.decision
        if decision is None:
            return self._replay(entry, args)
        result = decision.replay(lane, lambda: self._replay(entry, args))
        if decision.is_settled:
            entry.decision = None
        if decision.declined is not None:
            self._retire(entry)
            self._give_up(entry, decision.declined)
        return result

    def _attempt(self, entry: Entry, record: Callable[[], None]) -> None:
        """Capture; if that fails, report it and leave the bucket uncaptured."""
        try:
            record()
        except CaptureRefused as refusal:
            self._give_up(entry, str(refusal))
        except Exception as error:  # noqa: BLE001 - an error of the call itself is raised again when it runs uncaptured
            reason = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
            self._give_up(entry, reason)
            self._record.failures.append(Failure(f"capture of {entry.row.bucket}", reason))
            warnings.warn(
                f"tritium: a call of {self._record.function} could not be captured and runs without: {reason}",
                RuntimeWarning,
                stacklevel=4,
            )

    def _check(self, args: Sequence[Any]) -> None:
        """Raise `CaptureRefused` for arguments that a capture would compute wrongly with."""
        device = self._device_of(args)
        for index, arg in enumerate(args):
            name = self._spec.names[index]
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

    def _capture(self, entry: Entry, args: Sequence[Any]) -> None:
        self._check(args)
        device = self._device_of(args)
        lane = lane_of(device)
        inputs = StaticInputs(args, self._spec.weights, lane.buffers)
        before = lane.memory()
        with unchanged(device, inputs.generators, self._written_weights(inputs)):
            inputs.fill(args)
            result = lane.warm_up(lambda: self._run(*inputs.args))
            self._written |= inputs.changed(args)
            if self._written and (alias := self._aliased(args)) is not None:
                raise CaptureRefused(alias)
        inputs.write_back_to(self._written)
        entry.inputs = inputs
        # Pieces read each other's results, so replays must not overwrite them.
        is_safe = self._config.safe_output_mode or self._spec.piece is not None
        self._record_graph(entry, lane, StaticOutputs(result, inputs.args, "lend" if is_safe else "expose"))
        assert entry.outputs is not None
        entry.row.bytes = inputs.bytes + max(entry.outputs.bytes, lane.memory() - before)

    def _written_weights(self, inputs: StaticInputs) -> list[torch.Tensor]:
        return [inputs.args[index] for index in self._spec.weights if index in self._written]

    def _record_graph(self, entry: Entry, lane: Lane, outputs: StaticOutputs) -> None:
        """Capture a bucket, given the outputs of an uncaptured run."""
        inputs = entry.inputs
        assert inputs is not None
        assert self._device is not None
        run, static = self._run, inputs.args
        with unchanged(self._device, inputs.generators, self._written_weights(inputs)):
            if outputs.way == "lend":
                outputs.own()
                graph, _ = lane.record(lambda: outputs.keep(run(*static)), inputs.generators)
            else:
                graph, result = lane.record(lambda: run(*static), inputs.generators)
                outputs = StaticOutputs(result, static, outputs.way)
                del result
        entry.outputs, entry.graph = outputs, graph
        entry.row.copies = outputs.way == "copy"
        outputs.settle()

    def _record_again(self, entry: Entry, lane: Lane) -> None:
        inputs = entry.inputs
        assert inputs is not None
        assert self._device is not None
        static = inputs.args
        written = [static[index] for index in sorted(self._written) if isinstance(static[index], torch.Tensor)]
        # Warm up again: libraries create handles per thread, which fails in a capture, and this may be another thread.
        with unchanged(self._device, inputs.generators, written):
            result = lane.warm_up(lambda: self._run(*static))
        self._record_graph(entry, lane, StaticOutputs(result, static, "copy"))

    def _is_ready(self, entry: Entry, lane: Lane) -> bool:
        """Return True if a bucket can be replayed; capture it again if its last result is still referenced."""
        # Another thread may have evicted it.
        if entry.outputs is None:
            return False
        lane.order()
        if entry.outputs.held():
            # The caller keeps that memory; from now on results are copied.
            entry.outputs = entry.graph = None
            self._attempt(entry, lambda: self._record_again(entry, lane))
        return entry.graph is not None

    def _replay(self, entry: Entry, args: Sequence[Any]) -> Any:
        assert entry.inputs is not None
        assert entry.graph is not None
        assert entry.outputs is not None
        entry.inputs.fill(args)
        entry.graph.replay()
        entry.inputs.write_back(args)
        entry.row.hits += 1
        return entry.outputs.hand_out(args)

    def _make_room(self, weights: WeightSet) -> None:
        while len(weights.entries) >= self._config.max_captures:
            key, oldest = weights.entries.popitem(last=False)
            weights.evictions[key] += 1
            self._drop(oldest)

    def _retire(self, entry: Entry) -> None:
        held = (entry.graph, entry.outputs, entry.inputs)
        entry.graph = entry.outputs = entry.inputs = None
        if self._device is not None and held[0] is not None:
            lane_of(self._device).retire(held)

    def _drop(self, entry: Entry) -> None:
        self._retire(entry)
        # Compare by identity: two blocks may have equal rows.
        self._record.captures[:] = [row for row in self._record.captures if row is not entry.row]

    def _give_up(self, entry: Entry, reason: str) -> None:
        entry.graph = entry.outputs = entry.inputs = None
        entry.row.declined, entry.row.bytes = reason, 0

    def _declined_once(self, weights: WeightSet, args: Sequence[Any], reason: str) -> Entry:
        """Return an uncaptured bucket; all calls with the same reason share it and its row."""
        entry = weights.entries.get(reason)
        if entry is None:
            self._make_room(weights)
            entry = Entry(Capture(bucket_text(args, self._inputs, self._spec.names), piece=self._spec.piece))
            entry.row.declined = reason
            weights.entries[reason] = entry
            self._record.captures.append(entry.row)
        return entry

    def _tell_of_other_recording(self) -> None:
        """Report once that an enclosing capture includes calls of this region."""
        if not any(row.declined == RECORDED_ELSEWHERE for row in self._record.captures):
            row = Capture("calls inside of another recording", piece=self._spec.piece, declined=RECORDED_ELSEWHERE)
            self._record.captures.append(row)

    def _turn_off(self, reason: str) -> None:
        self.off = reason
        self._sets.clear()
        self._record.captures.append(Capture("every bucket", piece=self._spec.piece, declined=reason))
