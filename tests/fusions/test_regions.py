"""Regions: their spellings, reasons to leave them alone, and the sites that they count."""

import pytest
import torch
import torch.nn.functional as F

import tritium
from support.fidelity import assert_no_worse
from support.recognition import EAGER, recognise
from tritium.compiler.passes.rewrite import DEPENDS_ON_ITSELF, EFFECTS_BETWEEN

HEADS, WIDTH = 3, 8


def parts(result):
    return result if isinstance(result, tuple) else (result,)


def check(function, *inputs, config=EAGER, **kwargs):
    """Run it, compare with float64 by `close`, and return the sites."""
    result, sites = recognise(function, *inputs, config=config, **kwargs)
    wide = [t.to(torch.complex128) if t.is_complex() else t.double() for t in inputs]
    with torch.inference_mode():
        eager, exact = function(*inputs), function(*wide)
    for made, plain, truth in zip(parts(result), parts(eager), parts(exact), strict=True):
        assert made.stride() == plain.stride()
        assert_no_worse(made, plain, truth)
    return sites


def draw(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def rms(x, w=None):
    return F.rms_norm(x, (x.shape[-1],), w, 1e-6)


def layer(x):
    return F.layer_norm(x, (x.shape[-1],), eps=1e-6)


def heads(x):
    return x.unflatten(-1, (HEADS, WIDTH))


def turn(x, cos, sin):
    """Interleaved, as FLUX writes it, over [B, S, H, D]."""
    real, imaginary = x.reshape(*x.shape[:-1], -1, 2).unbind(-1)
    rotated = torch.stack([-imaginary, real], -1).flatten(3)
    return (x.float() * cos + rotated.float() * sin).to(x.dtype)


def turn_complex(x, table):
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * table.unsqueeze(1)).flatten(3).type_as(x)


def attend(q, k, v):
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def flux(text_q, text_k, q, k, v, w, cos, sin):
    joint = [
        turn(torch.cat([rms(heads(text), w), rms(heads(image), w)], 1), cos[None, :, None], sin[None, :, None])
        for text, image in ((text_q, q), (text_k, k))
    ]
    return attend(*(x.transpose(1, 2) for x in (*joint, heads(v))))


def flux_single(q, k, v, w, cos, sin):
    both = [turn(rms(heads(x), w), cos[None, :, None], sin[None, :, None]) for x in (q, k)]
    return attend(*(x.transpose(1, 2) for x in (*both, heads(v))))


def qwen(text_q, text_k, q, k, v, w, text_table, table):
    joint = [
        torch.cat([turn_complex(rms(heads(text), w), text_table), turn_complex(rms(heads(image), w), table)], 1)
        for text, image in ((text_q, q), (text_k, k))
    ]
    return attend(*(x.transpose(1, 2) for x in (*joint, heads(v))))


def wan(q, k, v, w, cos, sin):
    both = [turn(heads(rms(x, w)), cos[None, :, None], sin[None, :, None]) for x in (q, k)]
    return attend(*(x.transpose(1, 2) for x in (*both, heads(v))))


def sd3(text_q, text_k, q, k, v, w):
    joint = [
        torch.cat([rms(heads(image).transpose(1, 2), w), rms(heads(text).transpose(1, 2), w)], dim=2)
        for text, image in ((text_q, q), (text_k, k))
    ]
    return attend(*joint, heads(v).transpose(1, 2))


def hunyuan(text_q, text_k, q, k, v, w, cos, sin):
    """Only the image is rotated, with heads before tokens."""

    def turned(x):
        first, second = x.chunk(2, -1)
        return (x.float() * cos + torch.cat([-second, first], -1) * sin).to(x.dtype)

    joint = [
        torch.cat([turned(rms(heads(image).transpose(1, 2), w)), rms(heads(text).transpose(1, 2), w)], dim=2)
        for text, image in ((text_q, q), (text_k, k))
    ]
    return attend(*joint, heads(v).transpose(1, 2))


