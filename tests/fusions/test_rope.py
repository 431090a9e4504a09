"""RoPE in every form models write it: found once, no less exact, never taken for a gate; what only looks like it."""

import pytest
import torch
from torch.utils._pytree import tree_leaves

import tritium
from census.truth import captured
from support.fidelity import assert_no_worse
from support.recognition import EAGER, check_declined, check_no_site, recognise
from support.zoo import ZOO
from tritium.fusions import rope as fusion
from tritium.ops import rope

NOT_CONTIGUOUS = "the value is not contiguous, and the replacement's would be"

B, S, H, D = 2, 7, 3, 12


def pairs(x):
    return x.reshape(*x.shape[:-1], -1, 2).unbind(-1)


def interleaved(x, cos, sin):
    even, odd = pairs(x)
    rotated = torch.stack([-odd, even], dim=-1).flatten(-2)
    return (x.float() * cos + rotated.float() * sin).to(x.dtype)


def interleaved_by_slices(x, cos, sin):
    rotated = torch.stack((x[..., 1::2].neg(), x[..., ::2]), -1).reshape(x.shape)
    return torch.addcmul(x * cos, rotated, sin)


def subtracted(x, cos, sin):
    even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
    return cos * x - torch.stack([odd, -even], dim=-1).flatten(-2) * sin


def half(x, cos, sin):
    real, imaginary = x.reshape(*x.shape[:-1], 2, -1).unbind(-2)
    rotated = torch.cat([-imaginary, real], dim=-1)
    return (x.float() * cos + rotated.float() * sin).to(x.dtype)


def half_by_chunks(x, cos, sin):
    first, second = x.chunk(2, dim=-1)
    return sin * torch.cat((-second, first), dim=-1) + x * cos


def half_by_slices(x, cos, sin):
    d = x.shape[-1] // 2
    return torch.cat((-x[..., d:], x[..., :d]), dim=-1) * sin + cos * x


def half_a_lane(x, cos, sin):
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).type_as(x)


def stacked(x, cos, sin):
    even, odd = x[..., 0::2].float(), x[..., 1::2].float()
    first = (even * cos - odd * sin).to(x.dtype)
    second = (even * sin + odd * cos).to(x.dtype)
    return torch.stack([first, second], dim=-1).flatten(-2)


def strided_writes(x, cos, sin):
    even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
    out = torch.empty_like(x)
    out[..., 0::2] = even * cos - odd * sin
    out[..., 1::2] = even * sin + odd * cos
    return out.type_as(x)


def writes_of_halves(x, cos, sin):
    d = x.shape[-1] // 2
    first, second = x[..., :d], x[..., d:]
    out = torch.zeros_like(x)
    out[..., d:] = first * sin + second * cos
    out[..., :d] = first * cos - second * sin
    return out


def in_place(x, cos, sin):
    spread = x.reshape(*x.shape[:-1], 2, -1).float()
    first, second = spread[..., :1, :], spread[..., 1:, :]
    out = spread * cos.unsqueeze(-2)
    out[..., :1, :].addcmul_(-sin.unsqueeze(-2), second)
    out[..., 1:, :].addcmul_(sin.unsqueeze(-2), first)
    return out.reshape(x.shape).to(dtype=x.dtype)


def as_complex(x, freqs):
    rotated = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(rotated * freqs).flatten(3).type_as(x)


def as_complex_wide(x, freqs):
    rotated = torch.view_as_complex(x.to(torch.float64).unflatten(3, (-1, 2)))
    return torch.view_as_real(freqs.to(torch.complex128) * rotated).flatten(3, 4).type_as(x)


def matrices_by_columns(x, matrices):
    spread = x.float().reshape(*x.shape[:-1], -1, 1, 2)
    out = matrices[..., 0] * spread[..., 0] + matrices[..., 1] * spread[..., 1]
    return out.reshape(*x.shape).type_as(x)


def matrices_summed(x, matrices):
    spread = x.reshape(*x.shape[:-1], -1, 1, 2).to(torch.float32)
    return (matrices * spread).sum(dim=-1).reshape(*x.shape).to(x.dtype)


