"""The search for a recipe on a tiny pipeline: what is tried, what is kept, and when it stops."""

import dataclasses
import json

import pytest

import tritium
from support import small_pipelines
from tritium import Budget, Choice, Skip, quality
from tritium.bench import recipes
from tritium.bench.search import engines
from tritium.bench.search.evaluation import Store
from tritium.bench.search.recording import observing, recording_of
from tritium.bench.search.skipping import QUICK, Effort
from tritium.errors import ConfigError, RecipeError
from tritium.pipelines import recipe, trial
from tritium.pipelines.generation import Job, generate
from tritium.report.html import tried

STEPS = 12
EXTRA = {"max_sequence_length": 16}
GUIDED = {**EXTRA, "negative_prompt": "a blue square", "true_cfg_scale": 3.0}


def jobs_of(count, *, seed=0, extra=EXTRA, steps=STEPS):
    prompts = ["a red circle", "a blue square above a red circle"]
    return [
        Job(prompt=prompts[place % 2], width=32, height=32, steps=steps, seed=seed + place, extra=extra)
        for place in range(count)
    ]


@pytest.fixture(scope="module")
def pipe():
    return small_pipelines.flux(1, 1)


@pytest.fixture(autouse=True)
def eager_only(monkeypatch):
    monkeypatch.setattr(trial, "ways", lambda part: [Choice(how="eager")])
    monkeypatch.setattr(trial, "decide", lambda part, calls, seconds: part.use(Choice(how="eager")))
    monkeypatch.setattr(engines, "plain_compile", lambda handle, calls: dict.fromkeys(handle.choices, engines.EAGER))


@pytest.fixture(autouse=True)
def few_timings(monkeypatch, request):
    """Timing whole images is more than half of a small search, and decides nothing: one test of it is enough."""
    if "everything" not in request.node.name:
        monkeypatch.setattr(recipes, "_whole", lambda *_: {})


def search(budget, **fields):
    fields = {"held_out": tuple(jobs_of(2, seed=100)), "seconds": 0.0, "quick": True, **fields}
    return recipes.Search(budget=budget, **fields)


def tune(pipe, budget, *, jobs=None, said=None, **fields):
    said = [] if said is None else said
    return recipes.tune(
        pipe, jobs or jobs_of(4), search(budget, **fields), lambda what, share: said.append((what, share))
    )


class TestResult:
    def test_the_recipe_has_everything(self, pipe, tmp_path, monkeypatch):
        self.steady_times(monkeypatch)
        said = []
        found = tune(pipe, Budget(max_latent_l2=0.01), said=said)
        skip = found.choices["transformer"].get(Skip)
        assert skip is not None
        assert 4 <= skip.rows[0].count("R") < STEPS
        assert skip.scheduler == "FlowMatchEulerDiscreteScheduler"
        assert len(skip.sigmas) == STEPS + 1
        assert "in 4 jobs" in skip.loss
        figures = found.figures
        assert {"eager", "recipe", "ratio", "ratio_to_compile"} == set(figures["images"])
        assert figures["images"]["recipe"]["seconds"] > 0
        assert len(figures["per_job"]) == 4
        assert len(figures["held_out"]) == 2
        inside = [row["latent_l2"] <= 0.01 for row in figures["per_job"]]
        assert sum(inside) >= 4 * 7 / 8
        assert all(row["latent_l2"] <= 0.01 for row in figures["held_out"])
        (kept,) = [row for row in figures["tried"] if row["kept"]]
        assert skip.rows[0] in kept["name"]
        assert {row["kind"] for row in figures["tried"]} == {"engine", "skip", "fewer steps"}
        assert all(row["why"] for row in figures["tried"])
        assert figures["schedule"]["steps"] == STEPS
        shares = [share for _, share in said]
        assert shares == sorted(shares)
        assert any("left" in what for what, _ in said)
        found.save(tmp_path / "r.json")
        assert recipe.load(tmp_path / "r.json").choices == dict(found.choices)
        self.applied(pipe, tmp_path / "r.json", skip)
        page = tried.page(json.loads((tmp_path / "r.json").read_text()), "a recipe")
        assert page.count("<circle") == sum(row["jobs"] == 4 for row in figures["tried"])
        assert page.count(' kept"') == 1

    def applied(self, pipe, path, skip):
        with tritium.optimize(pipe, path) as handle:
            generate(pipe, jobs_of(1)[0])
            assert handle.skipping.images["transformer"].rows == skip.actions(STEPS)
            generate(pipe, jobs_of(1, steps=5)[0])
            assert "no plan for 5 steps" in str(handle)
        assert Skip(str(path)) == skip
        components = {"transformer": "eager", "vae": "eager"}
        with tritium.optimize(pipe, tritium.Plan(components=components, skip=str(path), progress=False)) as handle:
            generate(pipe, jobs_of(1)[0])
            assert handle.skipping.images["transformer"].rows == skip.actions(STEPS)

    def test_it_is_deterministic(self, pipe, monkeypatch):
        # Times decide between ways inside the budget: here all images take as long as they have computed steps.
        self.steady_times(monkeypatch)
        first, second = (tune(pipe, Budget(max_latent_l2=0.01)) for _ in range(2))
        assert first.choices == second.choices
        assert [row["name"] for row in first.figures["tried"]] == [row["name"] for row in second.figures["tried"]]

    def steady_times(self, monkeypatch):
        run = engines.generate
        from tritium.bench.search import evaluation

        def timed(pipe, job):
            calls = []
            hook = pipe.transformer.register_forward_hook(lambda *_: calls.append(1))
            image = run(pipe, job)
            hook.remove()
            return dataclasses.replace(image, seconds=float(len(calls)))

        monkeypatch.setattr(evaluation, "generate", timed)

    def test_guidance_that_calls_twice_can_be_derived(self, pipe, monkeypatch):
        self.steady_times(monkeypatch)
        found = tune(pipe, Budget(max_latent_l2=0.02), jobs=jobs_of(2, extra=GUIDED), held_out=())
        assert found.figures["schedule"]["calls_per_step"] == 2
        assert any("D" in row["name"] for row in found.figures["tried"])
        with tritium.optimize(pipe, found.plan_for(pipe)) as handle:
            generate(pipe, jobs_of(1, extra=GUIDED)[0])
            skip = found.choices["transformer"].get(Skip)
            assert handle.skipping.images["transformer"].rows == skip.actions(STEPS, branches=2)


