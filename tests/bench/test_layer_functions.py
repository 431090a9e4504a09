"""Workloads that are functions: their cases, and what is measured of them."""

import time

import pytest
import torch

from tritium import tuning
from tritium.bench import layer_functions
from tritium.bench.settings import Settings, silent
from tritium.errors import ConfigError


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch, tmp_path):
    monkeypatch.setattr(tuning.tables, "user_folder", lambda: tmp_path)
    tuning.forget()


def cases(name):
    return list(layer_functions.CASES[name]("cpu", torch.float32, small=True))


def test_variants_of_a_case_compute_the_same():
    found = cases("attention")
    assert len({case.name for case in found}) == len(found)
    with torch.inference_mode():
        for case in found:
            expected = case.variants[case.reference]()
            assert "tritium" in case.variants
            for call in case.variants.values():
                torch.testing.assert_close(call(), expected, rtol=1e-4, atol=1e-4)


def test_sparse_variants_agree_at_the_named_density():
    with torch.inference_mode():
        for case in cases("sparse-attention"):
            wanted, found = float(case.name.split()[-1]), float(case.note.split()[-1])
            assert abs(found - wanted) < 0.05
            plain = case.variants["tritium"]()
            torch.testing.assert_close(case.variants["a mask each step"](), plain)
            lists = case.variants["lists given"]()
            torch.testing.assert_close(case.variants["permuted once"](), lists)
            assert not torch.allclose(plain, case.variants[case.reference]())


def test_rows_are_against_the_reference_that_the_note_names(monkeypatch):
    optional = {"broken", "slow"}

    def made(device_type, dtype, *, small):
        x = torch.ones(64, 64)

        def broken():
            raise RuntimeError("no kernel")

        def slow():
            time.sleep(0.1)
            return x @ x

        variants = {"plain": lambda: x @ x, "tritium": lambda: x @ x * 1.1, "broken": broken, "slow": slow}
        yield layer_functions.Case("one", variants, "64 rows", {"x": [64, 64]}, frozenset(optional))

    monkeypatch.setitem(layer_functions.CASES, "attention", made)
    told = []
    rows = layer_functions.run("attention", Settings(seconds=0.0), lambda what, share: told.append(what))
    assert [row.variant for row in rows] == ["plain", "tritium"]
    assert rows[0].ratio == 1.0
    assert rows[1].relative_l2 == pytest.approx(0.1, rel=1e-3)
    without = "without broken (RuntimeError: no kernel); without slow (over 8 times the fastest one's time)"
    assert rows[1].note == f"64 rows; ratio against plain; {without}"
    assert rows[1].lower_quartile_ms <= rows[1].middle_ms <= rows[1].upper_quartile_ms
    assert rows[1].workload == "attention: one"
    assert rows[0].shrunk
    assert told[0] == "attention: one"
    optional.clear()
    with pytest.raises(RuntimeError, match="no kernel"):
        layer_functions.run("attention", Settings(seconds=0.0), silent)


def test_options_of_models_are_refused():
    with pytest.raises(ConfigError, match="attention measures functions"):
        layer_functions.run("attention", Settings(exact=True), silent)
