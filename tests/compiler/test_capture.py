"""Static graphs: what a replay must not get wrong. Emulated on a CPU, where it is as strict; on a GPU with CUDA's graphs."""

import dataclasses
import gc
import threading
import weakref
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from diffusers.models.modeling_outputs import Transformer2DModelOutput
from torch import nn

import tritium
from tritium import Backend, CompilationConfig
from tritium.bench import workloads
from tritium.compiler.capture import Region, Spec, auto
from tritium.compiler.capture.auto import Decisions
from tritium.compiler.capture.graph import WARM_UPS, lane_of
from tritium.compiler.capture.region import CAPTURED_AROUND, MOST_MOVES, MOST_RETURNS
from tritium.report.records import GraphRecord, PassRecord

AUTO = CompilationConfig(graphs="auto")

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


@pytest.fixture(params=["only", "with_compile"])
def config(request):
    """Both ways of capturing; code generation is tested at the end."""
    return CompilationConfig(graphs=request.param, engine="eager")


def compiled(function, config, **kwargs):
    return torch.compile(function, backend=Backend(config), **kwargs)


def captures(thing):
    return tritium.explain(thing).captures


def region(run, device, names=("x",), weights=(), written=(), **config):
    """A region around a plain function: what Dynamo cannot put into a graph is tested with it."""
    record = GraphRecord("0/0", "run", "eager", device)
    settings = CompilationConfig(**{"graphs": "only", **config})
    return Region(run, Spec(tuple(names), tuple(weights), frozenset(written)), settings, record), record


