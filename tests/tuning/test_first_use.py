"""Providers that are measured at the first call of a shape class."""

import dataclasses
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tritium import measure, tuning
from tritium.ops import Op, Provider
from tritium.ops.op import FirstUse, Trial, octave
from tritium.tuning import Key, Machine, Verdict, compare, first_use, tables

HERE = Machine.of("cpu")


def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def provider(name, run=lambda given: given.x * 2, decline=lambda given: None):
    return Provider(name, "doubled", run, decline)


def op_of(*providers, **fields):
    """An op that doubles a vector, with these providers."""
    first = FirstUse(
        alike=lambda given: lambda: {"x": torch.ones(int(given.x.shape[0]))},
        check=lambda given: lambda result: None if torch.equal(result, given.x * 2) else "it is wrong",
        default=lambda given: "rule",
        versions=lambda: {"torch": "1", "library": "2"},
    )
    trial = Trial(lambda given: {"size": octave(given.x.shape[0])}, first_use=dataclasses.replace(first, **fields))
    return Op("doubled", doubled, lambda draw: iter(()), providers, trial=trial)


def choose(op, size=64, **options):
    return tuning.choose_at_first_use(op, op.bind(torch.ones(size)), **options)


KEY = Key("doubled", "size=64", "float32")


@pytest.fixture(autouse=True)
def _own_tables(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "user_folder", lambda: tmp_path / "own")
    monkeypatch.setattr(tables, "SHIPPED", tmp_path / "shipped")
    tuning.forget()
    yield
    tuning.forget()


@pytest.fixture
def timed(monkeypatch):
    """Replace the times of providers by those in this mapping; and count measurements."""
    ms = {"asked": []}

    def timed(runs, device_type):
        ms["asked"].append(list(runs))
        return {name: ms.get(name, 1.0) for name in runs}

    monkeypatch.setattr(compare, "timed", timed)
    return ms


class TestVerdicts:
    def test_a_class_is_measured_once_and_stored(self, timed):
        timed["b"] = 0.5
        op = op_of(provider("a"), provider("b"))
        assert choose(op) == ("b", "measured on this machine: a 1 ms, b 0.5 ms")
        # 70 is of the class of 64.
        assert choose(op, 70)[0] == choose(op)[0] == "b"
        (verdict,) = tuning.verdicts()
        assert verdict == Verdict(KEY, "b", {"a": 1.0, "b": 0.5}, versions={"torch": "1", "library": "2"})
        tuning.forget()
        assert tuning.verdicts() == []
        assert choose(op)[0] == "b"
        assert timed["asked"] == [["a", "b"]]
        choose(op, 1000)
        assert len(timed["asked"]) == 2
        assert tables.load(tables.user_folder() / HERE.file_name).rows.keys() == {
            KEY,
            dataclasses.replace(KEY, shape="size=1024"),
        }

    def test_other_versions_are_measured_again(self, timed):
        choose(op_of(provider("a")))
        tuning.forget()
        choose(op_of(provider("a"), versions=lambda: {"torch": "1", "library": "3"}))
        assert len(timed["asked"]) == 2

    @pytest.mark.parametrize(("ms", "winner"), [(0.99, "a"), (0.97, "b")])
    def test_the_preferred_provider_is_kept_within_the_margin(self, timed, ms, winner):
        timed["b"] = ms
        assert choose(op_of(provider("a"), provider("b"), preferred="a"))[0] == winner

    def test_providers_are_dropped_with_a_reason(self, timed):
        def fail(given):
            raise RuntimeError("no such\nluck")

        op = op_of(
            provider("good"),
            provider("wrong", lambda given: given.x * 3),
            provider("fails", fail),
            provider("declines", decline=lambda given: "never"),
            provider("skipped"),
            skip=lambda name, given, compiling: "too slow" if name == "skipped" else None,
        )
        assert choose(op)[0] == "good"
        assert tuning.verdicts()[0].remarks == {
            "wrong": "it is wrong",
            "fails": "RuntimeError: no such",
            "declines": "never",
            "skipped": "too slow",
        }
        assert timed["asked"] == [["good"]]

    def test_without_a_close_provider_the_default_is_used(self, timed):
        op = op_of(provider("wrong", lambda given: given.x * 3))
        with pytest.warns(UserWarning, match="no provider of doubled is close to the reference"):
            assert choose(op) == ("rule", "doubled was not measured for size=64")
        assert tuning.verdicts() == []

    def test_the_fastest_that_takes_the_call_if_the_winner_declines(self, timed):
        timed.update(b=0.5, c=2.0)
        choose(op_of(provider("a"), provider("b"), provider("c")))
        assert choose(op_of(provider("a"), provider("b", decline=lambda given: "no"), provider("c")))[0] == "a"

    def test_nothing_is_measured_without_arguments_to_measure(self, timed):
        assert choose(op_of(provider("a"), alike=lambda given: None))[0] == "rule"
        assert timed["asked"] == []

    def test_a_verdict_that_cannot_be_stored_is_kept_in_memory(self, timed, monkeypatch, tmp_path):
        (tmp_path / "file").write_text("")
        monkeypatch.setattr(tables, "user_folder", lambda: tmp_path / "file" / "own")
        op = op_of(provider("a"))
        with pytest.warns(RuntimeWarning, match="cannot be stored for later processes"):
            assert choose(op)[0] == "a"
        assert len(tuning.verdicts()) == 1


