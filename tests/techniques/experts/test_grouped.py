"""Routed mixtures of HiDream as grouped products: one graph, the same weights, and nothing left after removal."""

import copy

import pytest
import torch
from diffusers.models.transformers.transformer_hidream_image import MOEFeedForwardSwiGLU
from torch import nn

import tritium
from support.fidelity import assert_no_worse
from support.zoo import ZOO
from tritium import CompilationConfig, Plan
from tritium.errors import PipelineError
from tritium.techniques.choice import Choice
from tritium.techniques.experts import mixture
from tritium.techniques.experts.mixture import Grouped, find, group, ungroup

PLAN = Plan(config=CompilationConfig(engine="eager"), progress=False)


def routed(dtype=torch.float32, experts=4, chosen=2):
    torch.manual_seed(0)
    module = MOEFeedForwardSwiGLU(64, 128, experts, chosen, _force_inference_output=True)
    return module.eval().to(dtype).requires_grad_(False)


def tokens(dtype=torch.float32, count=33):
    return torch.randn(2, count, 64, generator=torch.Generator().manual_seed(1)).to(dtype)


def applied(module):
    (found,) = find(module)
    assert group(found) is None
    return found


class TestMixture:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
    def test_no_worse_than_stock(self, dtype):
        module, x = routed(dtype), tokens(dtype)
        expected, exact = module(x), copy.deepcopy(module).double()(x.double())
        applied(module)
        assert_no_worse(module(x), expected, exact)
        # The stock forward reads the same weights.
        assert torch.equal(MOEFeedForwardSwiGLU.forward(module, x), expected)

    def test_one_graph_where_there_were_five(self):
        module, x = routed(), tokens()
        assert torch._dynamo.explain(module)(x).graph_count == 5
        torch._dynamo.reset()
        applied(module)
        assert torch._dynamo.explain(module)(x).graph_count == 1

    def test_weights_are_slices_of_one_tensor(self):
        module = routed()
        parameters = list(module.parameters())
        before = {name: value.clone() for name, value in module.state_dict().items()}
        found = applied(module)
        for side in found.linears:
            (storage,) = {linear.weight.untyped_storage().data_ptr() for linear in side}
            size = side[0].weight.numel() * 4
            assert [linear.weight.data_ptr() - storage for linear in side] == [0, size, 2 * size, 3 * size]
        assert all(map(torch.equal, module.state_dict().values(), before.values()))
        assert list(module.state_dict()) == list(before)
        assert all(one is other for one, other in zip(module.parameters(), parameters, strict=True))
        ungroup(found)
        assert type(module) is MOEFeedForwardSwiGLU
        assert module.__dict__.keys() == routed().__dict__.keys()
        assert len({value.untyped_storage().data_ptr() for value in module.parameters()}) == len(parameters)
        assert all(map(torch.equal, module.state_dict().values(), before.values()))

    @pytest.mark.parametrize(
        "change",
        [
            pytest.param(lambda linear: linear.weight.data.mul_(2), id="in place", marks=pytest.mark.thorough),
            pytest.param(lambda linear: setattr(linear.weight, "data", linear.weight.data * 2), id="data"),
            pytest.param(
                lambda linear: setattr(linear, "weight", nn.Parameter(linear.weight * 2, requires_grad=False)),
                id="parameter",
                marks=pytest.mark.thorough,
            ),
            pytest.param(
                lambda linear: linear.load_state_dict({"weight": linear.weight * 2}),
                id="load",
                marks=pytest.mark.thorough,
            ),
            pytest.param(
                lambda linear: linear.load_state_dict({"weight": linear.weight * 2}, assign=True), id="assign"
            ),
        ],
    )
    def test_changed_weights_are_used(self, change):
        module, x = routed(), tokens()
        applied(module)
        compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
        first = compiled(x)
        change(module.experts[1].w1)
        expected = MOEFeedForwardSwiGLU.forward(module, x)
        torch.testing.assert_close(compiled(x), expected)
        assert not torch.allclose(first, expected)

    def test_moves_and_casts_stack_again(self):
        module = routed()
        found = applied(module)
        module.to(torch.bfloat16)
        for side in found.linears:
            assert len({linear.weight.untyped_storage().data_ptr() for linear in side}) == 1
        x = tokens(torch.bfloat16)
        torch.testing.assert_close(module(x), MOEFeedForwardSwiGLU.forward(module, x))

    def test_a_hook_on_an_expert_is_called(self):
        module, x = routed(), tokens()
        applied(module)
        seen = []
        module.experts[2].w2.register_forward_hook(lambda *_: seen.append(1))
        torch.testing.assert_close(module(x), MOEFeedForwardSwiGLU.forward(module, x))
        assert len(seen) == 2

    def test_gradients_are_those_of_all_experts(self):
        module, x = routed(), tokens()
        applied(module)
        module.experts[0].w1.weight.requires_grad_()
        module(x).sum().backward()
        assert module.experts[0].w1.weight.grad.abs().sum() > 0

    def test_another_activation_is_left_alone(self, monkeypatch):
        class Other(MOEFeedForwardSwiGLU):
            def moe_infer(self, x, indices, weights):
                return 1.1 * super().moe_infer(x, indices, weights)

        module = routed()
        module.__class__ = Other
        (found,) = find(module)
        assert "results differ by" in group(found)
        assert type(module) is Other

    def test_what_is_no_mixture(self):
        assert list(find(nn.ModuleList([nn.Linear(2, 2)]))) == []
        module = routed()
        module.experts[1].w1 = nn.Linear(64, 8, bias=False)
        assert list(find(module)) == []