class TestInputs:
    def test_the_callers_tensors_are_never_written(self, device, config):
        f = compiled(lambda x, y: (x * y).relu(), config)
        given = [(torch.randn(4, 5, device=device), torch.randn(5, device=device)) for _ in range(5)]
        kept = [(x.clone(), y.clone()) for x, y in given]
        results = [f(x, y) for x, y in given]
        for (x, y), (x_was, y_was), result in zip(given, kept, results, strict=True):
            assert torch.equal(x, x_was)
            assert torch.equal(y, y_was)
            assert torch.equal(result, (x_was * y_was).relu())
        assert [entry["hits"] for entry in captures(f)] == [5]

    @pytest.mark.parametrize("numbers", [(3, 4, 5, 3), (0.0, -0.0, float("nan"), 2.5), (1, 1.0, True, 1)])
    def test_a_changed_scalar_is_another_bucket(self, device, numbers):
        def scale(x, n):
            return x.div(n) if isinstance(n, float) else x + n if n is not True else x

        f, record = region(scale, device, ("x", "n"))
        x = torch.ones(3, device=device)
        for number in numbers:
            assert torch.equal(f(x, number).nan_to_num(7), scale(x, number).nan_to_num(7))
        assert len(record.captures) == len({(type(n), str(n)) for n in numbers})

    def test_a_scalar_that_dynamo_made_an_input(self, device, config):
        f = compiled(lambda x, n: x * n, config, dynamic=True)
        x = torch.ones(3, device=device)
        for number in (3, 4, 5, 3):
            assert torch.equal(f(x, number), x * number)

    def test_inputs_that_are_written_to_are_written_back(self, device, config):
        def f(x, y):
            x.add_(y)
            return x * 2

        g = compiled(f, config)
        for _ in range(3):
            x, y = torch.randn(4, device=device), torch.randn(4, device=device)
            expected = x + y
            result = g(x, y)
            assert torch.equal(x, expected)
            assert torch.equal(result, expected * 2)
        assert captures(g)[0]["hits"] == 3

    def test_a_write_that_nobody_announced_is_found(self, device):
        f, _ = region(lambda x: torch.ops.aten.add_(x, 1) * 2, device)
        x = torch.zeros(3, device=device)
        assert f(x).tolist() == [2.0] * 3
        assert f(x).tolist() == [4.0] * 3
        assert x.tolist() == [2.0] * 3

    def test_inputs_that_share_written_memory_run_uncaptured(self, device):
        def f(x, y):
            x.add_(1)
            return y * 2

        g, record = region(f, device, ("x", "y"), written=[0])
        memory = torch.zeros(4, device=device)
        for step in (1, 2, 3):
            assert g(memory, memory[:2]).tolist() == [2.0 * step] * 2
        assert [row.declined for row in record.captures] == ["x and y share memory that is written to"]
        other = torch.zeros(4, device=device)
        assert g(other, torch.ones(2, device=device)).tolist() == [2.0, 2.0]
        assert other.tolist() == [1.0] * 4

    def test_a_shape_changed_in_place_is_refused(self, device):
        f, record = region(lambda x: x.unsqueeze_(0) + 1, device)
        assert f(torch.zeros(2, device=device)).tolist() == [[1.0, 1.0]]
        assert "shape or the memory of an input" in record.captures[0].declined

    @pytest.mark.parametrize(
        "layout",
        [
            lambda x: x,
            lambda x: x.t(),
            lambda x: x[::2],
            lambda x: x[:1].expand(6, 4),
            lambda x: x[:, 1:3],
            lambda x: x[0, 0],
            lambda x: x[:0],
            # One element, whose stride means nothing.
            lambda x: x.flatten()[:5].as_strided((1,), (5,)),
            lambda x: x.to(torch.bfloat16),
            lambda x: x.long(),
        ],
    )
    def test_every_layout(self, device, config, layout):
        f = compiled(lambda x: (x + 1, x * 2), config)
        for seed in range(3):
            x = layout(torch.randn(6, 4, generator=torch.Generator().manual_seed(seed)).to(device))
            results = f(x)
            assert all(map(torch.equal, results, (x + 1, x * 2)))
            assert [result.stride() for result in results] == [(x + 1).stride(), (x * 2).stride()]
        assert captures(f)[0]["declined"] is None

    def test_layout_dtype_and_modes_are_told_apart(self, device):
        f, record = region(lambda x: x + 1, device)
        x = torch.ones(4, 4, device=device)
        for call in (x, x.t(), x.double(), x[:2]):
            f(call)
        with torch.no_grad():
            f(x)
        with torch.inference_mode():
            f(x)
        with torch.autocast(device, dtype=torch.bfloat16):
            f(x)
        assert len(record.captures) == 7
        f(x)
        assert len(record.captures) == 7

    def test_recordings_share_the_buffers_of_their_inputs(self, device):
        regions = [region(lambda x, y, n=n: (x + n, y * n), device, ("x", "y")) for n in (2, 3)]
        args = torch.full((1000,), 5.0, device=device), torch.full((1000,), 7.0, device=device)
        kept = [[f(*args) for f, _ in regions] for _ in range(2)]
        for results in kept:
            assert [(float(x[0]), float(y[0])) for x, y in results] == [(7.0, 14.0), (8.0, 21.0)]
        first, second = (next(iter(f.sets[0].entries.values())).captured.inputs.args for f, _ in regions)
        assert [x.data_ptr() for x in first] == [x.data_ptr() for x in second]
        assert first[0].data_ptr() != first[1].data_ptr()
        assert regions[1][1].captures[0].bytes < regions[0][1].captures[0].bytes

    @pytest.mark.parametrize("shared", [False, True])
    def test_a_result_outlives_replays_of_whatever_was_recorded_before(self, device, shared):
        # Recordings share a pool: what an earlier one uses for a while lies where a later one's result is made.
        def model(x):
            y = ((x * 2).relu() + 1).sin() * 3
            return (y, y[1:]) if shared else (y, y[1:] + 1)

        f, record = region(model, device)
        made = [torch.randn(size, device=device) for size in (700, 300, 500)]
        expected = [model(x) for x in made]
        for _ in range(2):
            for x in made:
                f(x)
        for late in (2, 1):
            held = f(made[late])
            for early in range(late):
                f(made[early])
            for one, other in zip(held, expected[late], strict=True):
                assert torch.equal(one, other)
            assert (held[0].untyped_storage().data_ptr() == held[1].untyped_storage().data_ptr()) == shared
        assert not any(row.copies for row in record.captures), "each bucket's own last result was dropped in time"

    def test_our_own_buffer_is_not_copied(self, device, monkeypatch):
        f, _ = region(lambda x: x + 1, device)
        f(torch.ones(3, device=device))
        buffer = next(iter(f.sets[0].entries.values())).captured.inputs.args[0]
        original, written = torch._foreach_copy_, []
        monkeypatch.setattr(
            torch, "_foreach_copy_", lambda ours, theirs: (written.extend(ours), original(ours, theirs))
        )
        assert f(buffer).tolist() == [2.0] * 3
        assert all(tensor.data_ptr() != buffer.data_ptr() for tensor in written)

    def test_copies_of_one_dtype_are_one_launch(self, device, monkeypatch):
        f, _ = region(lambda *args: sum(args), device, ("a", "b", "c", "d"))
        args = [torch.ones(3, device=device), torch.ones(1, device=device), torch.ones(3, 3, device=device)]
        args.append(torch.ones(3, device=device, dtype=torch.bfloat16))
        kept = f(*args)
        del kept
        buffers = {arg.data_ptr() for arg in next(iter(f.sets[0].entries.values())).captured.inputs.args}
        original, calls = torch._foreach_copy_, []

        def copy(ours, theirs):
            calls.append(len(buffers & {tensor.data_ptr() for tensor in ours}))
            original(ours, theirs)

        monkeypatch.setattr(torch, "_foreach_copy_", copy)
        f(*args)
        # The emulation's own copy of the result is not among them.
        assert sorted(filter(None, calls)) == [1, 3]


