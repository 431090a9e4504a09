"""Quantization in the kernels that produce the rows, and fusions that a quantized linear refuses."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tritium
from support.fidelity import assert_no_worse
from tritium.compiler.passes.input_scales import set_input_scales
from tritium.compiler.passes.quantize import Precision, quantize_linears
from tritium.ops import norm_quantize, quantize_parts, quantize_rows
from tritium.passes import Pass

EAGER = tritium.CompilationConfig(engine="eager", fidelity="fast")
WIDTH, HEADS = 64, 4
FP8 = Precision("fp8")


class Norm(nn.Module):
    """A gated residual, norm and modulation before two projections."""

    def __init__(self, norm=None, *, keeps=False):
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 32)
        self.norm, self.keeps = norm or (lambda x: F.layer_norm(x, (WIDTH,), eps=1e-6)), keeps

    def forward(self, x, y, gate, scale, shift):
        x = x + gate * y
        m = self.norm(x) * (1 + scale) + shift
        a, b = self.a(m), self.b(m)
        return (x, a, b, m.tanh()) if self.keeps else (x, a, b)


class Plain(Norm):
    def forward(self, x, y, gate, scale, shift):
        return (self.a(self.norm(x) * (1 + scale) + shift),)


class FeedForward(nn.Module):
    def __init__(self, activation, gated=False):
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, 256), nn.Linear(128 if gated else 256, WIDTH)
        self.activation = activation

    def forward(self, x):
        return self.b(self.activation(self.a(x)))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def attend(self, x):
        q, k, v = (one(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for one in (self.a, self.b, self.c))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)

    def forward(self, x):
        return self.out(self.attend(x))


class Single(Attention):
    """The end of a FLUX single block."""

    def __init__(self):
        super().__init__()
        self.mlp, self.out = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(5 * WIDTH, WIDTH)

    def forward(self, x):
        return self.out(torch.cat([self.attend(x), F.gelu(self.mlp(x), approximate="tanh")], dim=-1))


class Pieces(Attention):
    """Text and image are projected apart, as in a FLUX double block."""

    def forward(self, x):
        text, image = self.attend(x).split_with_sizes([12, x.shape[1] - 12], dim=1)
        return self.out(text), self.out(image)


def swiglu(x):
    gate, value = x.chunk(2, dim=-1)
    return F.silu(gate) * value


def linears(model, precision):
    return {name: precision for name, module in model.named_modules() if isinstance(module, nn.Linear)}


def run(model, *inputs, precision=FP8, config=EAGER):
    """Compile with every linear quantized; return results, the ops of the graph, the sites and the rows of its passes."""
    torch._dynamo.reset()
    graphs = []
    passes = [
        quantize_linears(linears(model, precision)),
        Pass("read", lambda graph, _: graphs.append(list(graph.nodes))),
    ]
    compiled = torch.compile(model, backend=tritium.Backend(config, passes=passes), fullgraph=True)
    with torch.inference_mode():
        result = compiled(*inputs)
    ops = [node for node in graphs[0] if node.op == "call_function"]
    return result, ops, tritium.explain(compiled).sites


def calls(ops, op):
    return [node for node in ops if node.target is op.overload]


def parts(result):
    return result if isinstance(result, tuple) else (result,)


def check(model, *inputs, **others):
    """Compare with the same linears without these fusions, both against float32."""
    made, ops, sites = run(model, *inputs, **others)
    off = EAGER.with_(fusion_patterns=tritium.FusionPatterns(enable_quantize_rows=False))
    plain, _, _ = run(model, *inputs, **others, config=off)
    with torch.inference_mode():
        truth = model(*inputs)
    for one, other, exact in zip(parts(made), parts(plain), parts(truth), strict=True):
        assert one.stride() == exact.stride()
        assert_no_worse(one, other, exact.double())
    return ops, sites


def modulation(tokens=20):
    x, y = torch.randn(2, tokens, WIDTH), torch.randn(2, tokens, WIDTH)
    return x, y, *torch.randn(2, 1, 3 * WIDTH).chunk(3, dim=-1)


PRECISIONS = [FP8, Precision("int8"), Precision("int8", rotate=16)]


@pytest.mark.parametrize("precision", PRECISIONS, ids=str)
class TestNorms:
    def test_a_residual_norm(self, precision):
        ops, sites = check(Norm(), *modulation(), precision=precision)
        (fused,) = calls(ops, norm_quantize.OP)
        assert norm_quantize.OP.bind(*fused.args).keep is False
        assert not calls(ops, quantize_rows.OP)
        assert sites["quantize_rows"].fused == 1

    def test_an_rms_norm(self, precision):
        ops, _ = check(Norm(lambda x: F.rms_norm(x, (WIDTH,), eps=1e-6)), *modulation(), precision=precision)
        assert len(calls(ops, norm_quantize.OP)) == 1

    def test_no_residual(self, precision):
        ops, _ = check(Plain(), *modulation(), precision=precision)
        (fused,) = calls(ops, norm_quantize.OP)
        assert norm_quantize.OP.bind(*fused.args).y is None

    def test_another_reader_gets_the_modulated_value(self, precision):
        ops, _ = check(Norm(keeps=True), *modulation(), precision=precision)
        (fused,) = calls(ops, norm_quantize.OP)
        assert norm_quantize.OP.bind(*fused.args).keep is True


class TestParts:
    @pytest.mark.parametrize(
        ("activation", "gated", "kinds"),
        [
            (lambda x: F.gelu(x, approximate="tanh"), False, "gelu_tanh"),
            (F.gelu, False, "gelu"),
            (swiglu, True, "silu_gated"),
        ],
    )
    def test_feed_forwards(self, activation, gated, kinds):
        ops, sites = check(FeedForward(activation, gated), torch.randn(2, 20, WIDTH))
        first, second = calls(ops, quantize_parts.OP)
        assert [quantize_parts.OP.bind(*node.args).kinds for node in (first, second)] == ["plain", kinds]
        assert "linear_gelu" not in sites

    def test_attention_s_heads_are_joined(self):
        ops, _ = check(Attention(), torch.randn(2, 20, WIDTH))
        assert [quantize_parts.OP.bind(*node.args).kinds for node in calls(ops, quantize_parts.OP)] == [
            "plain",
            "heads",
        ]

    def test_text_and_image(self):
        ops, _ = check(Pieces(), torch.randn(2, 30, WIDTH))
        assert [quantize_parts.OP.bind(*node.args).kinds for node in calls(ops, quantize_parts.OP)] == ["plain"] * 3

    @pytest.mark.parametrize("precision", PRECISIONS, ids=str)
    def test_a_single_block_writes_one_buffer(self, precision):
        ops, sites = check(Single(), torch.randn(2, 20, WIDTH), precision=precision)
        kinds = [quantize_parts.OP.bind(*node.args).kinds for node in calls(ops, quantize_parts.OP)]
        assert kinds == ["plain", "heads,gelu_tanh"]
        assert not any(node.target is torch.cat for node in ops)
        assert "cat_linear" not in sites


@pytest.mark.parametrize(("scales", "steps"), [("static", 1), ("step", 3)])
@pytest.mark.parametrize("make", [Norm, Single], ids=["norm", "single"])
def test_static_scales_reach_the_kernels(make, scales, steps):
    model = make()
    step = torch.full((), 1) if scales == "step" else None
    for module in model.modules():
        if isinstance(module, nn.Linear):
            set_input_scales(module.weight, torch.full((steps,), 2.0**-4), step)
    inputs = modulation() if make is Norm else (torch.randn(2, 20, WIDTH),)
    ops, _ = check(model, *inputs, precision=Precision("int8", scales=scales, steps=steps))
    assert not calls(ops, quantize_rows.OP)
    for node in calls(ops, norm_quantize.OP):
        given = norm_quantize.OP.bind(*node.args)
        assert given.static is not None
        assert (given.step is not None) is (scales == "step")
    for node in calls(ops, quantize_parts.OP):
        assert quantize_parts.OP.bind(*node.args).scale is not None


class TestLeftAlone:
    def test_pointwise_values_are_quantized_by_inductor(self):
        ops, _ = check(FeedForward(torch.tanh), torch.randn(2, 20, WIDTH))
        assert len(calls(ops, quantize_rows.OP)) == 1

    def test_a_gelu_that_is_read_elsewhere(self):
        class Read(FeedForward):
            def forward(self, x):
                active = F.gelu(self.a(x))
                return self.b(active), active.amax()

        ops, sites = check(Read(F.gelu), torch.randn(2, 20, WIDTH))
        assert len(calls(ops, quantize_rows.OP)) == 1
        assert any("used elsewhere" in reason for reason in sites["quantize_rows"].reasons)

    def test_a_concatenation_of_tokens(self):
        class Tokens(FeedForward):
            def forward(self, x):
                return self.b(torch.cat([self.a(x), self.a(2 * x)], dim=1))

        ops, _ = check(Tokens(F.gelu), torch.randn(2, 20, WIDTH))
        assert all("," not in quantize_parts.OP.bind(*node.args).kinds for node in calls(ops, quantize_parts.OP))

    def test_the_switch(self):
        off = EAGER.with_(fusion_patterns=tritium.FusionPatterns(enable_quantize_rows=False))
        _, ops, _ = run(Norm(), *modulation(), config=off)
        assert not calls(ops, norm_quantize.OP)

    def test_a_gelu_after_a_quantized_linear(self):
        class Only(FeedForward):
            def forward(self, x):
                return F.gelu(self.a(x), approximate="tanh").amax(-1)

        _, _, sites = run(Only(F.gelu), torch.randn(2, 20, WIDTH))
        assert any("the linear is quantized" in reason for reason in sites["linear_gelu"].reasons)

    def test_three_parts(self):
        class Three(FeedForward):
            def forward(self, x):
                first, second, third = self.a(x).split_with_sizes([64, 64, 128], dim=-1)
                return self.b(torch.cat([first, third, second], dim=-1))

        ops, sites = check(Three(F.gelu), torch.randn(2, 20, WIDTH))
        assert len(calls(ops, quantize_rows.OP)) == 1
        assert any("one scale for all parts" in reason for reason in sites["cat_linear"].reasons)
