"""The test against silent misses: Tritium's report has every site that the census counts, and no other.

Both count the same graphs, each in its own way: the census by operators and tagged source lines, the report by what the
fusions recognised. Whatever differs is a fault of one of them; there is no list of differences to expect.
"""

import dataclasses
import functools
import json
from pathlib import Path

import pytest
import torch

from census.measure import EAGER, FAMILIES, Configuration, Counted, Measured, Watched, measure, stored
from census.truth import EMBEDDING, captured, truth
from support.zoo import ZOO
from tritium.report import Report
from tritium.report.records import GraphRecord, Site

STORED = Path(__file__).parent.parent.parent / "docs" / "census.json"
STATIC = Configuration()
# Equal blocks that share a frame, and code outside any graph: an eager run counts more.
NOT_ONE_GRAPH_A_CALL = frozenset(("mochi", "hidream"))

# Models of different kinds that are traced in about a second.
ALSO_DYNAMIC = ("flux", "qwen_image", "ltx", "kl_decoder", "wan_decoder")

every_model = pytest.mark.parametrize("name", ZOO)

# A model is compiled once in each configuration, for all families and tests.
measured = functools.cache(lambda name, configuration: measure(ZOO[name], configuration))


def matrix() -> list[pytest.param]:
    """Every model in every configuration; always static in float32, and some dynamic in half precision. The rest where
    time does not matter.
    """
    cells = []
    for dtype in (torch.float32, torch.bfloat16):
        for dynamic in (False, True):
            whole, blocks = (Configuration(dtype, dynamic, repeated_blocks=repeated) for repeated in (False, True))
            half_and_dynamic = dtype == torch.bfloat16 and dynamic
            for name, model in ZOO.items():
                # Block by block where a model has such, else whole.
                today = half_and_dynamic and name in ALSO_DYNAMIC
                always = whole == STATIC or (today and not model.repeated_blocks)
                cells.append(pytest.param(name, whole, marks=() if always else (pytest.mark.thorough,)))
                if model.repeated_blocks:
                    cells.append(pytest.param(name, blocks, marks=() if today else (pytest.mark.thorough,)))
    return cells


@pytest.mark.parametrize(("name", "configuration"), matrix(), ids=lambda value: str(value))
def test_every_site_is_recognised_or_declined_with_a_reason(name, configuration):
    found = measured(name, configuration)
    assert not found.report.failures
    assert len(found.graphs) == len(found.report.records)
    assert not found.differences, found.complaint()
    assert not found.unanswered, found.complaint()
    assert [site for record in found.report.records for site in record.sites if not site.reason] == []


@every_model
def test_tritium_is_given_all_that_the_model_has(name):
    counts = measured(name, STATIC).truth
    model = ZOO[name]
    expected = captured(model) if name in NOT_ONE_GRAPH_A_CALL else truth(model).live
    expected["cat_linear"] += expected[EMBEDDING]
    assert counts == {family: expected[family] for family in FAMILIES}
    assert len(measured(name, STATIC).graphs) == model.graphs


@every_model
def test_the_documented_census_is_current(name):
    documented = json.loads(STORED.read_text(encoding="utf-8"))
    assert set(documented) == set(ZOO)
    message = "run python tests/census/compare.py --write docs/census.json, then python docs/generate.py"
    assert documented[name] == stored(measured(name, STATIC)), message


@pytest.mark.parametrize("family", FAMILIES)
def test_some_model_has_a_site_of_each_family(family):
    assert sum(measured(name, STATIC).truth[family] for name in ZOO) > 0


def test_a_missing_site_is_reported_with_its_line():
    missing = Counted("rope", "add_7", "embeddings.py in apply_rotary_emb: out = x * cos + y * sin")
    found = Measured("flux", STATIC, ((missing,),), Report([GraphRecord("0/0", "f", "eager", "cpu")]))
    assert found.differences == {"rope": (1, 0)}
    for part in ("flux, float32", "rope: the census counts 1", missing.line, "add_7", "rope: Tritium found 0"):
        assert part in found.complaint()


def test_a_site_in_another_place_is_no_answer():
    counted = Counted(
        "rope", "add_7", "embeddings.py in apply_rotary_emb: out = x * cos + y * sin", frozenset({"add_7"})
    )
    for node, left in (("add_7", []), ("add_9", [counted])):
        site = Site("rope", ("rope",), "declined", "a reason", node, "embeddings.py:1 in apply_rotary_emb")
        found = Measured("flux", STATIC, ((counted,),), Report([GraphRecord("0/0", "f", "eager", "cpu", sites=[site])]))
        assert not found.differences
        assert found.unanswered == left
        assert ("no site of its own" in found.complaint()) == bool(left)


def test_one_site_answers_for_one():
    counted = [Counted("rope", name, "", frozenset(near)) for name, near in (("a", "xy"), ("b", "x"), ("c", "y"))]
    site = Site("rope", ("rope",), "declined", "a reason", "x")
    sites = [site, dataclasses.replace(site, node="y")]
    report = Report([GraphRecord("0/0", "f", "eager", "cpu", sites=sites)])
    assert Measured("flux", STATIC, (tuple(counted[:2]),), report).unanswered == []
    assert len(Measured("flux", STATIC, (tuple(counted),), report).unanswered) == 1


def test_a_fusion_that_is_gone_is_missed():
    class Forgetful(Watched):
        def all_passes(self):
            return [entry for entry in super().all_passes() if entry.name != "fuse"]

    found = measure(ZOO["flux"], STATIC, Forgetful(EAGER))
    assert found.differences["rms_norm"] == (6, 0)