@dataclasses.dataclass
class Pair:
    left: torch.Tensor
    right: dict


class TestOutputs:
    def test_two_calls_in_a_row_are_both_right(self, device, config):
        f = compiled(lambda x: x * 2, config)
        a, b = torch.ones(4, device=device), torch.full((4,), 3.0, device=device)
        for _ in range(3):
            cond, uncond = f(a), f(b)
            assert cond.tolist() == [2.0] * 4
            assert uncond.tolist() == [6.0] * 4

    def test_a_result_that_was_dropped_costs_no_copy(self, device):
        f, record = region(lambda x: x * 2, device)
        places = set()
        for value in (1.0, 2.0, 3.0):
            result = f(torch.full((4,), value, device=device))
            assert result.tolist() == [2 * value] * 4
            places.add(result.data_ptr())
            del result
        assert len(places) == 1
        assert record.captures[0].copies is False

    @pytest.mark.parametrize(
        "keep", [lambda r: r, lambda r: r[1:], lambda r: r.view(2, 2).t(), lambda r: r.detach(), lambda r: [r]]
    )
    def test_a_result_lives_while_anything_of_it_is_held(self, device, keep):
        f, record = region(lambda x: x * 2, device)
        kept = keep(f(torch.ones(4, device=device)))
        was = [t.clone() for t in (kept if isinstance(kept, list) else [kept])]
        for value in (2.0, 3.0):
            assert f(torch.full((4,), value, device=device)).tolist() == [2 * value] * 4
        assert all(map(torch.equal, kept if isinstance(kept, list) else [kept], was))
        assert record.captures[0].copies is True

    def test_writing_to_a_result_is_the_callers_right(self, device, config):
        f = compiled(lambda x: x + 1, config)
        x = torch.ones(3, device=device)
        with torch.no_grad():
            first = f(x)
        first.mul_(100)
        first.requires_grad_()
        (first * 2).sum().backward()
        assert f(x).tolist() == [2.0] * 3
        assert first.tolist() == [200.0] * 3
        del first
        assert f(x).tolist() == [2.0] * 3

    def test_views_of_inputs_are_views_of_the_callers_inputs(self, device, config):
        f = compiled(lambda x: (x.view(2, 3)[1], x * 2), config)
        x, y = torch.arange(6.0, device=device), torch.arange(6.0, 12.0, device=device)
        view, _ = f(x)
        other, _ = f(y)
        assert view.tolist() == [3.0, 4.0, 5.0]
        assert other.tolist() == [9.0, 10.0, 11.0]
        assert view.data_ptr() == x.data_ptr() + 3 * 4
        y[3] = -1
        assert other.tolist() == [-1.0, 10.0, 11.0]

    def test_an_input_that_is_returned_is_the_callers(self, device):
        f, _ = region(lambda x: (x, x + 1), device)
        for value in (1.0, 2.0):
            x = torch.full((2,), value, device=device)
            same, more = f(x)
            assert same is x
            assert more.tolist() == [value + 1] * 2

    def test_results_that_share_memory_go_on_sharing_it(self, device):
        def both(x):
            y = x * 2
            return y, y[1:]

        f, _ = region(both, device)
        pairs = [f(torch.full((3,), value, device=device)) for value in (1.0, 2.0, 3.0)]
        for value, (whole, part) in zip((1.0, 2.0, 3.0), pairs, strict=True):
            assert part.tolist() == [2 * value] * 2
            whole[1] = -1
            assert part.tolist() == [-1.0, 2 * value]

    def test_any_tree(self, device):
        def tree(x):
            return Pair(x + 1, {"deep": (x * 2, None, 7), "output": Transformer2DModelOutput(sample=x - 1)})

        f, _ = region(tree, device)
        for value in (1.0, 2.0):
            x = torch.full((2,), value, device=device)
            found = f(x)
            assert isinstance(found, Pair)
            assert torch.equal(found.left, x + 1)
            deep, nothing, number = found.right["deep"]
            assert torch.equal(deep, x * 2)
            assert (nothing, number) == (None, 7)
            assert isinstance(found.right["output"], Transformer2DModelOutput)
            assert torch.equal(found.right["output"].sample, x - 1)

    def test_a_dataclass_through_torch_compile(self, device, config):
        f = compiled(lambda x: Transformer2DModelOutput(sample=x + 1), config)
        first, second = f(torch.zeros(2, device=device)), f(torch.ones(2, device=device))
        assert first.sample.tolist() == [1.0, 1.0]
        assert second["sample"].tolist() == [2.0, 2.0]

    def test_unsafe_results_are_overwritten(self, device):
        f, _ = region(lambda x: (x * 2, (x * 2).long()), device, safe_output_mode=False)
        first, _ = f(torch.ones(2, device=device))
        second, _ = f(torch.full((2,), 5.0, device=device))
        assert first.data_ptr() == second.data_ptr()
        assert first.tolist() == [10.0, 10.0]


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


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count.add_(1)
        return self.linear(x) + self.count


