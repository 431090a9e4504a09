"""Replays read owned buffers: the caller's tensors are never written, and every layout is its own bucket."""

import pytest
import torch

from support.capture import captures, compiled, region


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
    def test_a_result_outlives_replays_of_earlier_captures(self, device, shared):
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
