"""The gate at the denoiser's entry: it runs a call, or returns a forecast in its place."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from tritium import compat, device
from tritium.errors import PipelineError
from tritium.techniques.skip import table
from tritium.techniques.skip.adaptive import Steady
from tritium.techniques.skip.clock import Clock, HostCopy, Moment
from tritium.techniques.skip.config import Skip
from tritium.techniques.skip.history import History, Structure
from tritium.techniques.skip.ranges import Kept, Ranges
from tritium.techniques.skip.record import ImageRecord
from tritium.techniques.skip.table import ATTENTION, BLOCKS, DERIVE, FORECASTS, RUN, Track

# Largest difference of a sigma to the one that a table was searched for.
_SIGMA_TOLERANCE = 1e-4

# Denoisers that run every step for now. It outlives a switch of a part to another way of running.
OFF: weakref.WeakSet[nn.Module] = weakref.WeakSet()


@dataclass
class _Progress:
    """An image in progress: what was computed, and what its calls looked like."""

    # As in `Moment`.
    image: Any
    record: ImageRecord
    rows: tuple[str, ...] | None
    track: Track = field(default_factory=Track)
    histories: dict[int, History] = field(default_factory=dict)
    signatures: dict[int, Any] = field(default_factory=dict)
    # The abscissae of the steps on their way to the host, and there.
    coming: HostCopy | None = None
    xs: list[float] | None = None
    steady: Steady | None = None
    # What blocks changed, and what their attention returned.
    kept: Kept = field(default_factory=Kept)
    # The step of the last call, and the branches of the step before it and of that step.
    step: int = 0
    branches: tuple[int, int] = (0, 0)


class Gate:
    """Runs, forecasts or derives each call of a part as the plan says."""

    def __init__(self, module: nn.Module, config: Skip, clock: Clock, blocks: int, ranges: Ranges | None) -> None:
        self.config, self.clock, self.ranges = config, clock, ranges
        self._module, self.blocks = module, blocks
        self.images = 0
        self.last: ImageRecord | None = None
        # Why images run every step, each said once.
        self.declined: dict[str, None] = {}
        self._progress: list[tuple[Any, _Progress]] = []
        # The promise of the last output, if another rank computes it.
        self._waits_for: Any = None

    @property
    def is_off(self) -> bool:
        return self._module in OFF

    @property
    def bytes(self) -> int:
        """Return the memory of the kept outputs and changes."""
        images = [progress for _, progress in self._progress]
        outputs = sum(history.bytes for progress in images for history in progress.histories.values())
        return outputs + sum(progress.kept.bytes for progress in images)

    def __call__(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # A graph that is traced or captured around the part would keep the decision of one step.
        if self.is_off or compat.dynamo.is_compiling() or device.is_capturing():
            return call(*args, **kwargs)
        moment = self.clock.now()
        if isinstance(moment, str):
            self._decline(moment)
            return call(*args, **kwargs)
        try:
            return self._at(moment, call, args, kwargs)
        except BaseException:
            self.clock.back()
            raise

    def _at(self, moment: Moment, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        progress = self._begun(moment)
        if progress.rows is None and progress.steady is None:
            progress.record.add(moment.step, moment.branch, RUN)
            return call(*args, **kwargs)
        signature = signature_of(args, kwargs)
        letter, why = self._letter(progress, moment, signature, args, kwargs)
        if letter in FORECASTS or letter == DERIVE:
            output = self._replaced(progress, moment, letter)
            progress.record.add(moment.step, moment.branch, letter, why)
            return output
        if self.ranges is not None:
            self.ranges.begin(progress.kept, moment.branch, letter)
        try:
            output = call(*args, **kwargs)
        finally:
            if self.ranges is not None:
                self.ranges.end()
        if letter == RUN:
            self._waits_for = compat.pending.promise_of(output)
            compat.pending.when_kept(output, lambda output: self._keep(progress, moment, output, signature))
        progress.record.add(moment.step, moment.branch, letter, why)
        return output

    # --- which action ---

    def _letter(
        self, progress: _Progress, moment: Moment, signature: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[str, str | None]:
        """Return the action of a call, and why it runs in spite of the plan."""
        if progress.steady is not None:
            wanted = progress.steady.letter(moment.step, moment.steps, moment.branch, args, kwargs)
        else:
            assert progress.rows is not None
            wanted = table.row_of(progress.rows, moment.branch)[moment.step]
        if wanted == RUN:
            return RUN, None
        if wanted == DERIVE and self._waits_for is not None:
            self._waits_for.settle()
        why = progress.track.why_run(wanted, moment.step, moment.branch)
        if why is None and progress.signatures.get(moment.branch) != signature:
            why = "its arguments have other shapes than before"
        if why is None and wanted == DERIVE:
            histories = progress.histories
            if not histories[moment.branch].can_derive(histories[0]):
                why = "the branches have outputs of different shapes"
        if why is None and wanted in (BLOCKS, ATTENTION):
            assert self.ranges is not None
            why = self.ranges.why_run(progress.kept, moment.branch, wanted)
        if why is None:
            why = self._why_other_levels(progress)
        if why is None and wanted in FORECASTS and self._has_equal_places(progress, moment, int(wanted)):
            why = "two steps have one noise level"
        return (wanted, None) if why is None else (RUN, why)

    def _why_other_levels(self, progress: _Progress) -> str | None:
        """Return why the noise levels of this image rule out the plan, or None; reads them once."""
        if progress.coming is None:
            return progress.record.declined or None
        progress.xs, progress.coming = progress.coming.read(), None
        expected = self.config.sigmas
        pairs = zip(progress.xs, expected, strict=False)
        if any(abs(found - wanted) > _SIGMA_TOLERANCE for found, wanted in pairs):
            progress.record.declined = self._decline("its sigmas are others than those the table was searched for")
            # Later steps run without asking.
            progress.rows = None
            return progress.record.declined
        return None

    def _has_equal_places(self, progress: _Progress, moment: Moment, order: int) -> bool:
        steps = [*progress.histories[moment.branch].steps[-(order + 1) :], moment.step]
        xs = [self._place(progress, step) for step in steps]
        return any(abs(a - b) < 1e-9 for a, b in itertools.pairwise(xs))

    def _place(self, progress: _Progress, step: int) -> float:
        """Return the abscissa of a step."""
        return float(step) if self.config.over == "index" or progress.xs is None else progress.xs[step]

    # --- images ---

    def _begun(self, moment: Moment) -> _Progress:
        """Return the image that a call belongs to; begin a new one with its first call."""
        known = next((progress for scheduler, progress in self._progress if scheduler is moment.scheduler), None)
        if known is not None and known.image is moment.image:
            if moment.step != known.step:
                before, current = known.branches
                known.step, known.branches = moment.step, (current, 0)
                if before and before != current:
                    # Guidance was switched on or off: the branches may have changed places.
                    self._forget(known)
            known.branches = (known.branches[0], moment.branch + 1)
            return known
        progress = self._new(moment)
        if known is not None:
            # Use the buffers again.
            progress.histories, progress.kept = known.histories, known.kept
        self._forget(progress)
        # Keep one image for each scheduler that is in use.
        others = [pair for pair in self._progress if pair[1] is not known][-3:]
        self._progress = [*others, (moment.scheduler, progress)]
        self.images += 1
        self.last = progress.record
        return progress

    def _new(self, moment: Moment) -> _Progress:
        config = self.config
        rows = None if config.adaptive is not None else config.expanded(moment.steps)
        declined = ""
        name = type(moment.scheduler).__name__
        if config.adaptive is None and rows is None:
            declined = f"no plan for {moment.steps} steps: its table has {table.length_of(config.rows[0])}"
        elif config.scheduler is not None and moment.scheduler is not None and name != config.scheduler:
            declined = f"no plan for {name}: its table was searched for {config.scheduler}"
        if declined:
            rows = None
            self._decline(declined)
        replaced = config.left_out(self.blocks)
        record = ImageRecord(moment.steps, moment.step, self.blocks, replaced, rows, declined)
        progress = _Progress(moment.image, record, rows, step=moment.step, branches=(0, 1))
        if config.adaptive is not None and not declined:
            progress.steady = Steady(config.adaptive, config.order, config.longest)
        if moment.scheduler is not None and not declined and (config.over == "sigma" or config.sigmas):
            progress.coming = HostCopy(compat.diffusers.abscissae_of(moment.scheduler))
        return progress

    def _forget(self, progress: _Progress) -> None:
        progress.track = Track()
        for history in progress.histories.values():
            history.clear()
        progress.kept.clear()

    def _decline(self, reason: str) -> str:
        """Record why an image runs every step, or raise if the user wants an error."""
        if self.config.on_other == "error":
            raise PipelineError(
                f"skip was asked for with on_other='error', and {reason}; use on_other='run' to run every step"
            )
        self.declined.setdefault(reason)
        return reason

    # --- outputs ---

    def _replaced(self, progress: _Progress, moment: Moment, letter: str) -> Any:
        history = progress.histories[moment.branch]
        with torch.no_grad():
            if letter == DERIVE:
                return history.derived(progress.histories[0])
            return history.forecast(int(letter), moment.step, lambda step: self._place(progress, step))

    def _keep(self, progress: _Progress, moment: Moment, output: Any, signature: Any) -> None:
        """Copy a computed output for later steps of the image."""
        progress.track.ran(moment.step, moment.branch)
        progress.signatures[moment.branch] = signature
        derives = self.config.uses(DERIVE)
        if self.config.largest_order < 0 and not derives:
            return
        structure = Structure(output)
        reason = structure.decline()
        if reason is not None:
            progress.record.declined, progress.rows, progress.steady = self._decline(reason), None, None
            return
        if moment.branch not in progress.histories:
            progress.histories[moment.branch] = History(self.config.largest_order + 1)
        history = progress.histories[moment.branch]
        if not history.fits(structure) and history.steps:
            # Nothing of this branch continues in an output of another form.
            progress.track.computed[moment.branch] = [moment.step]
            progress.track.derived_from.discard(moment.branch)
        with torch.no_grad():
            history.add(structure, moment.step)
            first = progress.histories.get(0)
            if derives and moment.branch and first is not None and first.steps[-1:] == [moment.step]:
                history.keep_difference(first)


def signature_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return what decides the form of an output: shapes and dtypes of tensors, flags, strings, and what is None."""
    return tuple(
        (value.shape, value.dtype, value.device)
        if isinstance(value, torch.Tensor)
        else value
        if value is None or isinstance(value, (bool, str))
        else type(value)
        for value in (*args, *kwargs.values())
    )