class TestWeights:
    def test_a_weight_that_changed_in_place_is_read(self, device, config):
        model = nn.Linear(4, 4).to(device).requires_grad_(False)
        f = compiled(model, config)
        x = torch.randn(2, 4, device=device)
        f(x)
        with torch.no_grad():
            model.weight.mul_(3)
        assert torch.equal(f(x), model(x))
        assert captures(f)[0]["hits"] == 2

    def test_a_weight_in_another_place_is_not_read_where_it_was(self, device, config):
        model = nn.Linear(4, 4).to(device).requires_grad_(False)
        f = compiled(model, config)
        x = torch.randn(2, 4, device=device)
        f(x)
        model.bias.data = torch.full((4,), 9.0, device=device)
        assert torch.equal(f(x), model(x))
        model.weight.data = torch.randn(4, 4, device=device)
        assert torch.equal(f(x), model(x))
        assert len(captures(f)) == 1, "what was recorded at the old address is gone"

    def test_weights_that_keep_moving_are_left_alone(self, device):
        f, record = region(nn.functional.linear, device, ("x", "weight"), weights=[1])
        weight = nn.Parameter(torch.randn(4, 4, device=device), requires_grad=False)
        x = torch.randn(2, 4, device=device)
        kept = []
        for _ in range(MOST_MOVES + 2):
            kept.append(weight.data)
            weight.data = torch.randn(4, 4, device=device)
            assert torch.equal(f(x, weight), nn.functional.linear(x, weight))
        assert "moved in memory" in f.off
        assert record.captures[-1].declined == f.off

    def test_a_buffer_that_is_written_to_is_written_once_a_call(self, device, config):
        model = Counting().to(device).requires_grad_(False)
        f = compiled(model, config)
        x = torch.zeros(1, 4, device=device)
        for step in (1, 2, 3):
            assert torch.allclose(f(x), model.linear(x) + step)
            assert model.count.item() == step

    def test_equal_blocks_have_their_own_weights(self, device, config):
        blocks = [nn.Sequential(nn.Linear(4, 4), nn.SiLU()).to(device).requires_grad_(False) for _ in range(3)]
        fs = [compiled(block, config) for block in blocks]
        for _ in range(2):
            x = torch.randn(2, 4, device=device)
            for f, block in zip(fs, blocks, strict=True):
                assert torch.equal(f(x), block(x))

    def test_blocks_that_share_their_first_weight(self, device):
        f, record = region(lambda x, a, b: x * a + b, device, ("x", "a", "b"), weights=[1, 2])
        shared = torch.full((3,), 2.0, device=device)
        others = [torch.full((3,), float(value), device=device) for value in range(3)]
        x = torch.ones(3, device=device)
        for _ in range(MOST_MOVES):
            for value, other in enumerate(others):
                assert f(x, shared, other).tolist() == [2.0 + value] * 3
        assert f.off is None
        assert [row.hits for row in record.captures] == [MOST_MOVES] * 3
        del other, others[0]
        gc.collect()
        assert len(f) == 2

    def test_a_device_without_graphs_is_left_alone(self):
        f, record = region(lambda x: x + 1, "meta")
        assert f(torch.ones(3, device="meta")).shape == (3,)
        assert record.captures[0].declined == "there are no static graphs on 'meta'"

    def test_recordings_go_with_their_weights(self, device):
        f, _ = region(nn.functional.linear, device, ("x", "weight"), weights=[1])
        weight = nn.Parameter(torch.randn(4, 4, device=device), requires_grad=False)
        f(torch.randn(2, 4, device=device), weight)
        assert len(f) == 1
        del weight
        gc.collect()
        assert len(f) == 0

    def test_a_model_that_is_gone_is_gone(self, device, config):
        model = nn.Linear(4, 4).to(device).requires_grad_(False)
        f = compiled(model, config)
        f(torch.randn(2, 4, device=device))
        watched = weakref.ref(model)
        del model, f
        torch._dynamo.reset()
        gc.collect()
        assert watched() is None

    def test_frozen_weights_are_weights(self, device):
        class Scaled(nn.Module):
            def __init__(self):
                super().__init__()
                self.scale = nn.Parameter(torch.full((4,), 2.0), requires_grad=False)

            def forward(self, x):
                return x * (self.scale * 3)

        model = Scaled().to(device)
        f = compiled(model, CompilationConfig(graphs="with_compile", engine="eager", enable_freezing=True))
        x = torch.ones(2, 4, device=device)
        assert f(x).tolist() == [[6.0] * 4] * 2
        with torch.no_grad():
            model.scale.mul_(2)
        assert f(x).tolist() == [[12.0] * 4] * 2
        report = tritium.explain(f)
        assert report.frozen
        assert [entry["bucket"] for entry in report.captures] == ["x 2x4 float32"]

    def test_parameters_are_not_part_of_the_key(self, device, config, monkeypatch):
        seen = []
        from tritium.compiler.capture import bucket

        original = bucket._part
        monkeypatch.setattr(bucket, "_part", lambda value: (seen.append(value), original(value))[1])
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(5))).to(device).requires_grad_(False)
        compiled(model, config)(torch.randn(2, 4, device=device))
        assert len(seen) == 1


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

    def test_three_warm_ups(self, device):
        runs = []
        f, _ = region(lambda x: (runs.append(1), x + 1)[1], device)
        f(torch.ones(3, device=device))
        assert len(runs) == WARM_UPS + (2 if device == "cpu" else 1)


