"""Rotary embedding alone and behind norms: against float64, and tables that do not fit."""

import itertools

import pytest
import torch
import torch.nn.functional as F

import tritium
from support.fidelity import assert_no_worse
from tritium.errors import ArgumentError, ArgumentTypeError

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def rotated_by(x, cos, sin, mode):
    """The rotation of the textbook, in the dtype of x."""
    if mode == "rotated_half":
        first, second = x.chunk(2, -1)
        rotated = torch.cat([-second, first], -1)
    else:
        rotated = torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
    return x * cos + rotated * sin


class TestRotary:
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("mode", ["rotated_half", "rotated_interleaved"])
    @pytest.mark.parametrize("head_first", [False, True])
    @pytest.mark.parametrize(("batch", "heads", "width"), [(2, 16, 88), (1, 24, 128)])
    def test_against_float64(self, dtype, mode, head_first, batch, heads, width, random):
        tokens = 60
        x = random(batch, tokens, heads, width, dtype=dtype)
        cos, sin = random(tokens, width, seed=1), random(tokens, width, seed=2)
        wide = [t[None, :, None] for t in (cos, sin)]
        exact = rotated_by(x.double(), *(t.double() for t in wide), mode)
        eager = rotated_by(x.float(), *wide, mode).to(dtype)
        if head_first:
            x, exact, eager = (t.transpose(1, 2) for t in (x, exact, eager))
            wide = [t.transpose(1, 2) for t in wide]
        for tables, fused in itertools.product(((cos, sin), wide), (True, False)):
            out = tritium.rotary_position_embedding(x, *tables, mode, head_first, fused)
            assert_no_worse(out, eager, exact)

    def test_tokens_before_the_batch(self, random):
        x, cos, sin = random(7, 2, 3, 8), random(7, 1, 1, 8, seed=1), random(7, 1, 1, 8, seed=2)
        out = tritium.rotary_position_embedding(x, cos, sin)
        torch.testing.assert_close(out, rotated_by(x, cos, sin, "rotated_half"))

    @pytest.mark.parametrize(
        ("changes", "error", "words"),
        [
            ({"x": torch.ones(2, 7, 8)}, ArgumentError, "x must have rank 4, got 3"),
            ({"cos": torch.ones(1, 7, 8)}, ArgumentError, "cos must have rank 2 or 4, got 3"),
            ({"sin": torch.ones(1, 7, 1, 8)}, ArgumentError, r"sin must have shape \(7, 8\)"),
            ({"rotated_mode": "rotated_halt"}, ArgumentError, "did you mean 'rotated_half'"),
            ({"cos": torch.ones(6, 8), "sin": torch.ones(6, 8)}, ArgumentError, "6 rows for 7 tokens"),
            ({"cos": torch.ones(7, 6), "sin": torch.ones(7, 6)}, ArgumentError, "got 6"),
            ({"head_first": True}, ArgumentError, "7 rows for 3 tokens"),
            ({"cos": torch.ones(7, 4, dtype=torch.complex64)}, ArgumentTypeError, "cos must be"),
        ],
    )
    def test_errors(self, changes, error, words):
        given = {"x": torch.ones(2, 7, 3, 8), "cos": torch.ones(7, 8), "sin": torch.ones(7, 8)}
        with pytest.raises(error, match=words):
            tritium.rotary_position_embedding(**{**given, **changes})


