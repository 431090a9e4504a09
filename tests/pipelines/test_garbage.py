"""The collector while something compiles: old objects are left alone, new garbage is found, and all is as before afterwards."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import tritium
from tritium import CompilationConfig, Plan
from tritium.pipelines import garbage


class Knot:
    """Something that only the collector frees."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def _collector() -> Iterator[None]:
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0
    yield
    gc.enable()
    gc.unfreeze()


def test_new_garbage_is_collected_and_old_is_later() -> None:
    old = weakref.ref(knot := Knot())
    del knot
    with garbage.new_alone():
        new = weakref.ref(knot := Knot())
        del knot
        gc.collect()
        assert new() is None
        assert old() is not None
    gc.collect()
    assert old() is None


def test_an_error_leaves_nothing_frozen() -> None:
    with pytest.raises(RuntimeError), garbage.new_alone():
        raise RuntimeError
    assert gc.get_freeze_count() == 0


def test_what_somebody_has_frozen_stays_frozen() -> None:
    gc.freeze()
    frozen = gc.get_freeze_count()
    with garbage.new_alone():
        assert gc.get_freeze_count() == frozen
    assert gc.get_freeze_count() == frozen


def test_a_collector_that_is_off_is_left_alone() -> None:
    gc.disable()
    with garbage.new_alone():
        assert gc.get_freeze_count() == 0
    assert not gc.isenabled()


def test_a_part_compiles_with_old_objects_at_rest_and_runs_without(monkeypatch: pytest.MonkeyPatch) -> None:
    frozen: list[bool] = []

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.linear = nn.LayerNorm(4), nn.Linear(4, 4)

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            frozen.append(gc.get_freeze_count() > 0)
            return self.linear(self.norm(hidden))

    class Denoiser(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(2))

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                hidden = block(hidden)
            return hidden

    # What a compiled function runs is not Python any more: the uncompiled one sees the collector's state.
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    denoiser = Denoiser()
    pipe = SimpleNamespace(components={"transformer": denoiser})
    plan = Plan(config=CompilationConfig(engine="eager"), progress=False)
    with tritium.optimize(pipe, plan), torch.no_grad():
        for _ in range(2):
            denoiser(torch.rand(1, 3, 4))
    assert frozen == [True, True, False, False]
