"""Find the table with the fewest computed steps whose images are inside a budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from tritium.bench.search.evaluation import Evaluator
from tritium.bench.search.tried import Result, Tried
from tritium.budget import Budget
from tritium.techniques.choice import Choice
from tritium.techniques.skip import propose
from tritium.techniques.skip.config import Skip
from tritium.techniques.skip.propose import Proposer, Recording

# Seconds of a skipping image as a share of an uncached one's.
SKIPPING = 0.6


@dataclass(frozen=True)
class Effort:
    """How many images the search may generate."""

    # Steps whose sensitivity is measured, each in so many jobs.
    sensitive_steps: int = 8
    sensitive_jobs: int = 2
    # Numbers of computed steps that are tried.
    halvings: int = 4
    # Candidates for each number, tried on a few jobs; the best of them are tried on all.
    candidates: int = 8
    few_jobs: int = 2
    finalists: int = 2

    def images(self, jobs: int) -> float:
        """Return about how many uncached images a search takes; a skipping image takes a share of one."""
        tried = self.candidates * self.few_jobs + self.finalists * max(0, jobs - self.few_jobs)
        return self.sensitive_steps * self.sensitive_jobs + self.halvings * tried * SKIPPING


QUICK = Effort(sensitive_steps=0, halvings=3, candidates=2, few_jobs=1, finalists=1)


@dataclass
class Tables:
    """The search for a table with one engine."""

    evaluator: Evaluator
    budget: Budget
    recording: Recording
    parts: Sequence[str]
    # The first jobs of the evaluator: the others are held out.
    jobs: int
    effort: Effort
    # Fields of every table: the schedule for which it is found.
    fields: Mapping[str, object] = field(default_factory=dict)
    tried: list[Tried] = field(default_factory=list)

    def search(
        self, engine: Mapping[str, Choice], name: str, sensitivity: Sequence[float] | None = None
    ) -> Tried | None:
        """Return the cheapest candidate inside the budget, or None; halve the number of computed steps between bounds."""
        proposer = Proposer(self.recording, tuple(sensitivity or self.sensitivity(engine)))
        steps = self.recording.steps
        least, most, best = max(4, steps // 7), steps - 1, None
        for turn in range(self.effort.halvings):
            if least > most:
                break
            runs = (least + most) // 2 if turn or best else max(least, steps // 2)
            found = self.best_of(engine, name, proposer.proposals(runs, self.effort.candidates))
            if found.inside:
                best, most = found, runs - 1
            else:
                least = runs + 1
        if best is None:
            return None
        return self._derived(engine, name, proposer, best)

    def _derived(self, engine: Mapping[str, Choice], name: str, proposer: Proposer, best: Tried) -> Tried:
        """Also derive later branches in the last part, as early as the budget allows."""
        for skip in proposer.derived(self.table_of(best)):
            found = self.best_of(engine, name, [skip])
            if found.inside:
                return found
        return best

    def table_of(self, tried: Tried) -> Skip:
        found = next(tried.choices[part].get(Skip) for part in self.parts)
        assert found is not None
        return found

    def sensitivity(self, engine: Mapping[str, Choice]) -> tuple[float, ...]:
        """Return the error of the final latents that an error of the output causes, by step."""
        steps, effort = self.recording.steps, self.effort
        if effort.sensitive_steps == 0 or steps < 5:
            return propose.falling(steps)
        places = sorted(
            {round(2 + (steps - 3) * turn / (effort.sensitive_steps - 1)) for turn in range(effort.sensitive_steps)}
        )
        known = {}
        proposer = Proposer(self.recording, (1.0,) * steps)
        for step in places:
            skip = propose.single(steps, step)
            jobs = range(min(effort.sensitive_jobs, self.jobs))
            results = self.evaluator.run(self.with_table(engine, skip), jobs, f"sensitivity of step {step + 1}")
            errors = [result.difference.latent_l2 for result in results]
            local = proposer.cost(skip)
            if local > 0 and all(error is not None for error in errors):
                known[step] = sum(error for error in errors if error is not None) / len(errors) / local
        return propose.interpolated(known, steps) if known else propose.falling(steps)

    def with_table(self, engine: Mapping[str, Choice], skip: Skip) -> dict[str, Choice]:
        skip = replace(skip, **self.fields)  # type: ignore[arg-type]  # fields of Skip
        return {name: choice.with_(skip=skip) if name in self.parts else choice for name, choice in engine.items()}

    def best_of(self, engine: Mapping[str, Choice], name: str, proposals: Sequence[Skip]) -> Tried:
        """Try proposals on a few jobs and the best of them on all; return the best of these."""
        few = range(min(self.effort.few_jobs, self.jobs))
        rows = []
        for skip in proposals:
            choices = self.with_table(engine, skip)
            what = f"{name}, {propose.computed_steps(skip, self.recording.steps)} of {self.recording.steps} steps"
            results = self.evaluator.run(choices, few, what)
            rows.append((self.budget.slack_of([result.difference for result in results]), _latent(results), skip, what))
        rows.sort(key=lambda row: (-row[0], row[1]))
        final = []
        for place, (_, _, skip, what) in enumerate(rows):
            choices = self.with_table(engine, skip)
            is_final = place < self.effort.finalists
            results = self.evaluator.run(choices, range(self.jobs) if is_final else few, what)
            tried = Tried.of(
                f"{what}: {' / '.join(skip.rows)}", "skip", choices, results, self.budget, complete=is_final
            )
            if not is_final:
                tried = replace(tried, why=f"another candidate had less loss in the first {len(results)} jobs")
            self.tried.append(tried)
            if is_final:
                final.append((self.budget.slack_of(tried.differences), -_latent(results), tried))
        return max(final, key=lambda row: row[:2])[2]


def _latent(results: Sequence[Result]) -> float:
    return sum(result.difference.latent_l2 or 0.0 for result in results) / max(1, len(results))
