"""Buckets, failures, random numbers and threads: whatever happens, a call gives eager's result."""

import threading

import pytest
import torch
from torch import nn

import tritium
from support.capture import captures, compiled, region
from tritium import Backend, CompilationConfig
from tritium.compiler.capture.graph import lane_of
from tritium.compiler.capture.region import CAPTURED_AROUND, MOST_RETURNS


class TestRandomNumbers:
    def test_the_default_generator_goes_on_as_without_graphs(self, device, config):
        def noisy(x):
            return x + torch.randn_like(x), torch.rand(3, device=x.device)

        x = torch.zeros(4, device=device)
        torch.manual_seed(1)
        expected = [noisy(x) for _ in range(4)]
        f = compiled(noisy, config)
        torch.manual_seed(1)
        found = [f(x) for _ in range(4)]
        for one, other in zip(found, expected, strict=True):
            assert all(map(torch.equal, one, other))
        assert captures(f)[0]["hits"] == 4

    def test_a_generator_is_drawn_from_as_without_graphs(self, device):
        def noisy(x, generator):
            return x + torch.randn(x.shape, generator=generator, device=x.device)

        x = torch.zeros(4, device=device)
        plain = torch.Generator(device).manual_seed(3)
        expected = [noisy(x, plain) for _ in range(3)]
        f, record = region(noisy, device, ("x", "generator"))
        ours, other = torch.Generator(device).manual_seed(3), torch.Generator(device).manual_seed(3)
        assert all(torch.equal(f(x, ours), value) for value in expected)
        assert torch.equal(f(x, other), expected[0])
        assert len(record.captures) == 2


class TestBounds:
    def test_the_least_recently_used_makes_room(self, device):
        f, record = region(lambda x: x + 1, device, max_captures=2)
        for size in (1, 2, 1, 3, 1):
            f(torch.ones(size, device=device))
        assert [row.bucket for row in record.captures] == ["x 1 float32", "x 3 float32"]
        assert record.captures[0].hits == 3

    def test_buckets_in_turn_do_not_record_for_ever(self, device):
        runs = []
        g, record = region(lambda x: (runs.append(len(x)), x + 1)[1], device, max_captures=2)
        for _ in range(MOST_RETURNS + 5):
            for size in (1, 2, 3):
                assert g(torch.ones(size, device=device)).tolist() == [2.0] * size
        assert any("made room" in (row.declined or "") for row in record.captures)
        before = len(runs)
        g(torch.ones(1, device=device))
        assert len(runs) - before <= 1

    def test_clearing_gives_memory_back_and_records_again(self, device):
        f, record = region(lambda x: x + 1, device)
        kept = f(torch.ones(3, device=device))
        assert record.captures[0].bytes >= 12
        f.clear()
        assert not record.captures
        assert len(f) == 0
        assert f(torch.zeros(3, device=device)).tolist() == [1.0] * 3
        assert kept.tolist() == [2.0] * 3
        assert len(f) == 1


class Odd(torch.Tensor):
    pass


def double(x):
    return x * 2


