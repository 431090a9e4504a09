"""What became of an image: the letters that were followed, by branch and step, and the blocks that they executed."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from tritium.techniques.skip import table

# The letter of a step that a branch did not have.
ABSENT = "."


@dataclass
class ImageRecord:
    """One image of a part."""

    steps: int
    begin: int
    blocks: int
    # Blocks that are left out in steps with B.
    replaced: int
    # The rows of the plan for this number of steps; None if all steps run.
    plan: tuple[str, ...] | None
    # Why no step is skipped.
    declined: str = ""
    followed: list[dict[int, str]] = field(default_factory=list)
    # Why steps ran in spite of the plan.
    ran: Counter[str] = field(default_factory=Counter)

    def add(self, step: int, branch: int, letter: str, why: str | None = None) -> None:
        while len(self.followed) <= branch:
            self.followed.append({})
        self.followed[branch][step] = letter
        if why is not None:
            self.ran[why] += 1

    @property
    def rows(self) -> list[str]:
        """Return the letters by branch, from the first step on that the part was called in."""
        last = max((step for branch in self.followed for step in branch), default=self.begin - 1)
        return ["".join(branch.get(step, ABSENT) for step in range(self.begin, last + 1)) for branch in self.followed]

    @property
    def calls(self) -> int:
        return sum(map(len, self.followed))

    @property
    def skipped(self) -> int:
        """Return the number of calls that did not run."""
        return sum(letter in table.SKIPPED for branch in self.followed for letter in branch.values())

    @property
    def done(self) -> int:
        """Return how many blocks were executed."""
        return sum(self._executions(row) for row in self.rows)

    def _executions(self, row: str) -> int:
        return table.executions(row.replace(ABSENT, ""), self.blocks, self.replaced)

    @property
    def planned(self) -> int:
        """Return how many blocks the plan executes in the steps of this image."""
        rows = self.rows
        if self.plan is None:
            return self.without
        end = self.begin + max(map(len, rows), default=0)
        return sum(map(self._executions, table.actions(self.plan, len(rows), self.begin, end)))

    @property
    def without(self) -> int:
        """Return how many blocks these calls execute without skipping."""
        return self.calls * self.blocks

    def to_dict(self) -> dict[str, Any]:
        blocks = {"done": self.done, "planned": self.planned, "without": self.without}
        return {
            "steps": self.steps,
            "begin": self.begin,
            "rows": self.rows,
            "blocks": blocks,
            "skipped_calls": self.skipped,
            "ran": dict(self.ran),
            "declined": self.declined,
        }
