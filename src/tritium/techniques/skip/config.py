"""What a user asks of skipping: a table of actions by step and branch, or a rule that writes one."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from tritium.errors import ConfigError, nearest
from tritium.techniques.skip import policies, table
from tritium.techniques.skip.table import ATTENTION, BLOCKS, DERIVE, FORECASTS, LETTERS, RUN

Over = Literal["index", "sigma"]
OnOther = Literal["run", "error"]

_CACHE_DIT = "cache-dit:"


@dataclass(frozen=True)
class Skip:
    """Leave out steps, branches or blocks of a denoiser by a plan, and replace their results; it is lossy.

    Args:
        table: A row for every branch of a step, with one letter for every step: `R` runs; `0`, `1` and `2` forecast the
            output by a polynomial of that order; `D` derives the output of a later branch from the first one; `B` runs with
            the blocks of `span` replaced by their kept change, `A` with their attention replaced by its last results. The
            last row serves further branches. Letters in parentheses at the end are repeated: "RR(R1)". A string is one row, or
            the path of a recipe whose table is used.
        over: The variable of the forecasts' polynomials: the index of a step, or its noise level (`sigma`).
        span: The first block that is left out in steps with `B` or `A`, and the one after the last.
        sigmas: The noise levels that the table was searched for; empty if it may be used with any.
        scheduler: The class of the scheduler that the table was searched for; None if it may be used with any.
        on_other: The reaction to another number of steps, other sigmas or another scheduler: `run` runs every step, `error`
            raises.
        adaptive: In place of a table: skip a step if the latent changed steadily, up to this relative deviation. The
            decision is made one step late, so that the device never waits for it.
        order: The order of the forecasts of `adaptive`.
        longest: The most steps in a row that `adaptive` skips.
        loss: The loss with which the table was found, for the report.

    >>> Skip("RRR1R1").actions(branches=1)
    ['RRR1R1']
    """

    table: tuple[str, ...] | str = ()
    over: Over = "index"
    span: tuple[int, int] | None = None
    sigmas: tuple[float, ...] = ()
    scheduler: str | None = None
    on_other: OnOther = "run"
    adaptive: float | None = None
    order: int = 1
    longest: int = 4
    loss: str = ""

    def __post_init__(self) -> None:
        if isinstance(self.table, (str, Path)) and str(self.table).endswith(".json"):
            for name, value in _of_recipe(Path(self.table)).items():
                object.__setattr__(self, name, tuple(value) if isinstance(value, list) else value)
        rows = (self.table,) if isinstance(self.table, str) else tuple(self.table)
        object.__setattr__(self, "table", rows)
        object.__setattr__(self, "sigmas", tuple(map(float, self.sigmas)))
        for name, known in (("over", get_args(Over)), ("on_other", get_args(OnOther))):
            if getattr(self, name) not in known:
                raise ConfigError(
                    f"{name} cannot be {getattr(self, name)!r}; {nearest(str(getattr(self, name)), known)}"
                )
        if self.adaptive is None:
            self._check_table()
        else:
            self._check_adaptive()

    def _check_table(self) -> None:
        if not self.table:
            raise ConfigError(
                "skip needs a table: a recipe of `tritium tune`, Skip.window(steps=28, runs=14), or one letter for every "
                "step as in 'RRR1R1R1'"
            )
        for row in self.table:
            if not isinstance(row, str):
                raise ConfigError(f"a row of a table is a string of {', '.join(LETTERS)}, got {row!r}")
            table.check_row(row)
        lengths = {table.length_of(row) for row in self.table}
        if len(lengths) > 1:
            raise ConfigError(f"the rows of a table have one number of steps, got {', '.join(map(repr, self.table))}")
        if len(self.table) > 1 and DERIVE in self.table[0]:
            raise ConfigError("the first row of a table cannot have D: the first branch is derived from no other")
        partial = {BLOCKS, ATTENTION} & set("".join(self.table))
        if partial and self.span is None:
            raise ConfigError(f"a table with {' and '.join(sorted(partial))} needs span=(first, after the last)")
        if self.span is not None:
            pair = tuple(self.span)
            if len(pair) != 2 or not all(type(place) is int for place in pair) or not 0 <= pair[0] < pair[1]:
                raise ConfigError(
                    f"span is the first block that is left out and the one after the last, such as (10, 50); got {pair}"
                )
            object.__setattr__(self, "span", pair)
        if self.sigmas and not self._has_steps(len(self.sigmas)):
            raise ConfigError(f"a table of {table.length_of(self.table[0])} steps has {len(self.sigmas)} sigmas")

    def _has_steps(self, steps: int) -> bool:
        # A scheduler's list of sigmas ends with the one after the last step.
        return table.length_of(self.table[0]) in (None, steps, steps - 1)

    def _check_adaptive(self) -> None:
        if self.table:
            raise ConfigError("adaptive decides by itself which steps are skipped: leave out table or adaptive")
        if not isinstance(self.adaptive, (int, float)) or not 0 <= self.adaptive < math.inf:
            raise ConfigError(f"adaptive is a relative deviation of 0 or more, got {self.adaptive!r}")
        if str(self.order) not in FORECASTS or self.longest < 1:
            raise ConfigError(f"order is 0, 1 or 2 and longest 1 or more, got {self.order!r} and {self.longest!r}")

    def __str__(self) -> str:
        if self.adaptive is not None:
            return f"skip adaptively {self.adaptive:g}"
        row = self.table[0]
        share = "" if "(" in row else f" {sum(letter != RUN for letter in row)} of {len(row)}"
        return f"skip{share}"

    # --- named rules ---

    @classmethod
    def window(
        cls,
        *,
        steps: int = 28,
        runs: int = 14,
        first: int = 3,
        last: int = 2,
        growth: float = 0.3,
        order: int = 1,
        over: Over = "index",
    ) -> Skip:
        """Run the first and the last steps; the gaps between the other runs grow by a share from each to the next."""
        letter = _letter(order)
        row = policies.window(steps=steps, runs=runs, first=first, last=last, growth=growth, letter=letter)
        return cls((row,), over=over)

    @classmethod
    def mask(cls, *rows: str, over: Over = "index", span: tuple[int, int] | None = None) -> Skip:
        """Follow rows of letters, one for every branch."""
        return cls(tuple(rows), over=over, span=span)

    @classmethod
    def blocks(cls, start: int, end: int, *, every: int, first: int = 0, until: int | None = None) -> Skip:
        """Replace blocks `start` to `end` by their kept change, except in every so many steps from step `first` on.

        The steps before `first`, and those after `until`, run.
        """
        return cls((policies.interval(first, every, until, BLOCKS),), span=(start, end))

    @classmethod
    def attention(cls, start: int, end: int, *, every: int, first: int = 0, until: int | None = None) -> Skip:
        """Reuse the results of the attention layers of blocks `start` to `end`, except in every so many steps."""
        return cls((policies.interval(first, every, until, ATTENTION),), span=(start, end))

    @classmethod
    def magcache(
        cls, ratios: Sequence[float], threshold: float = 0.06, longest: int = 3, retain: float = 0.2, order: int = 0
    ) -> Skip:
        """Follow MagCache: the ratios of the norms of consecutive residuals decide, one ratio for every step.

        A step is skipped while the product of the ratios since the last run deviates from 1 by `threshold` at most in sum,
        at most `longest` in a row, and not in the share `retain` of the first steps.
        """
        return cls((policies.by_ratios(tuple(ratios), threshold, longest, retain, _letter(order)),))

    @classmethod
    def like(cls, name: str, steps: int, order: int = 1) -> Skip:
        """Follow a step mask of another library: `cache-dit:slow`, `:medium`, `:fast` or `:ultra`."""
        if not name.startswith(_CACHE_DIT):
            raise ConfigError(f"there are no step masks like {name!r}; write 'cache-dit:fast'")
        return cls((policies.cache_dit(name.removeprefix(_CACHE_DIT), steps, _letter(order)),))

    # --- what a table says ---

    @property
    def rows(self) -> tuple[str, ...]:
        assert isinstance(self.table, tuple)
        return self.table

    def expanded(self, steps: int) -> tuple[str, ...] | None:
        """Return the rows for a number of steps, or None if the table is for another number."""
        rows = [row for given in self.rows if (row := table.expanded(given, steps)) is not None]
        return tuple(rows) or None

    def actions(
        self, steps: int | None = None, *, branches: int = 1, begin: int = 0, end: int | None = None
    ) -> list[str]:
        """Return the letters that are followed, by branch: steps without enough history run in spite of theirs."""
        own = table.length_of(self.rows[0]) if self.rows else None
        rows = self.expanded(steps or own or 0)
        if rows is None or self.adaptive is not None:
            raise ConfigError(f"{self} has no plan for {steps} steps")
        return table.actions(rows, branches, begin, end)

    def cost(self, steps: int | None = None, *, blocks: int = 1, branches: int = 1, begin: int = 0) -> int:
        """Return how many blocks an image executes, with so many blocks in the denoiser.

        >>> Skip.window(steps=28, runs=14).cost(blocks=57), Skip.blocks(10, 50, every=3, first=10).cost(40, blocks=60)
        (798, 1600)
        """
        return sum(
            table.executions(row, blocks, self.left_out(blocks))
            for row in self.actions(steps, branches=branches, begin=begin)
        )

    def left_out(self, blocks: int) -> int:
        """Return how many of so many blocks are left out in steps with `B`."""
        return 0 if self.span is None else max(0, min(self.span[1], blocks) - self.span[0])

    def uses(self, letter: str) -> bool:
        return any(letter in row for row in self.rows)

    @property
    def largest_order(self) -> int:
        """Return the largest order of forecasts, -1 without forecasts."""
        if self.adaptive is not None:
            return self.order
        return max((int(letter) for letter in FORECASTS if self.uses(letter)), default=-1)

    def export(self, to: str, steps: int | None = None) -> dict[str, Any] | str:
        """Return the computed steps for another program: `cache-dit` as keyword arguments, `sglang` as YAML.

        Both apply one mask to all branches: a step counts as computed if a branch runs in it.
        """
        rows = self.actions(steps, branches=max(1, len(self.rows)))
        mask = [int(any(letter not in FORECASTS for letter in step)) for step in zip(*rows, strict=True)]
        if to == "cache-dit":
            return {
                "steps_computation_mask": mask,
                "steps_computation_policy": "static",
                "num_inference_steps": len(mask),
            }
        if to == "sglang":
            return f"cache_config:\n  steps_computation_mask: {mask}\n  steps_computation_policy: static\n"
        raise ConfigError(f"a table cannot be exported to {to!r}; {nearest(to, ('cache-dit', 'sglang'))}")


def _letter(order: int) -> str:
    if str(order) not in FORECASTS:
        raise ConfigError(f"the order of forecasts is 0, 1 or 2, got {order!r}")
    return str(order)


def _of_recipe(path: Path) -> Mapping[str, Any]:
    """Return the fields of the table in a recipe; raise a `ConfigError` if it has none."""
    try:
        choices = json.loads(path.read_text(encoding="utf-8"))["choices"].values()
        found = [choice["skip"] for choice in choices if isinstance(choice.get("skip"), Mapping)]
    except OSError as error:
        raise ConfigError(f"recipe {path} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} is no recipe; `tritium tune PIPELINE -o recipe.json` writes one") from error
    if not found:
        raise ConfigError(f"recipe {path} skips nothing; optimize(pipe, {str(path)!r}) applies what it has")
    if any(other != found[0] for other in found):
        raise ConfigError(
            f"recipe {path} has a table for each of several parts; optimize(pipe, {str(path)!r}) applies them"
        )
    unknown = set(found[0]) - {field.name for field in dataclasses.fields(Skip)}
    if unknown:
        raise ConfigError(f"recipe {path} was written by another version: it has {', '.join(sorted(unknown))} in skip")
    return dict(found[0])
