"""Families: the stock denoisers, and how their variants are measured."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from support.bench import ROW, settings
from tritium.bench import comparison, families
from tritium.bench.comparison import tensor_of
from tritium.bench.denoisers import FAMILIES, FEW, find_families, with_few_tokens
from tritium.bench.models import diffusers
from tritium.bench.results import Store
from tritium.bench.settings import silent
from tritium.bench.suite import Clock, Outcome, failures
from tritium.bench.workload import Built, Normals
from tritium.errors import ConfigError

pytest.importorskip("diffusers")

by_name = pytest.mark.parametrize("family", FAMILIES, ids=[family.name for family in FAMILIES])


@by_name
def test_small_families_run(family):
    built = family.build("cpu", torch.float32, small=True)
    assert built.shrunk
    with torch.inference_mode():
        output = tensor_of(built.model(**built.inputs), family.name)
    assert 1e-2 < float(output.std()) < 1e2


@by_name
def test_full_families_run_at_the_tokens_that_they_name(family):
    with torch.device("meta"), torch.inference_mode():
        model = getattr(diffusers(), family.model.class_name)(**family.full.config)
        inputs = family.model.arguments(model.config, family.full, Normals("meta", torch.float32))
        # Lumina 2 reads the lengths of its prompts off a mask, and a meta tensor has none.
        if family.name != "lumina2":
            model(**inputs)
    if family.model.class_name == "UNet2DConditionModel":
        return
    is_packed = "hidden_states" in inputs and inputs["hidden_states"].ndim == 3
    patch = 1 if is_packed else getattr(model.config, "patch_size", None) or model.config.all_patch_size[0]
    patch = patch if isinstance(patch, (tuple, list)) else (1, patch, patch)[-len(family.full.grid) :]
    tokens = math.prod(extent // by for extent, by in zip(family.full.grid, patch, strict=True))
    assert family.model.tokens(family.full) == tokens


def test_the_list_covers_what_defaults_lose_on():
    names = [family.name for family in FAMILIES]
    assert len(set(names)) == len(names) >= 16
    assert {family.model.class_name for family in FAMILIES} >= {"UNet2DConditionModel", "FluxTransformer2DModel"}
    assert sum("512" in name for name in names) >= 5
    assert sum(family.full.batch == 2 for family in FAMILIES) >= 5
    (per_token,) = find_families(["wan-per-token"])
    built = per_token.build("cpu", torch.float32, small=True)
    assert built.inputs["timestep"].shape == (1, 32)


def test_an_unknown_family_names_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'flux-512'"):
        find_families(["flux512"])


def test_variants_of_a_family_are_measured_and_compared_with_float64(tmp_path):
    store = Store(tmp_path / "families.json", "cpu")
    outcome = families.SUITE.run(settings(errors=True), store, Clock(600), silent, ["pixart-512"])
    rows = {row.variant: row for row in store.results.rows}
    assert outcome.left_over == []
    assert rows["eager"].relative_l2 == 0.0
    ours = rows["tritium"]
    assert ours.relative_l2 < 1e-5
    assert ours.recompiles == 0
    assert 0 < ours.error_f64 <= 2 * rows["eager"].error_f64 + 16 * torch.finfo(torch.float32).eps


def test_rows_of_an_earlier_run_are_kept_and_a_name_measures_again(tmp_path, monkeypatch):
    measured = []

    def fake(family, settings, clock, notify):
        measured.append(family.name)
        return [dataclasses.replace(ROW, workload=family.name, median_ms=float(len(measured)))]

    monkeypatch.setattr(families, "measure_family", fake)
    path = tmp_path / "families.json"
    for _ in range(2):
        families.SUITE.run(settings(), Store(path, "cpu"), Clock(600), silent)
    assert sorted(measured) == sorted(FEW)
    families.SUITE.run(settings(), Store(path, "cpu"), Clock(600), silent, ["flux-512"])
    assert measured[-1] == "flux-512"
    assert len(measured) == len(FEW) + 1
    rows = {row.workload: row.median_ms for row in Store(path, "cpu").results.rows}
    assert rows["flux-512"] == len(FEW) + 1
    assert set(rows) == set(FEW)


def test_what_no_time_is_left_for_is_named(tmp_path):
    outcome = families.SUITE.run(settings(), Store(None, "cpu"), Clock(0), silent, ["flux-512", "pixart-512"])
    assert outcome == Outcome(["flux-512", "pixart-512"], [])


def test_variants_past_the_limit_are_cut_and_named():
    (family,) = find_families(["pixart-512"])
    rows = families.measure_family(dataclasses.replace(family, budget=0.0), settings(), Clock(600), silent)
    assert rows[0].variant == "eager"
    assert "tritium" not in [row.variant for row in rows]
    assert rows[0].remark.endswith("cut for time: tritium")


def test_a_family_without_time_for_its_needed_variants_is_left_to_the_next_run(monkeypatch):
    class Ending(Clock):
        """Ends after the first look at it."""

        looks = 0

        @property
        def left(self):
            Ending.looks += 1
            return 100.0 if Ending.looks < 4 else 0.0

    monkeypatch.setattr(comparison, "optimized", lambda target, settings: pytest.fail("no time was left for this"))
    store = Store(None, "cpu")
    outcome = families.SUITE.run(settings(), store, Ending(100.0), silent, ["pixart-512", "flux-512"])
    assert outcome.left_over == ["flux-512", "pixart-512"]
    assert store.results.rows == ()


def test_a_variant_that_fails_is_named_and_the_others_are_measured(monkeypatch):
    def broken(target, settings):
        raise ValueError("no such thing\nand more")

    monkeypatch.setattr(comparison, "optimized", broken)
    (family,) = find_families(["pixart-512"])
    rows = families.measure_family(family, settings(), Clock(600), silent)
    assert [row.variant for row in rows] == ["eager", "tritium"]
    assert {row.remark for row in rows} == {"tritium optimize failed: ValueError: no such thing"}
    assert failures(rows) == ["pixart-512: tritium optimize failed: ValueError: no such thing"]


class Counting(torch.nn.Module):
    """Compiles again in every call: the number of calls is a constant of its graph."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(7, 7)
        self.scale = 1.0

    def forward(self, x):
        self.scale += 1.0
        return (self.linear(x) * self.scale,)


class Recompiling:
    name, budget, reduce_overhead, fits_float64 = "recompiling", 60.0, False, True

    def build(self, device, dtype, *, small):
        return Built(Counting(), {"x": torch.ones(1, 7)}, "", small)


def test_recompiles_after_the_first_call_are_counted():
    rows = families.measure_family(Recompiling(), settings(), Clock(600), silent)
    counted = {row.variant: row.recompiles for row in rows}
    assert counted["eager"] == 0
    assert counted["tritium"] > 0


def test_few_tokens_keep_the_width():
    (family,) = find_families(["wan"])
    few = with_few_tokens(family)
    assert few.fits_float64
    assert not family.fits_float64
    assert few.full.config == family.full.config
    assert few.full.grid == family.small.grid