class TestShipped:
    def test_a_static_choice_reads_the_shipped_table_alone(self, timed):
        op = op_of(provider("a"), provider("b"))
        assert choose(op, measures=False)[0] == "rule"
        tables.store(tables.SHIPPED / HERE.file_name, HERE, [Verdict(KEY, "b", {"a": 2.0, "b": 1.0})])
        assert choose(op, measures=False) == ("b", "shipped: a 2 ms, b 1 ms")
        assert timed["asked"] == []
        timed["a"] = 0.5
        assert choose(op)[0] == "a"
        assert choose(op, measures=False)[0] == "b"


class TestModes:
    def test_the_measuring_thread_has_no_modes_of_the_caller(self, timed):
        seen = []

        def run(given):
            seen.append((threading.get_ident(), torch.is_grad_enabled(), type(given.x)))
            return given.x * 2

        op = op_of(provider("a", run))
        with torch.enable_grad(), torch._subclasses.FakeTensorMode():
            choose(op)
        ((ident, grad, kind),) = seen
        assert ident != threading.get_ident()
        assert not grad
        assert kind is torch.Tensor

    def test_a_verdict_of_a_compilation_is_the_second_choice(self, timed, monkeypatch):
        flags, compiling = [], [True]
        op = op_of(provider("a"), provider("b"), skip=lambda name, given, compiling: flags.append(compiling))
        monkeypatch.setattr(first_use.compat.dynamo, "is_compiling", lambda: compiling[0])
        assert [choose(op)[0], choose(op)[0]] == ["a", "a"]
        assert [verdict.key.shape for verdict in tuning.verdicts()] == ["size=64 compiling=1"]
        assert len(timed["asked"]) == 1
        assert all(flags)
        timed["b"] = 0.5
        compiling[0] = False
        assert choose(op)[0] == "b"
        assert flags[-2:] == [False, False]
        compiling[0] = True
        assert choose(op)[0] == "b"
        assert len(timed["asked"]) == 2

    def test_nothing_is_measured_during_a_capture(self, monkeypatch):
        monkeypatch.setattr(first_use.device, "cuda_available", lambda: True)
        monkeypatch.setattr(first_use.device, "is_capturing", lambda: True)
        assert not first_use._can_measure(torch.device("cuda"))
        assert not first_use._can_measure(torch.device("meta"))

    def test_threads_measure_one_class_once(self, timed):
        op = op_of(provider("a"), provider("b"))
        with ThreadPoolExecutor(4) as pool:
            names = list(pool.map(lambda _: choose(op)[0], range(8)))
        assert names == ["a"] * 8
        assert len(timed["asked"]) == 1

    def test_the_gpu_is_locked_also_for_the_thread_that_measures(self, monkeypatch):
        monkeypatch.setattr(first_use, "_can_measure", lambda where: True)
        monkeypatch.setattr(tables, "_machine", lambda where: Machine("a GPU"))
        seen = []

        def compared():
            with measure.gpu_lock("cuda"):
                seen.append(measure._HOLDS_GPU.get())

        first_use.recall(torch.device("cuda"), KEY, {}, compared)
        assert not measure._HOLDS_GPU.get()
        with measure.gpu_lock("cuda"):
            first_use.recall(torch.device("cuda"), KEY, {}, compared)
        assert seen == [True, True]


@pytest.mark.parametrize(("capturing", "choices"), [(True, 2), (False, 1)])
def test_the_choice_of_a_call_is_kept_but_not_during_a_capture(monkeypatch, capturing, choices):
    chosen = []
    monkeypatch.setattr(first_use.device, "is_capturing", lambda: capturing)
    for _ in range(2):
        tuning.once("call", lambda: chosen.append(1) or "a")
    assert len(chosen) == choices


def test_the_identity_has_providers_versions_and_rows(timed):
    one, two = op_of(provider("a")), op_of(provider("a"), provider("b"))
    identities = {tuning.identity(one), tuning.identity(two)}
    choose(two)
    identities.add(tuning.identity(two))
    assert len(identities) == 3
    # A row of another op changes nothing.
    other = Verdict(Key("other", "size=1", "float32"), "a", {"a": 1.0})
    tables.store(tables.user_folder() / "another.json", HERE, [other])
    assert tuning.identity(two) in identities