class TestFailure:
    def test_a_failed_capture_is_off_for_its_bucket(self, device, monkeypatch):
        lane = lane_of(torch.ones(1, device=device).device)
        original = type(lane).capture

        sizes = []

        def capture(self, run, generators):
            run()
            if sizes[-1] == 3:
                raise RuntimeError("operation not permitted when stream is capturing\nsecond line")
            return original(self, run, generators)

        monkeypatch.setattr(type(lane), "capture", capture)
        f, record = region(lambda x: (sizes.append(x.numel()), x + 1)[1], device)
        with pytest.warns(RuntimeWarning, match="could not be captured and runs without: RuntimeError: operation not"):
            assert f(torch.ones(3, device=device)).tolist() == [2.0] * 3
        assert f(torch.ones(3, device=device)).tolist() == [2.0] * 3
        assert f(torch.ones(4, device=device)).tolist() == [2.0] * 4
        bad, good = record.captures
        assert bad.declined == "RuntimeError: operation not permitted when stream is capturing"
        assert good.declined is None
        assert record.failures[0].part == "capture of x 3 float32"

    def test_the_callers_error_reaches_the_caller(self, device):
        def broken(x):
            raise IndexError("mine")

        f, _ = region(broken, device)
        with pytest.warns(RuntimeWarning), pytest.raises(IndexError, match="mine"):
            f(torch.ones(3, device=device))

    def test_gradients_are_left_alone(self, device, config):
        model = nn.Linear(4, 4).to(device)
        f = compiled(model, config)
        f(torch.ones(1, 4, device=device)).sum().backward()
        assert model.weight.grad is not None
        entry = next(entry for entry in tritium.explain(f).passes if entry["name"] == "capture")
        assert "needs gradients" in entry["declined"]

    def test_what_cannot_be_hashed_turns_the_region_off(self, device):
        f, record = region(lambda x, y: x + y["a"], device, ("x", "y"))
        assert f(torch.ones(1, device=device), {"a": 1}).tolist() == [2.0]
        assert f(torch.ones(1, device=device), {"a": 2}).tolist() == [3.0]
        assert "cannot be part of a key" in record.captures[0].declined

    def test_calls_that_somebody_else_records_are_told_once(self, device, monkeypatch):
        f, record = region(lambda x: x + 1, device)
        monkeypatch.setattr("tritium.compiler.capture.region.is_capturing", lambda: True)
        for _ in range(2):
            assert f(torch.ones(2, device=device)).tolist() == [2.0, 2.0]
        assert [(row.bucket, row.declined) for row in record.captures] == [CAPTURED_AROUND]

    @pytest.mark.parametrize(
        ("run", "argument", "reason"),
        [
            (double, lambda: torch.ones(3).to_sparse(), "x is torch.sparse_coo"),
            (double, lambda: torch.ones(3).requires_grad_(), "x needs gradients"),
            (double, lambda: torch.ones(3).as_subclass(Odd), "x is a Odd, whose memory has no one address"),
            (double, lambda: torch.ones(6).as_strided((3, 2), (1, 1)), "with strides (1, 1) share memory"),
            (lambda x: x.unsqueeze_(0) + 1, lambda: torch.ones(3), "the shape or the memory of an input in place"),
            (lambda x: x.view(torch.int32), lambda: torch.ones(3), "it returns an input's memory as torch.int32"),
        ],
    )
    def test_every_refusal_has_its_reason(self, run, argument, reason):
        f, record = region(run, "cpu")
        assert torch.equal(f(argument()).to_dense(), run(argument()).to_dense())
        (row,) = record.captures
        assert reason in row.declined
        assert len(f) == 0

    def test_a_device_without_graphs_is_left_alone(self):
        f, record = region(double, "meta")
        assert f(torch.ones(3, device="meta")).shape == (3,)
        assert record.captures[0].declined == "there are no static graphs on 'meta'"

    def test_inductors_own_graphs_are_a_conflict(self):
        f = torch.compile(
            lambda x: x + 1, backend=Backend(CompilationConfig(graphs="with_compile")), mode="reduce-overhead"
        )
        with pytest.raises(Exception, match=r"triton\.cudagraphs"):
            f(torch.ones(2))


class TestThreads:
    def test_threads_and_models_do_not_mix_their_results(self, device):
        models = [nn.Linear(8, 8).to(device).requires_grad_(False) for _ in range(2)]
        made = [region(nn.functional.linear, device, ("x", "weight", "bias"), weights=[1, 2]) for _ in models]
        regions = [made_region for made_region, _ in made]
        wrong, finished = [], []

        def work(seed):
            generator = torch.Generator().manual_seed(seed)
            with torch.no_grad():
                for step in range(30):
                    which = (seed + step) % 2
                    x = torch.randn(4, 8, generator=generator).to(device)
                    found = regions[which](x, models[which].weight, models[which].bias)
                    expected = models[which](x)
                    if not torch.equal(found, expected):
                        wrong.append((seed, step))
            finished.append(seed)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong
        assert sorted(finished) == [0, 1, 2, 3]
        assert all(row.declined is None for _, record in made for row in record.captures)


@pytest.mark.codegen
class TestGeneratedCode:
    def test_compiled_and_captured(self, device):
        model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)).to(device).requires_grad_(False)
        plain = torch.compile(model, backend=Backend(CompilationConfig()))
        f = compiled(model, CompilationConfig(graphs="with_compile"))
        with torch.inference_mode():
            for size in (2, 3, 2):
                x = torch.randn(size, 8, device=device)
                assert torch.equal(f(x), plain(x))
        report = tritium.explain(f)
        assert report.captures
        assert all(entry["declined"] is None for entry in report.captures)