class TestBudget:
    def test_a_budget_of_zero_runs_all(self, pipe):
        found = tune(pipe, Budget(max_latent_l2=0.0))
        assert found.choices["transformer"].get(Skip) is None
        assert found.figures["skip"]["runs"] is None
        assert all(
            "outside of the budget" in row["why"]
            for row in found.figures["tried"]
            if row["kind"] == "skip" and row["jobs"] == 4
        )

    def test_an_endless_budget_takes_the_cheapest(self, pipe, monkeypatch):
        TestResult().steady_times(monkeypatch)
        found = tune(pipe, Budget(max_latent_l2=1e9))
        skip = found.choices["transformer"].get(Skip)
        runs = {row["name"].split(" of ")[0].split()[-1] for row in found.figures["tried"] if row["kind"] == "skip"}
        assert skip.rows[0].count("R") == min(map(int, runs)) <= 5

    def test_a_stricter_budget_runs_more(self, pipe, monkeypatch):
        TestResult().steady_times(monkeypatch)
        computed = []
        for limit in (0.001, 0.01, 0.1):
            skip = tune(pipe, Budget(max_latent_l2=limit)).choices["transformer"].get(Skip)
            computed.append(STEPS if skip is None else skip.rows[0].count("R"))
        assert computed == sorted(computed, reverse=True)
        assert computed[0] > computed[-1]

    def test_the_number_of_images_is_bounded(self, pipe):
        found = tune(pipe, Budget(max_latent_l2=0.01))
        # Compiled parts, three halvings of the table, three of the steps with the sigmas of the table, held-out jobs.
        halvings = QUICK.halvings
        assert found.figures["generated"]["candidates"] <= 4 + halvings * (2 + 3) + (halvings + 1) * 4 + 2 * halvings
        full = Effort()
        assert 60 <= full.images(8) + 8 + 4 <= 100

    def test_what_fails_on_held_out_jobs_is_not_written(self, pipe, monkeypatch):
        measured = quality.difference
        seen = []

        def worse(image, reference, *args, **kwargs):
            found = measured(image, reference, *args, **kwargs)
            seen.append(found)
            return found

        monkeypatch.setattr(quality, "difference", worse)
        from tritium.bench.search import evaluation

        run = evaluation.Evaluator._one

        def one(self, choices, place, what, changes):
            result = run(self, choices, place, what, changes)
            if place < 4:
                return result
            return dataclasses.replace(result, difference=dataclasses.replace(result.difference, latent_l2=9.0))

        monkeypatch.setattr(evaluation.Evaluator, "_one", one)
        # With everything eager there is a way that needs no verification.
        found = tune(pipe, Budget(max_latent_l2=0.01))
        assert found.choices["transformer"] == Choice(how="eager")
        failed = [row for row in found.figures["tried"] if row["kind"] == "skip" and row["inside"]]
        assert failed
        assert all("on held-out jobs" in row["why"] or "slower" in row["why"] for row in failed)

    def test_nothing_left_is_an_error(self, pipe, monkeypatch):
        monkeypatch.setattr(recipes, "EAGER", Choice(how="eager", graphs=False))
        from tritium.bench.search import evaluation

        run = evaluation.Evaluator._one

        def one(self, choices, place, what, changes):
            result = run(self, choices, place, what, changes)
            return dataclasses.replace(
                result, difference=dataclasses.replace(result.difference, latent_l2=9.0 * (place >= 4))
            )

        monkeypatch.setattr(evaluation.Evaluator, "_one", one)
        with pytest.raises(RecipeError, match="no recipe is written: on held-out jobs"):
            tune(pipe, Budget(max_latent_l2=0.01))

    @pytest.mark.parametrize(
        ("call", "message"),
        [
            (lambda: recipes.Search(budget=Budget()), "a search needs a limit"),
            (lambda: recipes.Search(budget=Budget(max_lpips=0.1)), "max_lpips cannot be measured"),
        ],
    )
    def test_wrong_searches(self, call, message, monkeypatch):
        monkeypatch.setattr(recipes.quality, "decline_lpips", lambda: "its package is not installed")
        with pytest.raises(ConfigError, match=message):
            call()