class TestFailure:
    def test_a_recording_that_fails_is_off_for_its_bucket_and_says_why(self, device, monkeypatch):
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

    def test_a_tensor_subclass_is_refused(self, device):
        class Odd(torch.Tensor):
            pass

        f, record = region(lambda x: x + 1, device)
        f(torch.ones(3, device=device).as_subclass(Odd))
        assert record.captures[0].declined == "x is a Odd, whose memory has no one address"

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
        ("argument", "reason"),
        [
            (lambda: torch.ones(3).to_sparse(), "x is torch.sparse_coo"),
            (lambda: torch.ones(3).requires_grad_(), "x needs gradients"),
            (lambda: torch.ones(6).as_strided((3, 2), (1, 1)), "elements of a tensor with strides (1, 1) share memory"),
        ],
    )
    def test_every_refusal_has_its_reason(self, argument, reason):
        f, record = region(lambda x: x * 2, "cpu")
        x = argument()
        assert torch.equal(f(x).to_dense(), (x * 2).to_dense())
        (row,) = record.captures
        assert reason in row.declined
        assert len(f) == 0

    def test_an_inputs_memory_as_another_dtype_is_refused(self, device):
        f, record = region(lambda x: x.view(torch.int32), device)
        assert f(torch.zeros(2, device=device)).tolist() == [0, 0]
        assert record.captures[0].declined == "it returns an input's memory as torch.int32"

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


