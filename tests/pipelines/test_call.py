"""The garbage collector comes back, whatever happens."""

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import tritium
from tritium import CompilationConfig, Plan
from tritium.collector import collector_paused


class Knot:
    """Something that only the collector frees."""

    def __init__(self):
        self.itself = self


@pytest.fixture(autouse=True)
def enabled():
    gc.enable()
    yield
    gc.unfreeze()
    gc.enable()


def test_paused_inside_and_back_afterwards():
    with collector_paused():
        assert not gc.isenabled()
        with collector_paused():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()


def test_back_after_an_error():
    with pytest.raises(RuntimeError, match="mine"), collector_paused():
        raise RuntimeError("mine")
    assert gc.isenabled()


def test_who_switched_it_off_keeps_it_off():
    gc.disable()
    with collector_paused():
        pass
    assert not gc.isenabled()


def test_what_was_made_inside_is_old_afterwards():
    gc.collect()
    with collector_paused():
        held = [[] for _ in range(100_000)]
    assert gc.get_count()[0] < 1000
    assert any(entry is held for entry in gc.get_objects(generation=2))
    assert gc.get_freeze_count() == 0


def test_garbage_of_inside_is_found_by_a_full_collection():
    with collector_paused():
        knot = weakref.ref(Knot())
        assert knot() is not None
    gc.collect()
    assert knot() is None


def test_what_somebody_has_frozen_stays_frozen():
    # Not by their number: some are freed meanwhile, whose last reference goes.
    held = [Knot()]
    gc.freeze()
    with collector_paused():
        pass
    assert gc.get_freeze_count() > 0
    assert not any(entry is held for generation in range(3) for entry in gc.get_objects(generation=generation))


def test_it_is_paused_for_the_first_call_of_a_part(monkeypatch):
    paused = []

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.linear = nn.LayerNorm(4), nn.Linear(4, 4)

        def forward(self, hidden):
            paused.append(not gc.isenabled())
            return self.linear(self.norm(hidden))

    class Denoiser(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(2))

        def forward(self, hidden):
            for block in self.blocks:
                hidden = block(hidden)
            return hidden

    # What a compiled function runs is not Python any more: the uncompiled one sees the collector.
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    denoiser = Denoiser()
    pipe = SimpleNamespace(components={"transformer": denoiser})
    plan = Plan(config=CompilationConfig(engine="eager"), progress=False)
    with tritium.optimize(pipe, plan), torch.no_grad():
        for _ in range(2):
            denoiser(torch.rand(1, 3, 4))
    assert paused == [True, True, False, False]
