"""Families: the stock denoisers, and how their variants are measured."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from support.bench import ROW, settings
from tritium.bench import comparison, families
from tritium.bench.denoisers import FEW, find_families, with_few_tokens
from tritium.bench.results import Store
from tritium.bench.settings import silent
from tritium.bench.suite import Clock
from tritium.bench.workload import Built

pytest.importorskip("diffusers")

(PIXART,) = find_families(["pixart-512"])


def test_variants_of_a_family_are_timed_and_checked(tmp_path):
    store = Store(tmp_path / "families.json", "cpu")
    outcome = families.SUITE.run(settings(errors=True), store, Clock(600), silent, ["pixart-512"])
    rows = {row.variant: row for row in store.results.rows}
    assert outcome.left_over == []
    assert rows["eager"].relative_l2 == 0.0
    ours = rows["tritium"]
    assert ours.relative_l2 < 1e-5
    assert ours.recompiles == 0
    assert 0 < ours.error_f64 <= 2 * rows["eager"].error_f64 + 16 * torch.finfo(torch.float32).eps


def test_earlier_rows_are_kept_and_a_name_measures_again(tmp_path, monkeypatch):
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


def test_variants_past_the_limit_are_cut_and_named():
    rows = families.measure_family(dataclasses.replace(PIXART, budget=0.0), settings(), Clock(600), silent)
    assert rows[0].variant == "eager"
    assert "tritium" not in [row.variant for row in rows]
    assert rows[0].remark.endswith("cut for time: tritium")


def test_a_family_without_time_is_left_to_the_next_run(monkeypatch):
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


class Counting(torch.nn.Module):
    """Compiles again in every call: the number of calls is a constant of its graph."""

    scale = 1.0

    def forward(self, x):
        self.scale += 1.0
        return (x * self.scale,)


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
    assert (few.fits_float64, family.fits_float64) == (True, False)
    assert few.full.config == family.full.config
