"""Freezing is a promise about speed, never about answers."""

import gc

import pytest
import torch
from torch import nn

import tritium
from support.freezing import count_freezing
from tritium.compat.peft import MERGES
from tritium.compiler.passes import freezing

FREEZE = tritium.CompilationConfig(engine="eager", enable_freezing=True)


class Freezes(nn.Module):
    """A fused projection and an effective scale, both made from parameters and a buffer alone."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.q = nn.Linear(width, width)
        self.k = nn.Linear(width, width)
        self.register_buffer("scale", torch.rand(width))

    def forward(self, x):
        weight = torch.cat([self.q.weight, self.k.weight])
        return nn.functional.linear(x * (1 + self.scale.exp()), weight)


def compile_freezing(model, **kwargs):
    return torch.compile(model, backend=tritium.Backend(FREEZE), **kwargs)


def frozen(compiled) -> list[dict]:
    return [entry for entry in tritium.explain(compiled).frozen if entry["declined"] is None]


def test_the_report_lists_what_was_frozen():
    model, x = Freezes(), torch.randn(3, 8)
    with torch.no_grad():
        compiled = compile_freezing(model)
        torch.testing.assert_close(compiled(x), model(x))
    entries = frozen(compiled)
    assert [list(entry["sources"]) for entry in entries] == [["self.q.weight", "self.k.weight"], ["self.scale"]]
    assert [entry["bytes"] for entry in entries] == [16 * 8 * 4, 8 * 4]
    assert "self.q.weight" in str(tritium.explain(compiled))
    off = torch.compile(model, backend=tritium.Backend(FREEZE.with_(enable_freezing=False)))
    with torch.no_grad():
        off(x)
    assert tritium.explain(off).records[-1].frozen == []


def test_it_is_computed_once(monkeypatch):
    model, x = Freezes(), torch.randn(3, 8)
    runs = count_freezing(monkeypatch)
    with torch.no_grad():
        compiled = compile_freezing(model)
        for _ in range(4):
            compiled(x)
        assert len(runs) == 1
        model.q.weight.mul_(2)
        compiled(x)
        compiled(x)
    assert len(runs) == 2


def test_two_equal_blocks_keep_their_own_values():
    first, second, x = Freezes(), Freezes(), torch.randn(3, 8)
    with torch.no_grad():
        expected = first(x), second(x)
        for model in (first, second):
            model.compile(backend=tritium.Backend(FREEZE))
        for _ in range(2):
            torch.testing.assert_close((first(x), second(x)), expected)
    assert len(tritium.explain().records) == 1


CHANGES = {
    "in place": lambda model: model.q.weight.mul_(2),
    "in place on a buffer": lambda model: model.scale.add_(1),
    "load_state_dict": lambda model: model.load_state_dict(Freezes().state_dict()),
    "load_state_dict(assign=True)": lambda model: model.load_state_dict(Freezes().state_dict(), assign=True),
    "a new parameter": lambda model: setattr(model.q, "weight", nn.Parameter(torch.randn(8, 8))),
    "new data": lambda model: setattr(model.q.weight, "data", torch.randn(8, 8)),
    "copy_": lambda model: model.q.weight.copy_(torch.randn(8, 8)),
    "an optimiser step": lambda model: _optimise(model),
}


def _optimise(model) -> None:
    model.q.weight.grad = torch.ones(8, 8)
    torch.optim.SGD([model.q.weight], lr=1.0).step()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_weights_is_seen(change, mode):
    model, x = Freezes(), torch.randn(3, 8)
    compiled = compile_freezing(model)
    with mode():
        before = compiled(x)
    assert frozen(compiled)
    with torch.no_grad():
        CHANGES[change](model)
    with mode():
        after = compiled(x)
        torch.testing.assert_close(after, model(x))
    assert not torch.equal(before, after)


def test_a_change_under_inference_mode_is_seen():
    model, x = Freezes(), torch.randn(3, 8)
    with torch.inference_mode():
        compiled = compile_freezing(model)
        compiled(x)
        model.q.weight.mul_(3)
        torch.testing.assert_close(compiled(x), model(x))


def test_new_data_at_an_old_address_is_seen():
    """The allocator hands out the same memory again; the storage is another one all the same."""
    model, x = Freezes(), torch.randn(3, 8)
    with torch.no_grad():
        compiled = compile_freezing(model)
        compiled(x)
        for value in range(20):
            # What was there before has no other owner, and is free at once.
            model.q.weight.data = torch.full((8, 8), float(value))
            torch.testing.assert_close(compiled(x), model(x))


def test_inference_weights_cannot_be_tracked_and_are_not_frozen():
    with torch.inference_mode():
        model, x = Freezes(), torch.randn(3, 8)
        compiled = compile_freezing(model)
        torch.testing.assert_close(compiled(x), model(x))
        model.q.weight.mul_(2)
        torch.testing.assert_close(compiled(x), model(x))
    assert frozen(compiled) == []
    assert {entry["declined"] for entry in tritium.explain(compiled).frozen} == {freezing.UNTRACKED}


class TestWhatIsNotFrozen:
    def check(self, function, *parameters) -> list[dict]:
        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.w = nn.Parameter(torch.rand(4, 4))
                self.register_buffer("b", torch.rand(4))

            def forward(self, x):
                return function(self, x)

        model, x = Model(), torch.randn(2, 4)
        with torch.no_grad():
            compiled = compile_freezing(model)
            self.result = compiled(x)
        self.model, self.x, self.compiled = model, x, compiled
        return tritium.explain(compiled).frozen

    @pytest.mark.parametrize(
        "function",
        [
            pytest.param(lambda self, x: x @ self.w.t(), id="a view"),
            pytest.param(lambda self, x: x @ (self.w * 2).mul_(3), id="written to"),
            pytest.param(lambda self, x: x * self.b, id="of an input"),
        ],
    )
    def test_a_value(self, function):
        assert self.check(function) == []
        with torch.no_grad():
            torch.testing.assert_close(self.result, function(self.model, self.x))

    def test_a_random_value(self):
        assert self.check(lambda self, x: x + torch.rand_like(self.b) * self.b) == []
        with torch.no_grad():
            assert not torch.equal(self.compiled(self.x), self.result)

    def test_a_returned_value(self):
        entries = self.check(lambda self, x: (x + 1, self.w * 2))
        assert entries[0]["declined"] == "it is returned, and the caller may write to it"
        with torch.no_grad():
            again = self.compiled(self.x)[1]
            again.zero_()
            torch.testing.assert_close(self.compiled(self.x)[1], self.model.w * 2)

    def test_a_buffer_the_graph_updates(self):
        def function(self, x):
            self.b.add_(1)
            return x * (self.b * 2)

        assert self.check(function) == []
        with torch.no_grad():
            first, second = self.compiled(self.x), self.compiled(self.x)
        torch.testing.assert_close(second - first, self.x * 2)


def test_dynamic_shapes():
    model = Freezes()
    with torch.no_grad():
        compiled = compile_freezing(model, dynamic=True)
        for rows in (3, 7, 1, 63):
            x = torch.randn(rows, 8)
            torch.testing.assert_close(compiled(x), model(x))
    assert frozen(compiled)


def test_forgotten_models_leave_no_values_behind():
    model, x = Freezes(), torch.randn(3, 8)
    values = []
    original = freezing.FrozenValues.__init__

    class Spy(freezing.FrozenValues):
        def __init__(self, program):
            original(self, program)
            values.append(self)

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(freezing, "FrozenValues", Spy)
        model.compile(backend=tritium.Backend(FREEZE))
        model(x)
        other = Freezes()
        other.compile(backend=tritium.Backend(FREEZE))
        other(x)
        assert len(values[0]._entries) == 2
        del other
        gc.collect()
        assert len(values[0]._entries) == 1


class TestPeft:
    """PEFT merges through `.data`, which no version counter sees."""

    @pytest.fixture
    def adapted(self):
        peft = pytest.importorskip("peft")

        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.proj = nn.Linear(8, 8)

            def forward(self, x):
                # Reaches the weight as diffusers' own fused projections do.
                layer = self.proj.base_layer if hasattr(self.proj, "base_layer") else self.proj
                return nn.functional.linear(x, torch.cat([layer.weight, layer.weight + 1]))

        torch.manual_seed(0)
        model = Model()
        config = peft.LoraConfig(r=2, target_modules=["proj"], init_lora_weights=False)
        peft.inject_adapter_in_model(config, model)
        return model

    @pytest.mark.parametrize("enable_freezing", [True, False])
    def test_fuse_and_unfuse(self, adapted, enable_freezing):
        x = torch.randn(3, 8)
        backend = tritium.Backend(FREEZE.with_(enable_freezing=enable_freezing))
        with torch.no_grad():
            compiled = torch.compile(adapted, backend=backend)
            plain = compiled(x)
            adapted.proj.merge()
            merged = compiled(x)
            assert not torch.allclose(merged, plain)
            torch.testing.assert_close(merged, adapted(x))
            adapted.proj.unmerge()
            torch.testing.assert_close(compiled(x), adapted(x))
            adapted.proj.scaling["default"] *= 3
            adapted.proj.merge(safe_merge=True)
            torch.testing.assert_close(compiled(x), adapted(x))
        assert bool(frozen(compiled)) is enable_freezing

    def test_layers_defined_later_are_watched_too(self, adapted):
        from peft.tuners.tuners_utils import BaseTunerLayer

        MERGES.now()

        class Later(BaseTunerLayer):
            def merge(self, *args, **kwargs):
                return "merged"

        count = MERGES.now()
        assert Later.merge(object.__new__(Later)) == "merged"
        assert MERGES.now() == count + 1