@pytest.fixture(scope="module")
def hidream():
    entry = ZOO["hidream"]
    model = entry.build(torch.float32)
    inputs = entry.inputs(torch.float32)
    with torch.inference_mode():
        return model, inputs, model(**inputs)[0]


class TestTechnique:
    def test_hidream_is_one_program(self, hidream):
        model, inputs, expected = hidream
        before = {name: value.clone() for name, value in model.state_dict().items()}
        with torch.inference_mode(), tritium.optimize(model, PLAN) as handle:
            torch.testing.assert_close(model(**inputs)[0], expected)
            assert handle.part("model").refused is None
            assert sum(isinstance(inner, Grouped) for inner in model.modules()) == 2
            note = handle.part("model").technique_notes["experts"]
            assert note.text == "mixtures with 2 experts as grouped products: 2"
        assert not any(isinstance(inner, Grouped) for inner in model.modules())
        assert "patchify" not in model.__dict__
        with torch.inference_mode():
            assert torch.equal(model(**inputs)[0], expected)
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())

    @pytest.mark.parametrize(
        ("choice", "fidelity"),
        [(Choice(experts=False), "close"), (Choice(how="eager"), "close"), (Choice(), "exact")],
    )
    def test_where_it_does_not_apply(self, choice, fidelity, hidream):
        model = hidream[0]
        config = CompilationConfig(engine="eager", fidelity=fidelity)
        with tritium.optimize(model, Plan(config=config, components={"model": choice}, progress=False)):
            assert not any(isinstance(inner, Grouped) for inner in model.modules())

    def test_a_part_without_experts_says_so(self):
        model = nn.Sequential(nn.Linear(2, 2))
        with pytest.raises(PipelineError, match="it has no routed experts"):
            tritium.optimize(model, Plan(components={"model": Choice(experts=True)}))

    def test_lora_is_added(self, hidream):
        from peft import LoraConfig

        model, inputs, expected = hidream
        config = LoraConfig(r=2, target_modules=["w1", "w2"], init_lora_weights=False)
        try:
            with torch.inference_mode(), tritium.optimize(model, PLAN) as handle:
                model(**inputs)
                torch.manual_seed(3)
                model.add_adapter(config)
                found = model(**inputs)[0]
                assert handle.part("model").refused is None
            with torch.inference_mode():
                stock = model(**inputs)[0]
            torch.testing.assert_close(found, stock)
            assert not torch.allclose(stock, expected)
            # The same again, with the adapter there before.
            with torch.inference_mode(), tritium.optimize(model, PLAN):
                torch.testing.assert_close(model(**inputs)[0], stock)
        finally:
            model.delete_adapters("default")
            model.unload_lora()
        with torch.inference_mode():
            assert torch.equal(model(**inputs)[0], expected)

    def test_saving_and_loading(self, hidream, tmp_path):
        model, inputs, expected = hidream
        with tritium.optimize(model, PLAN):
            model.save_pretrained(tmp_path)
        with torch.inference_mode():
            again = type(model).from_pretrained(tmp_path).eval()
            assert torch.equal(again(**inputs)[0], expected)


@pytest.mark.thorough
def test_quantizing_leaves_grouped_experts(hidream):
    model, inputs, _ = hidream
    plan = PLAN.with_(components={"model": Choice(quantize="int8")})
    with torch.inference_mode(), tritium.optimize(model, plan) as handle:
        model(**inputs)
        kept = handle.part("model").technique_notes["quantize"].data["kept"]
    assert kept["its mixture multiplies groups of tokens in the model's dtype"] == 2 * 2 * 3


@pytest.mark.thorough
def test_bytes_of_experts_are_multiplied_one_by_one(hidream):
    model, inputs, expected = hidream
    plan = PLAN.with_(components={"model": Choice(quantize=tritium.Quantize("int8", keep="cpu"))})
    with torch.inference_mode(), tritium.optimize(model, plan) as handle:
        found = model(**inputs)[0]
        assert handle.part("model").refused is None
    assert 0 < (found - expected).norm() / expected.norm() < 0.05
    with torch.inference_mode():
        assert torch.equal(model(**inputs)[0], expected)


def test_a_failure_leaves_the_model_as_it_was(monkeypatch, hidream):
    model = hidream[0]
    grouped = []

    def fail_at_the_second(found, *settings):
        if grouped:
            raise RuntimeError("no memory")
        grouped.append(found)
        return mixture.group(found, *settings)

    monkeypatch.setattr(tritium.techniques.experts, "group", fail_at_the_second)
    with pytest.raises(RuntimeError, match="no memory"):
        tritium.optimize(model, PLAN)
    assert not any(isinstance(inner, Grouped) for inner in model.modules())