class TestDeclined:
    def test_few_steps_leave_nothing(self, pipe):
        found = tune(pipe, Budget(max_latent_l2=0.5), jobs=jobs_of(2, steps=4), held_out=())
        assert found.figures["skip"]["declined"].startswith("images of 4 steps leave nothing to skip")

    def test_without_skip(self, pipe):
        found = tune(pipe, Budget(max_latent_l2=0.5), skip=False)
        assert [row["kind"] for row in found.figures["tried"]] == ["engine"]

    def test_jobs_of_other_schedules(self, pipe):
        found = tune(pipe, Budget(max_latent_l2=0.5), jobs=[*jobs_of(1), *jobs_of(1, steps=8)], held_out=())
        assert "tune for one schedule at a time" in found.figures["skip"]["declined"]


class TestResume:
    def test_a_stopped_search_goes_on(self, pipe, tmp_path, monkeypatch):
        TestResult().steady_times(monkeypatch)
        state = tmp_path / "r.json.partial"
        expected = tune(pipe, Budget(max_latent_l2=0.01))

        said = []

        def stop(what, share):
            said.append(what)
            if sum("of 12 steps" in one for one in said) == 5:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            recipes.tune(pipe, jobs_of(4), search(Budget(max_latent_l2=0.01), state=state), stop)
        kept = len(json.loads(state.read_text())["results"])
        assert kept > 4
        found = tune(pipe, Budget(max_latent_l2=0.01), state=state)
        assert found.choices == expected.choices
        generated = found.figures["generated"]["candidates"]
        assert generated < expected.figures["generated"]["candidates"]
        # Another budget uses the same results.
        again = tune(pipe, Budget(max_latent_l2=0.01), state=state)
        assert again.figures["generated"]["candidates"] == 0

    @pytest.mark.parametrize("content", ["", "{", '{"search": {"jobs": 1}, "results": {"a": 1}}', "[1]"])
    def test_a_file_of_another_search_is_not_used(self, tmp_path, content):
        path = tmp_path / "state"
        path.write_text(content)
        store = Store(path, {"jobs": 2})
        assert store.rows == {}
        store.put("key", [1.0])
        assert Store(path, {"jobs": 2}).rows == {"key": [1.0]}


def test_recordings_of_all_branches(pipe):
    found = []
    for job in jobs_of(2, extra=GUIDED):
        with observing([pipe.transformer], pipe.scheduler, keep=True) as observed:
            generate(pipe, job)
        found.append(observed)
    recording = recording_of(found)
    assert (recording.branches, recording.steps) == (2, STEPS)
    assert list(recording.levels) == pytest.approx([1 - step / STEPS for step in range(STEPS)], abs=1e-6)
    assert recording.error(0, 3, [(0, 3, 1.0)]) == pytest.approx(0, abs=1e-7)
    direct = found[0].outputs
    difference = (direct[0, 2] - direct[0, 3]).norm() / direct[0, 3].norm()
    one = recording_of(found[:1])
    assert one.error(0, 3, [(0, 2, 1.0)]) == pytest.approx(difference.item(), rel=1e-4)
    assert recording_of([found[0], dataclasses.replace(found[1], steps=5)]) is None