class TestQueryAndKey:
    def test_parts_are_joined_normed_and_rotated(self, random):
        text, image = random(2, 3, 4, 8), random(2, 5, 4, 8, seed=1)
        weight, cos, sin = random(8, seed=2), random(1, 8, 8, seed=3), random(1, 8, 8, seed=4)
        q, k = tritium.qk_norm_rope([text, image], [text, image], [weight] * 2, [weight] * 2, cos, sin)
        normed = F.rms_norm(torch.cat([text, image], 1), (8,), weight, 1e-6)
        expected = rotated_by(normed, cos[:, :, None], sin[:, :, None], "rotated_interleaved")
        torch.testing.assert_close(q, expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(k, expected, rtol=1e-4, atol=1e-5)
        first = tritium.qk_norm_rope(text, text, weight, weight, rope="none", head_first=True)[0]
        torch.testing.assert_close(first, F.rms_norm(text, (8,), weight, 1e-6).transpose(1, 2), rtol=1e-4, atol=1e-5)

    def test_parts_that_do_not_fit(self, random):
        x, table = random(2, 7, 3, 8), torch.ones(1, 7, 8)
        for given, words in (
            (([x, x], [x, x], None, None, table, table), "S = 14"),
            (([x, x[:, :, :2]], [x, x]), "one batch, as many heads"),
            (([x, x[:1]], [x, x]), "one batch, as many heads"),
            ((x, x[:, :6]), "same batch and tokens"),
            ((x, x, None, None, table), "cosines and sines must have"),
            (([x, x], [x, x], [torch.ones(8)]), "one entry for each of 2 parts"),
        ):
            with pytest.raises(ArgumentError, match=words):
                tritium.qk_norm_rope(*given)
        with pytest.raises(ArgumentTypeError, match=r"one dtype, got torch\.float32 and torch\.float64"):
            tritium.qk_norm_rope([x, x.double()], [x, x], rope="none")

    @pytest.mark.parametrize("fused", [True, False])
    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            # A kernel would read past the end of a short tensor.
            ({"cos": (1, 5, 8), "sin": (1, 5, 8)}, "S = 7, a row for each token"),
            ({"cos": (1, 9, 8), "sin": (1, 9, 8)}, "S = 7, a row for each token"),
            ({"cos": (3, 7, 8), "sin": (3, 7, 8)}, "B = 2"),
            ({"cos": (1, 7, 6), "sin": (1, 7, 6)}, r"\(1, 7, 6\)"),
            ({"cos": (7, 8), "sin": (7, 8)}, r"\(7, 8\)"),
            ({"cos": (1, 7, 8), "sin": (1, 7, 4)}, "the same shapes"),
            ({"q_weight": (5,)}, r"q_weight must have shape \(8,\)"),
            ({"k_weight": (24,)}, r"k_weight must have shape \(8,\)"),
            ({"q_weight": (8,), "norm": "row"}, r"q_weight must have shape \(24,\)"),
            ({"cos": (1, 7, 8), "rope": "none"}, "rope 'none' takes no"),
            ({"sin": (1, 7, 8), "rope": "complex"}, "rope 'complex' takes no sines"),
        ],
    )
    def test_no_kernel_reads_past_an_end(self, changes, words, fused):
        x = torch.ones(2, 7, 3, 8)
        given = {name: torch.ones(value) if isinstance(value, tuple) else value for name, value in changes.items()}
        with pytest.raises(ArgumentError, match=words):
            tritium.qk_norm_rope(x, x, **given, fused=fused)

    @pytest.mark.parametrize("fused", [True, False])
    def test_real_and_complex_tables(self, fused, random):
        """A table of half as many numbers would be read past its end."""
        q = random(1, 7, 3, 8)
        table = torch.polar(torch.ones(1, 7, 4), random(1, 7, 4))
        expected = tritium.qk_norm_rope(q, q, cos=table, rope="complex", fused=fused)
        pairs = tritium.qk_norm_rope(q, q, cos=torch.view_as_real(table), rope="complex", fused=fused)
        torch.testing.assert_close(pairs, expected)
        with pytest.raises(ArgumentError, match=r"4, 2\] with B = 1 and S = 7"):
            tritium.qk_norm_rope(q, q, cos=table.real, rope="complex", fused=fused)
        with pytest.raises(ArgumentTypeError, match=r"cos must be real.* got torch\.complex64"):
            tritium.qk_norm_rope(q, q, cos=table, sin=table, fused=fused)
        odd = random(1, 7, 3, 5)
        with pytest.raises(ArgumentError, match="even width"):
            tritium.qk_norm_rope(odd, odd, cos=odd[:, :, 0], sin=odd[:, :, 0], fused=fused)
