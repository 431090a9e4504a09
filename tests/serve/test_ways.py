"""Recipes by request: each way of running has its code, and switching compiles nothing."""

import numpy as np
import pytest

from support import small_pipelines, workers
from tritium.errors import ConfigError
from tritium.pipelines.recipe import Recipe, fingerprint_of
from tritium.serve.engine import Quality
from tritium.serve.ways import Ways
from tritium.techniques.choice import Choice

ROWS = ["RRR1"]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder, fingerprint = tmp_path_factory.mktemp("recipes"), fingerprint_of(small_pipelines.flux(1, 1))
    choices = {
        "skipping": {"transformer": Choice(skip={"table": ROWS})},
        "plain": {"vae.decode": Choice(how="eager")},
    }
    for name, choice in choices.items():
        Recipe(choices=choice, figures={}, fingerprint=fingerprint).save(folder / f"{name}.json")
    return {name: str(folder / f"{name}.json") for name in choices}


def test_recipes_by_request(files):
    qualities = {"low": Quality(fidelity="fast")}
    worker = workers.worker(
        eager=False, edits=False, recipes=files, qualities=qualities, config={"engine": "eager", "fidelity": "fast"}
    )
    (model,) = worker.load()
    assert (model.recipes, model.fidelities) == (("skipping", "plain"), ("exact", "close", "fast"))
    assert model.qualities == qualities

    requests = [{}, {"recipe": "skipping"}, {"recipe": "plain"}, {"fidelity": "fast"}, {"fidelity": "exact"}, {}]
    done = [workers.last(worker, workers.job(**request)) for request in requests]
    assert [event.facts["way"] for event in done] == ["default", "skipping", "plain", "skipping", "exact", "default"]
    default, skipping, _, fast, exact, again = map(workers.pixels, done)
    assert np.array_equal(default, again)
    assert np.array_equal(skipping, fast)
    assert not np.array_equal(default, skipping)
    assert np.array_equal(exact, workers.library(small_pipelines.flux(1, 1), workers.job()))
    assert (worker.counts().recompiles, worker.counts().violations) == (0, 0)
    worker.close()


def test_a_default_recipe_is_for_all_requests(files):
    worker = workers.worker(
        eager=False, edits=False, recipes={"default": files["plain"]}, qualities={"low": Quality(fidelity="fast")}
    )
    with pytest.raises(ConfigError, match="quality 'low' asks for fidelity 'fast'"):
        worker.load()
    assert worker.handle.choices["vae.decode"].how == "tritium"
    with pytest.raises(ConfigError, match="cannot be named 'close'"):
        Ways(worker.handle, {"close": files["plain"]})
    worker.ways.use("default")
    assert worker.handle.choices["vae.decode"].how == "eager"
    worker.close()


def test_a_lossy_default_leaves_close_without_it(files):
    worker = workers.worker(
        eager=False, edits=False, recipes={"default": files["skipping"]}, config={"engine": "eager", "fidelity": "fast"}
    )
    worker.load()
    ways = [worker.ways.of(workers.job(fidelity=fidelity)) for fidelity in (None, "fast", "close", "exact")]
    assert ways == ["default", "default", "close", "exact"]
    default, close = (
        workers.pixels(workers.last(worker, workers.job(fidelity=fidelity))) for fidelity in (None, "close")
    )
    assert not np.array_equal(default, close)
    worker.close()