BOUNDARY_CALLS = []


@tritium.plugins.custom_op("tests::boundary_sort", outputs=["x"], boundary=True)
def boundary_sort(x: torch.Tensor) -> torch.Tensor:
    BOUNDARY_CALLS.append(tuple(x.shape))
    return x.sort(dim=-1).values


class TestPieces:
    @staticmethod
    def model(x, w):
        y = x * 2 + w
        z = boundary_sort(y)
        u = (z - y).relu()
        return boundary_sort(u) + y, z

    @pytest.mark.parametrize("engine", ["eager", pytest.param("inductor", marks=pytest.mark.codegen)])
    @pytest.mark.parametrize("graphs", ["only", "with_compile"])
    def test_what_stands_between_boundaries_is_captured(self, device, graphs, engine):
        f = compiled(self.model, CompilationConfig(graphs=graphs, engine=engine))
        results, expected = [], []
        for _ in range(3):
            x, w = torch.randn(3, 5, device=device), torch.randn(5, device=device)
            expected.append(self.model(x, w))
            BOUNDARY_CALLS.clear()
            results.append(f(x, w))
            assert BOUNDARY_CALLS == [(3, 5), (3, 5)], "boundary ops run once a call, recorded or not"
        for found, right in zip(results, expected, strict=True):
            for one, other in zip(found, right, strict=True):
                torch.testing.assert_close(one, other)
        report = tritium.explain(f)
        assert [entry["piece"] for entry in report.captures] == [0, 2, 4]
        assert all(entry["hits"] == 3 for entry in report.captures)
        assert "cut at 2 boundary ops" in next(e["summary"] for e in report.passes if e["name"] == "capture")

    @pytest.mark.parametrize("engine", ["eager", pytest.param("inductor", marks=pytest.mark.codegen)])
    def test_sizes_views_and_writes_cross_a_boundary(self, device, engine):
        def model(x, n):
            row = x[0]
            x.mul_(n)
            y = boundary_sort(x)
            y.add_(row)
            return y.view(-1)[: x.shape[0]] * n, row, boundary_sort(y)

        f = compiled(model, CompilationConfig(graphs="with_compile", engine=engine), dynamic=True)
        for size, n in ((3, 2), (4, 3), (3, 2), (5, 4)):
            x = torch.randn(size, 6, device=device)
            ours, theirs = x.clone(), x.clone()
            found, right = f(ours, n), model(theirs, n)
            torch.testing.assert_close(ours, theirs)
            for one, other in zip(found, right, strict=True):
                torch.testing.assert_close(one, other)

    def test_weights_of_pieces_are_known(self, device, config):
        model = nn.Linear(5, 5).to(device).requires_grad_(False)
        f = compiled(lambda x: boundary_sort(model(x)) @ model.weight, config)
        x = torch.randn(3, 5, device=device)
        for _ in range(2):
            torch.testing.assert_close(f(x), model(x).sort(dim=-1).values @ model.weight)
        assert all("weight" not in entry["bucket"] for entry in captures(f))

    def test_weights_of_a_stock_model_itself_are_known(self, config):
        # Its own parameter, which Dynamo spells differently from those of its blocks.
        (pixart,) = workloads.find("pixart")
        built = pixart.build("cpu", torch.float32, small=True)
        f = torch.compile(built.model, backend=tritium.Backend(config))
        with torch.inference_mode():
            assert torch.equal(f(**built.inputs)[0], built.model(**built.inputs)[0])
        (entry,) = captures(f)
        assert entry["declined"] is None
        assert entry["bucket"].startswith("hidden_states 1x4x16x16 float32")
        assert "scale_shift_table" not in entry["bucket"]