# Whether a form's tables have one number an element, or one a pair.
AN_ELEMENT = (interleaved, interleaved_by_slices, subtracted, half, half_by_chunks, half_by_slices)
A_PAIR = (half_a_lane, stacked, strided_writes, writes_of_halves, in_place)
COMPLEX = (as_complex, as_complex_wide)
MATRICES = (matrices_by_columns, matrices_summed)
HALVES = (half, half_by_chunks, half_by_slices, half_a_lane, writes_of_halves, in_place)
FORMS = {form.__name__: form for form in (*AN_ELEMENT, *A_PAIR, *COMPLEX, *MATRICES)}
# [B, S, H, D], [B, H, S, D]: where the tables' sequence is.
LAYOUTS = {
    "heads last": ((B, S, H, D), (1, S, 1)),
    "heads first": ((B, H, S, D), (S,)),
    "batch": ((B, S, H, D), (B, S, 1)),
}


def tables_for(form, front, dtype, width=D):
    """The tables that a form takes, and the op's own for the exact value."""
    angles = torch.randn(*front, width // 2)
    cos, sin = angles.cos(), angles.sin()
    if form in COMPLEX:
        return (torch.complex(cos, sin),)
    if form in MATRICES:
        return (torch.stack([cos, -sin, sin, cos], dim=-1).unflatten(-1, (2, 2)),)
    if form in AN_ELEMENT:
        # Not equal within a pair: whichever element a number belongs to must be kept.
        cos, sin = torch.randn(*front, width), torch.randn(*front, width)
    return cos.to(dtype), sin.to(dtype)


def exact(form, x, tables):
    """The value in float64, by the op's definition, which `test_the_op_s_meaning` compares with complex numbers."""
    mode = (
        "complex" if form in COMPLEX else "matrix" if form in MATRICES else "half" if form in HALVES else "interleaved"
    )
    wide = [t.to(torch.complex128) if t.is_complex() else t.double() for t in tables]
    table, sin = wide if len(wide) == 2 else (wide[0], None)
    return rope.reference(x.double(), table, sin, mode, merge_heads=False, out_dtype=torch.float64)


# In half precision the tables are in both dtypes, so float32 in one layout is enough.
ALL_LAYOUTS = [
    pytest.param(
        dtype, layout, marks=[pytest.mark.thorough] * (dtype == torch.float32 and layout != next(iter(LAYOUTS)))
    )
    for dtype in (torch.float32, torch.bfloat16)
    for layout in LAYOUTS
]


@pytest.mark.parametrize(("dtype", "layout"), ALL_LAYOUTS)
@pytest.mark.parametrize("name", FORMS)
def test_every_form(name, dtype, layout):
    torch.manual_seed(0)
    form, (shape, front) = FORMS[name], LAYOUTS[layout]
    for tables_in in {torch.float32, dtype}:
        x, tables = torch.randn(*shape).to(dtype), tables_for(form, front, tables_in)
        result, sites = recognise(form, x, *tables)
        assert (sites["rope"].fused, sites["rope"].declined) == (1, 0), sites["rope"].reasons
        assert sites["mul_add"].recognised == sites["mul_add"].declined == 0
        assert_no_worse(result, form(x, *tables), exact(form, x, tables))


@pytest.mark.parametrize("mode", ["interleaved", "half"])
def test_the_op_s_meaning(mode):
    x, angles = torch.randn(B, S, H, D, dtype=torch.float64), torch.randn(S, 1, D // 2, dtype=torch.float64)
    first, second = (x[..., 0::2], x[..., 1::2]) if mode == "interleaved" else x.chunk(2, -1)
    turned = torch.complex(first, second) * torch.polar(torch.ones_like(angles), angles)
    lanes = (turned.real, turned.imag)
    expected = torch.stack(lanes, -1).flatten(-2) if mode == "interleaved" else torch.cat(lanes, -1)
    result = rope.reference(x, angles.cos(), angles.sin(), mode, merge_heads=False, out_dtype=None)
    torch.testing.assert_close(result, expected)
    if mode == "interleaved":
        freqs = torch.polar(torch.ones_like(angles), angles)
        for table in (freqs, torch.view_as_real(freqs), freqs.conj().conj_physical()):
            torch.testing.assert_close(
                rope.reference(x, table, None, "complex", merge_heads=False, out_dtype=None), expected
            )


@pytest.mark.parametrize("name", FORMS)
def test_every_form_with_a_sequence_of_any_length(name):
    form = FORMS[name]
    compiled = torch.compile(form, backend=tritium.Backend(EAGER), fullgraph=True)
    with torch.inference_mode():
        for tokens in (5, 9, 63):
            x, tables = torch.randn(B, tokens, H, D), tables_for(form, (1, tokens, 1), torch.float32)
            for tensor in (x, *tables):
                torch._dynamo.mark_dynamic(tensor, 1)
            torch.testing.assert_close(compiled(x, *tables), form(x, *tables), rtol=1e-4, atol=1e-5)
    report = tritium.explain(compiled)
    assert report.sites["rope"].fused == len(report.records) == 1


def test_part_of_the_head_is_rotated():
    def function(x, cos, sin):
        turned, kept = x[..., :8], x[..., 8:]
        return torch.cat((half(turned, cos, sin), kept), dim=-1)

    x, cos, sin = torch.randn(B, S, H, D), torch.randn(1, S, 1, 8), torch.randn(1, S, 1, 8)
    result, sites = recognise(function, x, cos, sin)
    assert sites["rope"].fused == 1
    torch.testing.assert_close(result, function(x, cos, sin))


def test_written_back_into_a_part_of_the_tokens():
    """CogVideoX and CogView4 rotate the image's tokens inside the tensor that holds the text's too."""

    def function(x, cos, sin):
        x = torch.nn.functional.layer_norm(x, (D,))
        x[:, :, 2:] = interleaved(x[:, :, 2:], cos, sin)
        return x

    x, cos, sin = torch.randn(B, H, S, D), torch.randn(S - 2, D), torch.randn(S - 2, D)
    result, sites = recognise(function, x, cos, sin)
    assert sites["rope"].fused == 1
    torch.testing.assert_close(result, function(x, cos, sin))


def test_tables_read_anew_for_every_product():
    """Helios slices its tables four times."""

    def function(x, freqs):
        even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
        cos, sin = freqs.unsqueeze(-2).chunk(2, dim=-1)
        out = torch.empty_like(x)
        out[..., 0::2] = even * cos[..., 0::2] - odd * sin[..., 1::2]
        out[..., 1::2] = even * sin[..., 1::2] + odd * cos[..., 0::2]
        return out

    x, freqs = torch.randn(B, S, H, D), torch.randn(B, S, 2 * D)
    result, sites = recognise(function, x, freqs)
    assert sites["rope"].fused == 1
    torch.testing.assert_close(result, function(x, freqs))


def test_query_and_key_share_their_tables():
    def function(q, k, cos, sin):
        return interleaved(q, cos, sin), interleaved(k, cos, sin)

    q, k, cos, sin = torch.randn(B, S, H, D), torch.randn(B, S, H, D), torch.randn(S, 1, D), torch.randn(S, 1, D)
    result, sites = recognise(function, q, k, cos, sin)
    assert sites["rope"].fused == 2
    torch.testing.assert_close(result, function(q, k, cos, sin))


def test_heads_are_merged_by_the_op():
    """LTX-2 rotates [B, H, S, D] and goes back to [B, S, H * D]; the value between is not contiguous."""

    def function(x, cos, sin):
        x = x.reshape(B, S, H, D).swapaxes(1, 2)
        return in_place(x, cos, sin).swapaxes(1, 2).reshape(B, S, -1)

    x, cos, sin = torch.randn(B, S, H * D), torch.randn(B, H, S, D // 2), torch.randn(B, H, S, D // 2)
    result, sites = recognise(function, x, cos, sin)
    assert (sites["rope"].fused, sites["rope"].declined) == (1, 0), sites["rope"].reasons
    torch.testing.assert_close(result, function(x, cos, sin))


def test_a_value_that_is_not_contiguous_is_counted():
    x, cos, sin = torch.randn(B, S, H, D).transpose(1, 2), torch.randn(S, D), torch.randn(S, D)
    result, sites = recognise(half, x, cos, sin)
    assert sites["rope"].reasons == {NOT_CONTIGUOUS: 1}
    assert result.stride() == half(x, cos, sin).stride()
    torch.testing.assert_close(result, half(x, cos, sin))


def rotate(x):
    even, odd = pairs(x)
    return torch.stack([-odd, even], dim=-1).flatten(-2)


def lanes(x, cos, sin, first, second):
    even, odd = pairs(x)
    c, s = cos[..., ::2], sin[..., ::2]
    terms = {"ec": even * c, "os": odd * s, "es": even * s, "oc": odd * c, "cc": odd * cos[..., 1::2]}
    return torch.stack([first(terms), second(terms)], dim=-1).flatten(-2)


def writes(x, cos, sin, places):
    even, odd = pairs(x)
    c, s = cos[..., ::2], sin[..., ::2]
    out = torch.zeros_like(x)
    out[places[0]] = even * c - odd * s
    out[places[1]] = even * s + odd * c
    return out


EVERY_SECOND, EVERY_OTHER = (..., slice(0, None, 2)), (..., slice(1, None, 2))
NEAR_MISSES = {
    "another tensor turned": lambda x, y, cos, sin: x * cos + rotate(y) * sin,
    "the other direction": lambda x, y, cos, sin: x * cos - rotate(x) * sin,
    "turned the other way": lambda x, y, cos, sin: (
        x * cos + torch.stack([x[..., 1::2], -x[..., ::2]], -1).flatten(-2) * sin
    ),
    "no sign": lambda x, y, cos, sin: x * cos + torch.stack([x[..., 1::2], x[..., ::2]], -1).flatten(-2) * sin,
    "lanes not exchanged": lambda x, y, cos, sin: (
        x * cos + torch.stack([-x[..., ::2], x[..., 1::2]], -1).flatten(-2) * sin
    ),
    "lanes of two tensors": lambda x, y, cos, sin: (
        x * cos + torch.stack([-y[..., 1::2], x[..., ::2]], -1).flatten(-2) * sin
    ),
    "halves interleaved": lambda x, y, cos, sin: x * cos + torch.stack([-x[..., 6:], x[..., :6]], -1).flatten(-2) * sin,
    "pairs side by side": lambda x, y, cos, sin: x * cos + torch.cat([-x[..., 1::2], x[..., ::2]], -1) * sin,
    "unequal parts": lambda x, y, cos, sin: x * cos + torch.cat([-x[..., 4:], x[..., :4]], -1) * sin,
    "another dim": lambda x, y, cos, sin: x[:, :, :2] * cos + torch.cat([-x[:, :, 1:2], x[:, :, :1]], 2) * sin,
    "a rounded copy turned": lambda x, y, cos, sin: x * cos + rotate(x.to(torch.float16)).float() * sin,
    "the sum negated": lambda x, y, cos, sin: -(x * cos) + rotate(x) * sin,
    "a number for the cosine": lambda x, y, cos, sin: x * 0.5 + rotate(x) * sin,
    "cosines twice": lambda x, y, cos, sin: lanes(
        x, cos, sin, lambda t: t["ec"] - t["os"], lambda t: t["es"] + t["cc"]
    ),
    "lanes, the other direction": lambda x, y, cos, sin: lanes(
        x, cos, sin, lambda t: t["ec"] + t["os"], lambda t: t["oc"] - t["es"]
    ),
    "lanes, two sums": lambda x, y, cos, sin: lanes(
        x, cos, sin, lambda t: t["ec"] + t["os"], lambda t: t["es"] + t["oc"]
    ),
    "lanes in the wrong order": lambda x, y, cos, sin: lanes(
        x, cos, sin, lambda t: t["es"] + t["oc"], lambda t: t["ec"] - t["os"]
    ),
    "writes in the wrong places": lambda x, y, cos, sin: writes(x, cos, sin, (EVERY_OTHER, EVERY_SECOND)),
    "writes to one place": lambda x, y, cos, sin: writes(x, cos, sin, (EVERY_SECOND, EVERY_SECOND)),
    "writes to halves": lambda x, y, cos, sin: writes(x, cos, sin, ((..., slice(0, 6)), (..., slice(6, None)))),
    "complex numbers divided": lambda x, y, cos, sin: torch.view_as_real(
        torch.view_as_complex(x.unflatten(-1, (-1, 2))) / torch.view_as_complex(cos.unflatten(-1, (-1, 2)))
    ).flatten(3),
    "complex numbers in another order": lambda x, y, cos, sin: torch.view_as_real(
        torch.view_as_complex(x.unflatten(-1, (2, -1)).transpose(-1, -2).contiguous())
        * torch.view_as_complex(cos.unflatten(-1, (-1, 2)))
    ).flatten(3),
    "a product summed over all": lambda x, y, cos, sin: (
        x.reshape(*x.shape[:-1], -1, 1, 2) * cos.reshape(*cos.shape[:-1], -1, 2, 1)
    ).sum(-1),
}


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_what_only_looks_like_a_rope(name):
    function = NEAR_MISSES[name]
    x, y = torch.randn(B, S, H, D), torch.randn(B, S, H, D)
    cos, sin = torch.randn(1, S, 1, D), torch.randn(1, S, 1, D)
    check_no_site("rope", function, x, y, cos, sin)


def read_between(x, cos, sin):
    even, odd = pairs(x)
    out = torch.zeros_like(x)
    out[..., 0::2] = even * cos - odd * sin
    half_done = out.sum()
    out[..., 1::2] = even * sin + odd * cos
    return out, half_done


def seen_through_a_view(x, cos, sin):
    even, odd = pairs(x)
    out = torch.empty_like(x)
    flat = out.view(-1)
    out[..., 0::2] = even * cos - odd * sin
    out[..., 1::2] = even * sin + odd * cos
    return out, flat + 1


def lane_read_after(x, cos, sin):
    spread = x.reshape(*x.shape[:-1], 2, -1)
    out = spread * cos.unsqueeze(-2)
    first = out[..., :1, :]
    first.addcmul_(-sin.unsqueeze(-2), spread[..., 1:, :])
    out[..., 1:, :].addcmul_(sin.unsqueeze(-2), spread[..., :1, :])
    return out.reshape(x.shape), first + 1


def written_once_more(x, cos, sin):
    even, odd = pairs(x)
    out = torch.empty_like(x)
    out[..., 0::2] = even * cos - odd * sin
    x.mul_(2)
    out[..., 1::2] = even * sin + odd * cos
    return out


UNSAFE = {
    read_between: fusion.ALIASED,
    seen_through_a_view: fusion.ALIASED,
    lane_read_after: fusion.ALIASED,
    written_once_more: "a value is written in place between the matched operations",
}


@pytest.mark.parametrize("function", UNSAFE, ids=lambda function: function.__name__)
def test_what_cannot_be_rewritten_is_declined_with_a_reason(function):
    x, cos, sin = torch.randn(B, S, H, D), torch.randn(S, 1, D // 2), torch.randn(S, 1, D // 2)
    check_declined("rope", UNSAFE[function], function, x, cos, sin)


def test_a_result_written_to_afterwards_is_rewritten():
    def function(x, cos, sin):
        out = strided_writes(x, cos, sin)
        out[:, 0] = 0
        return out

    x, cos, sin = torch.randn(B, S, H, D), torch.randn(S, 1, D // 2), torch.randn(S, 1, D // 2)
    result, sites = recognise(function, x, cos, sin)
    assert sites["rope"].fused == 1
    torch.testing.assert_close(result, function(x, cos, sin))


def test_a_tensor_that_nobody_reads_is_no_site():
    def function(x, cos, sin):
        strided_writes(x, cos, sin)
        return x + 1

    x, cos, sin = torch.randn(B, S, H, D), torch.randn(S, 1, D // 2), torch.randn(S, 1, D // 2)
    _, sites = recognise(function, x, cos, sin)
    assert sites["rope"].recognised == sites["rope"].declined == 0


@pytest.mark.parametrize(
    "name",
    ["flux", "wan", "qwen_image", *(pytest.param(name, marks=pytest.mark.thorough) for name in ("ltx2", "cogvideox"))],
)
def test_shapes_that_vary(name):
    model = ZOO[name]
    inputs = model.inputs()
    model.mark_dynamic(inputs)
    module = model.build()
    compiled = torch.compile(module, backend=tritium.Backend(EAGER))
    with torch.no_grad():
        expected = tree_leaves(module(**model.inputs()))
        result = tree_leaves(compiled(**inputs))
    assert tritium.explain(compiled).sites["rope"].fused == captured(model)["rope"]
    for actual, wanted in zip(result, expected, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-4, atol=1e-4)


def test_a_symbolic_head_dim_is_no_silent_miss():
    """Half of an odd symbol is no size: nothing proves that the lanes make up the whole, so it is declined, and said."""

    def strided(x, cos, sin):
        even, odd = x[..., 0::2].float(), x[..., 1::2].float()
        turned = torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1)
        return turned.flatten(-2).to(x.dtype)

    config = tritium.CompilationConfig(engine="eager")
    x, cos, sin = torch.randn(2, 7, 3, 60), torch.randn(7, 1, 30), torch.randn(7, 1, 30)
    with torch.inference_mode():
        compiled = torch.compile(strided, backend=tritium.Backend(config), dynamic=True, fullgraph=True)
        torch.testing.assert_close(compiled(x, cos, sin), strided(x, cos, sin))
    found = tritium.explain(compiled).sites["rope"]
    assert found.recognised + found.declined == 1