def qk_inputs(form, dtype, text=4, tokens=7, batch=2):
    flat = HEADS * WIDTH
    w = draw(WIDTH if form is not wan else flat, dtype=dtype, seed=1)
    images = [draw(batch, tokens, flat, dtype=dtype, seed=seed) for seed in (2, 3)]
    texts = [draw(batch, text, flat, dtype=dtype, seed=seed) for seed in (4, 5)]
    joint = form in (flux, qwen, sd3, hunyuan)
    v = draw(batch, tokens + text if joint else tokens, flat, dtype=dtype, seed=6)
    angles = draw(tokens + text if form is flux else tokens, WIDTH // 2, seed=7).repeat_interleave(2, -1)
    tables = {
        qwen: [torch.polar(torch.ones(size, WIDTH // 2), draw(size, WIDTH // 2)) for size in (text, tokens)],
        sd3: [],
    }.get(form, [angles.cos(), angles.sin()])
    return [*(texts if joint else ()), *images, v, w, *tables]


# The sites of each: attentions, norms, rotations.
ATTENTIONS = {
    flux: (1, 4, 2),
    flux_single: (1, 2, 2),
    qwen: (1, 4, 4),
    wan: (1, 2, 2),
    sd3: (1, 4, 0),
    hunyuan: (1, 4, 2),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", ATTENTIONS, ids=lambda form: form.__name__)
def test_query_and_key_of_an_attention(form, dtype):
    regions, norms, ropes = ATTENTIONS[form]
    sites = check(form, *qk_inputs(form, dtype))
    assert (sites["qk_norm_rope"].fused, sites["qk_norm_rope"].declined) == (regions, 0), sites["qk_norm_rope"].reasons
    # What the region swallows counts in the families it covers.
    assert (sites["rms_norm"].fused, sites["rope"].fused) == (norms, ropes)
    assert any("part of qk_norm_rope" in reason for reason in sites["rms_norm"].reasons)


@pytest.mark.parametrize("form", [flux, qwen, wan, sd3], ids=lambda form: form.__name__)
def test_one_graph_serves_all_token_counts(form):
    compiled = torch.compile(form, backend=tritium.Backend(EAGER), fullgraph=True, dynamic=True)
    for tokens in (7, 100, 63):
        inputs = qk_inputs(form, torch.float32, tokens=tokens)
        with torch.inference_mode():
            torch.testing.assert_close(compiled(*inputs), form(*inputs), rtol=1e-4, atol=1e-5)
    report = tritium.explain(compiled)
    assert len(report.records) == 1
    assert report.sites["qk_norm_rope"].fused == 1


class TestAttentionsThatAreLeftAlone:
    def test_different_tables(self):
        def function(q, k, v, w, cos, sin):
            both = [turn(rms(heads(x), w), c[None, :, None], sin[None, :, None]) for x, c in ((q, cos), (k, sin))]
            return attend(*(x.transpose(1, 2) for x in (*both, heads(v))))

        sites = check(function, *qk_inputs(flux_single, torch.float32))
        assert sites["qk_norm_rope"].reasons == {"query and key are rotated by different tables": 1}

    def test_only_the_query_is_rotated(self):
        def function(q, k, v, w, cos, sin):
            q = turn(rms(heads(q), w), cos[None, :, None], sin[None, :, None])
            return attend(*(x.transpose(1, 2) for x in (q, rms(heads(k), w), heads(v))))

        sites = check(function, *qk_inputs(flux_single, torch.float32))
        assert sites["qk_norm_rope"].reasons == {"only one of query and key is rotated": 1}

    def test_no_norm(self):
        def function(q, k, v, w, cos, sin):
            both = [turn(heads(x) * w, cos[None, :, None], sin[None, :, None]) for x in (q, k)]
            return attend(*(x.transpose(1, 2) for x in (*both, heads(v))))

        sites = check(function, *qk_inputs(flux_single, torch.float32))
        assert "qk_norm_rope" not in sites
        assert sites["rope"].fused == 2

    def test_another_order(self):
        """A rotation before the norm is another function."""

        def function(q, k, v, w, cos, sin):
            both = [rms(turn(heads(x), cos[None, :, None], sin[None, :, None]), w) for x in (q, k)]
            return attend(*(x.transpose(1, 2) for x in (*both, heads(v))))

        sites = check(function, *qk_inputs(flux_single, torch.float32))
        assert "qk_norm_rope" not in sites


def residual_inputs(dtype=torch.float32, batch=2, tokens=7, width=60):
    return [draw(*shape, dtype=dtype) for shape in ((batch, tokens, width), (batch, tokens, width), (batch, 1, width))]


RESIDUALS = {
    "gated, modulated": lambda x, y, s: (x := x + s * y, layer(x) * (1 + s) + s),
    "read in between": lambda x, y, s: (x := x + s * y, x.exp(), layer(x) * (1 + s.tanh()) + s.tanh()),
    "plain, modulated": lambda x, y, s: (x := x + y, rms(x) * (1 + s) + s),
    "plain, a norm alone": lambda x, y, s: (x := x + y, F.layer_norm(x, (x.shape[-1],), s[0, 0], s[1, 0], 1e-5)),
    "plain, an RMSNorm alone": lambda x, y, s: (x := x + y, rms(x, s[0, 0])),
    "Wan: in float32": lambda x, y, s: (
        x := (x.float() + y * s.float()).type_as(x),
        (layer(x.float()) * (1 + s.float()) + s.float()).type_as(x),
    ),
    "Wan: a norm in float32, twice cast": lambda x, y, s: (
        x := (x.float() + y * s.float()).type_as(x),
        F.layer_norm(x.float(), (x.shape[-1],), s[0, 0].float(), None, 1e-6).to(torch.float32).type_as(x),
    ),
    "the residual is not read again": lambda x, y, s: layer(x + s * y) * (1 + s) + s,
    "FLUX: taken apart and joined again": lambda x, y, s: (
        x := x + s * y,
        layer(torch.cat([x[:, :3], x[:, 3:]], 1)) * (1 + s) + s,
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spelling", RESIDUALS)
def test_residual_norm_modulate(spelling, dtype):
    sites = check(RESIDUALS[spelling], *residual_inputs(dtype))
    found = sites["residual_norm_modulate"]
    assert (found.fused, found.declined) == (1, 0), found.reasons


def test_a_result_is_rounded_by_the_op():
    """No cast is left behind it: it would read and write the whole value once more."""
    seen = []

    def peek(graph, context):
        del context
        made = [node for node in graph.nodes if "residual_norm_modulate" in str(node.target)]
        seen.extend(user.target for node in made for result in node.users for user in result.users)

    backend = tritium.Backend(EAGER, passes=[tritium.plugins.Pass("peek", peek)])
    with torch.inference_mode():
        function = RESIDUALS["Wan: a norm in float32, twice cast"]
        torch.compile(function, backend=backend, fullgraph=True)(*residual_inputs(torch.bfloat16))
    assert seen == ["output", "output"]


def test_a_chain_of_residuals_through_what_only_repeats_them():
    """FLUX's single blocks: every block takes the tokens apart, and the next one joins them."""

    def function(x, y, s):
        for _ in range(3):
            x = torch.cat([x[:, :3], x[:, 3:]], 1)
            x = x + s * y
            y = layer(torch.cat([x[:, :3], x[:, 3:]], 1)) * (1 + s) + s
        return x[:, 3:], y

    sites = check(function, *residual_inputs())
    assert sites["residual_norm_modulate"].fused == 3
    assert (sites["mul_add"].fused, sites["adalayernorm"].fused) == (3, 3)


def test_a_value_that_the_model_packs_is_read_packed():
    """Reading what lies transposed in memory row by row costs more than the copy the model makes of it."""
    seen = []

    def function(x, y, s):
        x = x.transpose(1, 2).contiguous() + s * y
        return x, layer(x) * (1 + s) + s

    def peek(graph, context):
        del context
        seen.extend(node for node in graph.nodes if "residual_norm_modulate" in str(node.target))

    x, y, s = residual_inputs()
    backend = tritium.Backend(EAGER, passes=[tritium.plugins.Pass("peek", peek)])
    with torch.inference_mode():
        torch.compile(function, backend=backend, fullgraph=True)(x.transpose(1, 2).contiguous(), y, s)
    assert [node.args[0].target for node in seen] == ["contiguous"]


def test_what_repeats_the_residual_waits_for_it_too():
    """The joined tokens feed the norm, which the region takes over, and a reader of their own."""

    def function(x, y, s):
        x = x + s * y
        joined = torch.cat([x[:, :3], x[:, 3:]], 1)
        seen = joined.exp()
        return seen, x[:, :3], layer(joined) * (1 + s) + s

    sites = check(function, *residual_inputs())
    assert sites["residual_norm_modulate"].fused == 1


class TestResidualsThatAreLeftAlone:
    def test_a_modulation_made_of_the_residual(self):
        def function(x, y, s):
            x = x + s * y
            return x, layer(x) * (1 + x.mean(1, keepdim=True)) + s

        sites = check(function, *residual_inputs())
        assert sites["residual_norm_modulate"].reasons == {DEPENDS_ON_ITSELF: 1}

    def test_a_write_between_them(self):
        def function(x, y, s):
            x = x + s * y
            seen = x * y
            y = y.clone()
            y.add_(1)
            return seen, y, layer(x) * (1 + s) + s

        sites = check(function, *residual_inputs())
        assert sites["residual_norm_modulate"].reasons == {EFFECTS_BETWEEN: 1}

    def test_the_norm_is_read_by_others_too(self):
        def function(x, y, s):
            normed = layer(x + s * y)
            return normed * (1 + s) + s, normed.exp()

        sites = check(function, *residual_inputs())
        assert sites["residual_norm_modulate"].declined == 1

    def test_slices_in_another_order_are_another_tensor(self):
        def function(x, y, s):
            x = x + s * y
            return x, layer(torch.cat([x[:, 3:], x[:, :3]], 1)) * (1 + s) + s

        sites = check(function, *residual_inputs())
        assert "residual_norm_modulate" not in sites

    def test_slices_that_leave_something_out(self):
        def function(x, y, s):
            x = x + s * y
            return x, layer(torch.cat([x[:, :3], x[:, 4:]], 1)) * (1 + s) + s

        sites = check(function, *residual_inputs())
        assert "residual_norm_modulate" not in sites

    def test_an_input_that_was_copied_and_then_written(self):
        def function(x, y, s):
            kept = x.clone()
            x.add_(1)
            r = kept + s * y
            return x, r, layer(r) * (1 + s) + s

        x, y, s = residual_inputs()
        result, _ = recognise(lambda x, y, s: function(x.clone(), y, s), x, y, s)
        for made, expected in zip(result, function(x.clone(), y, s), strict=True):
            torch.testing.assert_close(made, expected)