class TestAuto:
    def test_a_cpu_is_left_alone_and_told_so(self):
        f = compiled(lambda x: x + 1, CompilationConfig(graphs="auto", engine="eager"))
        f(torch.ones(3))
        report = tritium.explain(f)
        assert report.captures == []
        entry = next(entry for entry in report.passes if entry["name"] == "capture")
        assert "a CPU launches nothing" in entry["declined"]

    def test_a_device_that_waits_is_captured(self, timed):
        f, entry, record = timed(host=[8.0], device=8.0, replay=5.0)
        f.call(auto.CALLS_TO_DECIDE)
        assert len(f.region) == 1
        assert record.captures[0].declined is None
        assert entry.summary == "graphs='auto': the device was idle for 38 % of a call (8.00 ms, 5.00 ms replayed)"
        assert f.ran == auto.CALLS_TO_DECIDE + WARM_UPS + 1, "besides the caller's, only the runs that a capture needs"

    def test_a_replay_that_saves_little_is_dropped(self, timed):
        f, entry, record = timed(host=[8.0], device=8.0, replay=7.92)
        f.call(auto.CALLS_TO_DECIDE + 2)
        assert len(f.region) == 0
        assert entry.declined == record.captures[0].declined
        assert entry.declined.endswith("idle for 1 % of a call (8.00 ms, 7.92 ms replayed): less than 5 %")

    def test_a_device_that_is_behind_is_left_alone(self, timed):
        f, entry, record = timed(host=[1.0], device=8.0, replay=8.0)
        f.call(auto.CALLS_TO_DECIDE)
        assert f.ran == auto.CALLS_TO_DECIDE, "nothing was captured"
        assert "the host issues a call in 1.00 of 8.00 ms" in entry.declined
        assert record.captures[0].declined == entry.declined

    def test_calls_that_begin_on_a_busy_device_do_not_wait(self, timed):
        f, entry, _ = timed(host=[8.0], device=8.0, replay=5.0, began_idle=False)
        f.call(auto.CALLS_TO_DECIDE)
        assert len(f.region) == 0
        assert "3 of 3 calls began while it was busy" in entry.declined

    def test_one_slow_host_call_decides_nothing(self, timed):
        f, entry, _ = timed(host=[1.0, 8.0, 1.0], device=8.0, replay=5.0)
        f.call(auto.CALLS_TO_DECIDE)
        assert entry.declined is not None

    def test_nothing_waits_for_marks_that_the_device_has_not_reached(self, timed):
        f, _, record = timed(host=[8.0], device=8.0, replay=5.0)
        f.done = False
        f.call(20)
        assert len(f.region) == 0
        assert record.captures[0].declined == auto.UNDECIDED
        f.done = True
        f.call(auto.CALLS_TO_DECIDE)
        assert len(f.region) == 1

    def test_each_shape_has_its_own_answer(self, timed):
        f, entry, record = timed(host=[8.0], device=8.0, replay=5.0)
        f.call(auto.CALLS_TO_DECIDE, size=2)
        f.host = [1.0]
        f.call(auto.CALLS_TO_DECIDE, size=3)
        assert [row.declined is None for row in record.captures] == [True, False]
        assert entry.changed
        assert "idle for 38 %" in entry.summary
        assert "does not wait" in entry.summary

    def test_other_weights_take_the_decision_of_the_shape(self, timed):
        f, _, record = timed(host=[8.0], device=8.0, replay=5.0)
        f.call(auto.CALLS_TO_DECIDE)
        other = torch.ones(1)
        f.call(1, weight=other)
        assert len(f.region) == 2
        assert all(row.declined is None for row in record.captures)

    def test_each_piece_of_a_graph_has_its_own_answer(self):
        entry = PassRecord("capture", changed=True, summary="cut at 1 boundary op")
        decisions = Decisions(entry)
        first, second = decisions.of((0, "x")), decisions.of((2, "x"))
        assert first is not second
        first.settle(why="idle")
        second.settle(declined="busy")
        assert entry.summary == "cut at 1 boundary op; graphs='auto': idle; busy"
        assert entry.declined is None

    def test_a_capture_that_fails_leaves_the_calls_right(self, timed):
        f, _, record = timed(host=[8.0], device=8.0, replay=5.0)
        f.region._capture = lambda *_: (_ for _ in ()).throw(RuntimeError("no memory"))
        with pytest.warns(RuntimeWarning, match="could not be captured"):
            f.call(auto.CALLS_TO_DECIDE)
        assert record.captures[0].declined == "RuntimeError: no memory"


