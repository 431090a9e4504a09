"""Linears in 8 bits: which are rewritten, what they share, and where their scales come from."""

import pytest
import torch
from torch import nn

import tritium
from tritium.compiler.passes import quantize
from tritium.compiler.passes.input_scales import forget_input_scales, set_input_scales
from tritium.compiler.passes.quantize import Precision, quantize_linears
from tritium.errors import PipelineError
from tritium.ops import quantize_rows, scaled_linear, weight_only_linear
from tritium.ops.quantize_rows import FP8

EAGER = tritium.CompilationConfig(engine="eager", fidelity="fast")


class Projections(nn.Module):
    """Three projections of one value and one of another."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in "qkv")
        self.out = nn.Linear(width, width)

    def forward(self, x):
        q, k, v = self.q(x), self.k(x), self.v(x)
        return self.out(torch.tanh(q) * k + v)


class Keep:
    """An early pass that notes the calls of a graph as the pass before it left them."""

    def __init__(self) -> None:
        self.graphs = []

    def __call__(self, graph, context):
        self.graphs.append([node.target for node in graph.nodes])


def nodes(graph, op):
    return [target for target in graph if target is op.overload]


def compiled_with(model, linears, config=EAGER):
    keep = Keep()
    passes = [quantize_linears(linears), tritium.passes.Pass("keep", keep, early=True)]
    return torch.compile(model, backend=tritium.Backend(config, passes=passes)), keep


def every_linear(precision):
    return dict.fromkeys(["q", "k", "v", "out"], precision)


def in_8_bits(linear, x, dtype, scale=None, rotate=0):
    q, rows = quantize_rows.reference(x, dtype, rotate, scale)
    weight, weight_scale = quantize_rows.quantize_weight(linear.weight, dtype, rotate)
    return scaled_linear.reference(q, rows, weight, weight_scale, linear.bias, x.dtype)


@pytest.mark.parametrize("precision", [Precision("fp8"), Precision("int8"), Precision("int8", rotate=16)], ids=str)
def test_one_quantization_for_each_value(precision):
    model, x = Projections(), torch.randn(2, 40, 32)
    with torch.no_grad():
        run, keep = compiled_with(model, every_linear(precision))
        made = run(x)
    (graph,) = keep.graphs
    assert len(nodes(graph, quantize_rows.OP)) == 2
    assert len(nodes(graph, scaled_linear.OP)) == 4
    dtype = torch.int8 if precision.format == "int8" else torch.float8_e4m3fn
    with torch.no_grad():
        q, k, v = (in_8_bits(linear, x, dtype, rotate=precision.rotate) for linear in (model.q, model.k, model.v))
        expected = in_8_bits(model.out, torch.tanh(q) * k + v, dtype, rotate=precision.rotate)
    torch.testing.assert_close(made, expected, rtol=1e-3, atol=1e-3)


class TestStaticScales:
    def set_all(self, model, scales, step=None):
        for linear in (model.q, model.k, model.v, model.out):
            set_input_scales(linear.weight, scales, step)

    def expected(self, model, x, scale):
        q, k, v = (in_8_bits(linear, x, torch.int8, scale) for linear in (model.q, model.k, model.v))
        return in_8_bits(model.out, torch.tanh(q) * k + v, torch.int8, scale)

    def test_the_registered_scale_is_used(self):
        model, x = Projections(), torch.randn(40, 32)
        with torch.no_grad():
            self.set_all(model, torch.tensor(2.0**-4))
            run, keep = compiled_with(model, every_linear(Precision("int8", scales="static")))
            torch.testing.assert_close(run(x), self.expected(model, x, torch.tensor(2.0**-4)))
            assert len(nodes(keep.graphs[0], quantize_rows.OP)) == 2
            # Another scale: no other code.
            self.set_all(model, torch.tensor(2.0**-5))
            torch.testing.assert_close(run(x), self.expected(model, x, torch.tensor(2.0**-5)))
            assert len(keep.graphs) == 1

    def test_a_step_selects_the_scale_without_recompiling(self):
        model, x = Projections(), torch.randn(40, 32)
        scales, step = torch.tensor([2.0**-3, 2.0**-4, 2.0**-6]), torch.zeros((), dtype=torch.int64)
        with torch.no_grad():
            self.set_all(model, scales, step)
            run, keep = compiled_with(model, every_linear(Precision("int8", scales="step", steps=3)))
            for number in (0, 1, 2, 7):
                step.fill_(number)
                torch.testing.assert_close(run(x), self.expected(model, x, scales[min(number, 2)]))
        assert len(keep.graphs) == 1

    def test_generated_code_follows_the_step(self):
        model, x = Projections(), torch.randn(40, 32)
        scales, step = torch.tensor([2.0**-3, 2.0**-5]), torch.zeros((), dtype=torch.int64)
        with torch.no_grad():
            self.set_all(model, scales, step)
            config = EAGER.with_(engine="inductor")
            run, keep = compiled_with(model, every_linear(Precision("int8", scales="step", steps=2)), config)
            for number in (0, 1, 0):
                step.fill_(number)
                torch.testing.assert_close(run(x), self.expected(model, x, scales[number]), rtol=0.05, atol=0.02)
        assert len(keep.graphs) == 1

    def test_blocks_share_code_and_have_scales_of_their_own(self):
        models, x = [Projections(), Projections()], torch.randn(40, 32)
        linears = every_linear(Precision("int8", scales="static"))
        keep = Keep()
        backend = tritium.Backend(
            EAGER, passes=[quantize_linears(linears), tritium.passes.Pass("keep", keep, early=True)]
        )
        with torch.no_grad():
            for model, scale in zip(models, (2.0**-4, 2.0**-6), strict=True):
                self.set_all(model, torch.tensor(scale))
                model.compile(backend=backend)
            for _ in range(2):
                for model, scale in zip(models, (2.0**-4, 2.0**-6), strict=True):
                    torch.testing.assert_close(model(x), self.expected(model, x, torch.tensor(scale)))
        assert len(keep.graphs) == 1

    def test_without_scales_a_linear_stays(self):
        model, x = Projections(), torch.randn(40, 32)
        with torch.no_grad():
            run, _ = compiled_with(model, every_linear(Precision("int8", scales="static")))
            torch.testing.assert_close(run(x), model(x))
        assert "no scale of its input was set" in str(tritium.explain(run).to_dict()["passes"])

    def test_scales_that_were_removed_are_an_error(self):
        model, x = Projections(), torch.randn(40, 32)
        with torch.no_grad():
            self.set_all(model, torch.tensor(2.0**-4))
            run, _ = compiled_with(model, every_linear(Precision("int8", scales="static")))
            run(x)
            forget_input_scales(model.q.weight)
            with pytest.raises(PipelineError, match="no scale of its input was set"):
                run(x)

    @pytest.mark.parametrize("scales", [torch.ones(2, 2), torch.ones(3), torch.zeros(1), torch.tensor(float("nan"))])
    def test_bad_scales_are_refused(self, scales):
        with pytest.raises(ValueError, match="scales are"):
            set_input_scales(torch.randn(4, 4), scales)


@pytest.mark.parametrize(("at_most", "products"), [(40, 2), (39, 4)])
def test_equal_inputs_of_few_rows_become_one_product(at_most, products, monkeypatch):
    model, x = Projections(), torch.randn(40, 32)
    with torch.no_grad():
        apart, _ = compiled_with(model, every_linear(Precision("int8")))
        expected = apart(x)
        torch._dynamo.reset()
        monkeypatch.setitem(quantize.JOIN_ROWS, "cpu", at_most)
        run, keep = compiled_with(model, every_linear(Precision("int8")))
        torch.testing.assert_close(run(x), expected)
        assert len(nodes(keep.graphs[0], scaled_linear.OP)) == products
        # The joined weights follow their parts.
        model.k.weight.mul_(0.5)
        assert not torch.equal(run(x), expected)


class TestBlocksWithDifferentPolicies:
    """Code compiled for one block never serves another with other formats."""

    def test_passes_are_equal_for_equal_policies_alone(self):
        chosen = {"blocks.0.q": Precision("fp8"), "blocks.1.q": Precision("fp8"), "blocks.2.q": Precision("int8")}
        first, second, third = (quantize_linears(chosen).within(f"blocks.{index}") for index in range(3))
        assert first == second != third
        assert dict(first.run.linears) == {"q": Precision("fp8")}
        assert not quantize_linears(chosen).within("blocks.3").run.linears

    def test_backends_share_code_for_equal_passes_alone(self):
        chosen = {"blocks.0.q": Precision("fp8"), "blocks.1.q": Precision("fp8"), "blocks.2.q": Precision("int8")}
        backends = [
            tritium.Backend(EAGER, passes=[quantize_linears(chosen).within(f"blocks.{index}")]) for index in range(3)
        ]
        assert backends[0] == backends[1] != backends[2]

    def test_blocks_compute_what_their_policy_says(self):
        blocks, x = [Projections() for _ in range(3)], torch.randn(40, 32)
        policies = [Precision("int8"), Precision("int8"), Precision("fp8")]
        chosen = {
            f"blocks.{index}.{name}": how for index, how in enumerate(policies) for name in ("q", "k", "v", "out")
        }
        with torch.no_grad():
            for index, block in enumerate(blocks):
                block.compile(
                    backend=tritium.Backend(EAGER, passes=[quantize_linears(chosen).within(f"blocks.{index}")])
                )
            for block, how in zip(blocks, policies, strict=True):
                dtype = torch.int8 if how.format == "int8" else torch.float8_e4m3fn
                q, k, v = (in_8_bits(linear, x, dtype) for linear in (block.q, block.k, block.v))
                expected = in_8_bits(block.out, torch.tanh(q) * k + v, dtype)
                torch.testing.assert_close(block(x), expected, rtol=1e-3, atol=1e-3)


def test_every_linear_is_quantized_or_has_a_reason():
    class Some(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.odd, self.row, self.unused = (
                nn.Linear(32, 32),
                nn.Linear(32, 7),
                nn.Linear(32, 32),
                nn.Linear(4, 4),
            )

        def forward(self, x):
            return self.odd(self.a(x)), self.row(x[:1])

    model, x = Some(), torch.randn(40, 32)
    how = {name: Precision("int8", rotate=64 if name == "odd" else 0) for name in ("a", "odd", "row", "unused")}
    with torch.no_grad():
        run, _ = compiled_with(model, how)
        run(x)
    outcomes = quantize.outcomes_of(how)
    assert {name: bool(outcome.declined) for name, outcome in outcomes.items()} == {
        "a": False,
        "odd": True,
        "row": True,
    }
    assert "no multiple of 64" in outcomes["odd"].declined
    assert "one an image" in outcomes["row"].declined


@pytest.mark.parametrize("quantized_after", [False, True])
def test_a_gelu_joins_our_product_unless_it_is_quantized(quantized_after, monkeypatch):
    class FeedForward(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(32, 64), nn.Linear(64, 32)

        def forward(self, x):
            return self.b(nn.functional.gelu(self.a(x), approximate="tanh"))

    model, x = FeedForward(), torch.randn(40, 32)
    # The pass treats the reference as the provider with an epilogue.
    monkeypatch.setattr(quantize, "EPILOGUES", "reference")
    config = EAGER.with_(force_provider={"scaled_linear": "reference"})
    how = {name: Precision("int8") for name in ("a", "b") if quantized_after or name == "a"}
    with torch.no_grad():
        run, keep = compiled_with(model, how, config)
        torch.testing.assert_close(run(x), model(x), rtol=0.1, atol=0.05)
    assert (nn.functional.gelu in keep.graphs[0]) is quantized_after


@pytest.mark.parametrize(("where", "enabled", "declined"), [("cpu", True, True), ("cpu", False, False)])
def test_automatic_casts(where, enabled, declined):
    class Casting(Projections):
        def forward(self, x):
            with torch.autocast(where, torch.bfloat16, enabled=enabled):
                x = x * 2
            return super().forward(x)

    model = Casting()
    with torch.no_grad():
        run, keep = compiled_with(model, every_linear(Precision("int8")))
        run(torch.randn(40, 32))
    assert (not nodes(keep.graphs[0], scaled_linear.OP)) is declined


@pytest.mark.parametrize("pinned", [False, True])
def test_4_bits_are_unpacked_to_float8_if_it_is_pinned(pinned):
    model, x = Projections(64), torch.randn(40, 64)
    config = EAGER.with_(force_provider={"weight_only_linear": "fp8"}, fidelity="fast") if pinned else EAGER
    how = every_linear(Precision("int4-weights", group=32))
    with torch.no_grad():
        run, keep = compiled_with(model, how, config)
        made = run(x)
        weights = {name: weight_only_linear.pack_int4(getattr(model, name).weight, 32) for name in how}

        def linear(name, value):
            weight, scale = weights[name]
            if not pinned:
                return weight_only_linear.reference(value, weight, scale, getattr(model, name).bias)
            rows, in_fp8 = quantize_rows.reference(value, FP8), weight_only_linear.int4_as_fp8(weight, scale)
            return scaled_linear.reference(*rows, *in_fp8, getattr(model, name).bias, value.dtype)

        expected = linear("out", torch.tanh(linear("q", x)) * linear("k", x) + linear("v", x))
    torch.testing.assert_close(made, expected, rtol=1e-3, atol=1e-3)
    assert len(nodes(keep.graphs[0], quantize_rows.OP)) == (2 if pinned else 0)
