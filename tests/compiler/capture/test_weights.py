"""Weights are read at their addresses, and captures go with them."""

import gc
import weakref

import torch
from torch import nn

import tritium
from support.capture import captures, compiled, region
from tritium import CompilationConfig
from tritium.compiler.capture.region import MOST_MOVES


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

    def test_weights_that_take_turns_at_one_address_share_a_capture(self, device):
        f, record = region(nn.functional.linear, device, ("x", "weight"), weights=[1])
        slot, x = torch.zeros(4, 4, device=device), torch.randn(2, 4, device=device)
        blocks = [nn.Parameter(slot.data, requires_grad=False) for _ in range(3)]
        for turn in range(6):
            slot.fill_(turn)
            assert torch.equal(f(x, blocks[turn % 3]), nn.functional.linear(x, slot))
        assert len(f) == len(f.sets) == len(record.captures) == 1
        # A block that moves away takes the capture with it, and the others capture again.
        blocks[0].data = torch.ones(4, 4, device=device)
        for block in blocks:
            assert torch.equal(f(x, block), nn.functional.linear(x, block))
        assert len(f) == 2
        f.clear()
        assert len(f) == len(record.captures) == 0