@dataclass
class Timed:
    """A region on a device whose clock a test sets: `device` ms a call, `replay` ms a replay, `host` ms to issue one."""

    host: list[float]
    device: float
    replay: float
    began_idle: bool = True
    done: bool = True
    now: float = 0.0
    ran: int = 0
    # Kept: the captures of weights that are gone go with them.
    weight: Any = field(default_factory=lambda: torch.ones(1))
    region: Any = None

    def run(self, x, weight):
        self.ran += 1
        return x * weight

    def call(self, count, size=2, weight=None):
        weight = self.weight if weight is None else weight
        for _ in range(count):
            assert self.region(torch.full((size,), 3.0), weight).tolist() == [3.0] * size


@pytest.fixture
def timed(monkeypatch):
    """A region under graphs="auto" whose marks read a clock of the test's own."""
    state = Timed([], 0.0, 0.0)

    class Mark:
        def __init__(self):
            self.at = state.now

        def is_done(self):
            return state.done

        def until(self, later):
            return later.at - self.at

    def sampled(lane, run):
        start = Mark()
        result = run()
        captured = any(
            entry.captured is not None for weights in state.region.sets for entry in weights.entries.values()
        )
        state.now += state.replay if captured else state.device
        host = state.host[0] if len(state.host) == 1 else state.host.pop(0)
        return auto.Sample(start, Mark(), host, state.began_idle), result

    monkeypatch.setattr(auto, "sampled", sampled)

    def make(**figures):
        for name, value in figures.items():
            setattr(state, name, value)
        entry, record = PassRecord("capture", changed=True), GraphRecord("0/0", "run", "eager", "cpu")
        state.region = Region(state.run, Spec(("x", "weight"), weights=(1,)), AUTO, record, Decisions(entry))
        return state, entry, record

    return make


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

    def test_inputs_written_to(self, device):
        def f(x, y):
            x.mul_(y)
            return x.sin()

        g = compiled(f, CompilationConfig(graphs="with_compile"))
        for _ in range(2):
            x, y = torch.randn(4, device=device), torch.randn(4, device=device)
            expected = x * y
            torch.testing.assert_close(g(x, y), expected.sin())
            torch.testing.assert_close(x, expected)
