"""The plan of an image: one letter per step and branch, and the rules by which a step runs in spite of its letter.

A branch is one of the calls of a step: guidance calls the denoiser with the prompt, and again without it.

    R    run
    0-2  forecast the output by a polynomial of this order through the last computed outputs
    D    derive the output: that of the first branch less the difference that was kept when both ran
    B    run, with a range of blocks replaced by the change that they made when they last ran
    A    run, with the attention layers of a range of blocks replaced by their last results
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tritium.errors import ConfigError

RUN, DERIVE, BLOCKS, ATTENTION = "R", "D", "B", "A"
FORECASTS = ("0", "1", "2")
LETTERS = (RUN, *FORECASTS, DERIVE, BLOCKS, ATTENTION)

# Letters of steps that do not call the denoiser.
SKIPPED = (*FORECASTS, DERIVE)


def check_row(row: str) -> None:
    """Raise a `ConfigError` unless a row consists of letters, and at most one cycle in parentheses at its end."""
    start, opens, cycle = row.partition("(")
    letters = start + cycle.removesuffix(")")
    if opens and (not cycle.endswith(")") or len(cycle) < 2):
        raise ConfigError(
            f"{row!r} is no row of a table: letters in parentheses are repeated and end the row, as in 'RR(R1)'"
        )
    wrong = next((letter for letter in letters if letter not in LETTERS), None)
    if wrong is not None or not letters:
        raise ConfigError(
            f"{row!r} is no row of a table: {wrong!r} is no action; they are {', '.join(LETTERS)}"
            if wrong is not None
            else "a row of a table has a letter for every step, such as 'RRR1R1'; this one is empty"
        )


def length_of(row: str) -> int | None:
    """Return the number of steps of a row, or None if it ends in a cycle and fits any number."""
    return None if "(" in row else len(row)


def expanded(row: str, steps: int) -> str | None:
    """Return the letters of a row for a number of steps, or None if it is for another number.

    >>> expanded("RR(R1)", 7), expanded("RR1", 7)
    ('RRR1R1R', None)
    """
    start, opens, cycle = row.partition("(")
    if not opens:
        return row if len(row) == steps else None
    cycle = cycle.removesuffix(")")
    return (start + cycle * (steps // len(cycle) + 1))[:steps]


@dataclass
class Track:
    """What was computed in an image so far, by branch. It decides if the letter of a step can be followed."""

    # The last steps that each branch computed.
    computed: dict[int, list[int]] = field(default_factory=dict)
    # Branches whose difference to the first branch is kept.
    derived_from: set[int] = field(default_factory=set)

    def why_run(self, letter: str, step: int, branch: int) -> str | None:
        """Return why a step has to run in spite of its letter, or None."""
        computed = self.computed.get(branch, [])
        if letter in FORECASTS and len(computed) <= int(letter):
            return f"order {letter} needs {int(letter) + 1} computed steps"
        if letter in (BLOCKS, ATTENTION) and not computed:
            return "nothing is kept yet"
        if letter == DERIVE:
            if not branch:
                return "the first branch is derived from no other"
            if self.computed.get(0, [-1])[-1] != step:
                return "the first branch did not run in this step"
            if branch not in self.derived_from:
                return "no difference between the branches is kept yet"
        return None

    def ran(self, step: int, branch: int) -> None:
        """Record a step that was computed."""
        computed = self.computed.setdefault(branch, [])
        computed.append(step)
        del computed[: -len(FORECASTS)]
        if branch and self.computed.get(0, [-1])[-1] == step:
            self.derived_from.add(branch)


def row_of(table: Sequence[str], branch: int) -> str:
    """Return the row of a branch: the last row also serves the branches after it.

    A table with one row can have letters D: its first branch runs there.
    """
    row = table[min(branch, len(table) - 1)]
    return row if branch else row.replace(DERIVE, RUN)


def actions(table: Sequence[str], branches: int, begin: int = 0, end: int | None = None) -> list[str]:
    """Return the actions of an image by branch, from step `begin` on, after the rules that let steps run.

    >>> actions(["RR1RD1"], branches=2)
    ['RR1RR1', 'RR1RD1']
    """
    track = Track()
    rows = [row_of(table, branch) for branch in range(branches)]
    found = [""] * branches
    for step in range(begin, len(rows[0]) if end is None else end):
        for branch, row in enumerate(rows):
            letter = RUN if track.why_run(row[step], step, branch) else row[step]
            if letter == RUN:
                track.ran(step, branch)
            found[branch] += letter
    return found


def executions(letters: str, blocks: int, replaced: int) -> int:
    """Return how many blocks are executed in the steps of a row; `replaced` blocks are left out in steps with B."""
    return sum(0 if letter in SKIPPED else blocks - (replaced if letter == BLOCKS else 0) for letter in letters)
