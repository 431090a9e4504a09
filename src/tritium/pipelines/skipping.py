"""Skipping in a running pipeline: what was skipped, and switches for it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tritium.errors import ConfigError, PipelineError
from tritium.pipelines.part import Part
from tritium.techniques.skip import ImageRecord, State
from tritium.techniques.skip.clock import Counter
from tritium.techniques.skip.gate import OFF

NAME = "skip"


class Skipping:
    """The skipping of a handle's parts, as `handle.skipping`."""

    def __init__(self, parts: Callable[[], Sequence[Part]]) -> None:
        self._parts = parts

    @property
    def _states(self) -> dict[str, tuple[Part, State]]:
        found = ((part, part.state_of(NAME)) for part in self._parts())
        return {part.name: (part, state) for part, state in found if state is not None}

    def off(self) -> None:
        """Run every step from now on; compiled code and the plan are kept."""
        for part in self._parts():
            OFF.add(part.module)

    def on(self) -> None:
        """Follow the plan again."""
        for part in self._parts():
            OFF.discard(part.module)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Run every step inside the block."""
        modules = [part.module for part in self._parts() if part.module not in OFF]
        for module in modules:
            OFF.add(module)
        try:
            yield
        finally:
            for module in modules:
                OFF.discard(module)

    @contextlib.contextmanager
    def image(self, steps: int, *, calls: int = 1) -> Iterator[None]:
        """Announce an image of so many steps, for schedulers that do not count them.

        `calls` are the calls of denoisers in a step: 2 if guidance calls it twice. Inside the block, steps are counted by
        calls.
        """
        if min(steps, calls) < 1:
            raise ConfigError(f"an image has 1 step or more and a step 1 call or more, got {steps} and {calls}")
        states = [state for _, state in self._states.values()]
        if not states:
            raise PipelineError("nothing is skipped: no part has a plan; pass tritium.optimize(pipe, Plan(skip=...))")
        counter = Counter(steps, calls)
        for state in states:
            state.gate.clock.counter = counter
        try:
            yield
        finally:
            for state in states:
                state.gate.clock.counter = None

    @property
    def images(self) -> dict[str, ImageRecord]:
        """Return the last image of each part: rows of letters by branch, and block executions."""
        return {name: state.gate.last for name, (_, state) in self._states.items() if state.gate.last is not None}

    def to_dict(self) -> dict[str, Any]:
        """Return the last image of each part with the seconds that it saved, None before a computed call was timed."""
        return {
            name: {**record.to_dict(), "seconds_saved": self._saved(name, record)}
            for name, record in self.images.items()
        }

    def _saved(self, name: str, record: ImageRecord) -> float | None:
        milliseconds = self._states[name][0].times.milliseconds()
        return None if milliseconds is None else milliseconds / 1e3 * record.skipped

    def __str__(self) -> str:
        lines = []
        for name, (part, state) in self._states.items():
            gate = state.gate
            lines.append(f"{name}: {gate.config}" + (", switched off" if part.module in OFF else ""))
            record = gate.last
            if record is None:
                lines.append("  no image yet")
                continue
            begin = f" from step {record.begin}" if record.begin else ""
            lines += [f"  branch {branch}{begin}: {row}" for branch, row in enumerate(record.rows)]
            saved = self._saved(name, record)
            lines.append(
                f"  block executions: {record.done} done, {record.planned} planned, {record.without} without skipping"
                + (f"; about {saved:.2f} s saved" if saved else "")
            )
            lines += [f"  ran {count} calls in spite of the plan: {why}" for why, count in record.ran.items()]
            lines += [f"  ran every step: {reason}" for reason in gate.declined]
            if gate.config.loss:
                lines.append(f"  {gate.config.loss}")
        return "\n".join(lines) or "nothing is skipped: no part has a plan"

    def summary(self) -> None:
        """Print the letters of the last image by branch, its block executions, and the seconds saved."""
        sys.stdout.write(f"{self}\n")
