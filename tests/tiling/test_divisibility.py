"""The divisibility proof: never wrong for any value of the symbols, and complete for products."""

import itertools
import time

import pytest
import sympy
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._sympy.functions import FloorDiv, ModularIndexing

from tritium.tiling.divisibility import MOST_SYMBOLS, is_multiple

H, W, T = SYMBOLS = sympy.symbols("H W T", integer=True, positive=True)
VALUES = range(-3, 8)

coefficients = st.integers(-4, 6)
monomials = st.tuples(*[st.integers(0, 2)] * 3)


@st.composite
def polynomials(draw):
    terms = draw(st.dictionaries(monomials, coefficients, max_size=4))
    return sympy.Add(
        *(c * sympy.prod(s**p for s, p in zip(SYMBOLS, powers, strict=True)) for powers, c in terms.items())
    )


sums = st.tuples(st.sampled_from(SYMBOLS), st.integers(-3, 4)).map(lambda pair: pair[0] + pair[1])
atoms = st.one_of(sums, sums.map(lambda size: FloorDiv(size, 2) + 1), sums.map(lambda size: FloorDiv(size + 3, 4)))


def brute_force(numerator, denominator):
    """Whether every value of the symbols gives a whole multiple; 0 is the only multiple of 0."""
    evaluate = sympy.lambdify(SYMBOLS, [numerator, denominator], modules="math")
    for values in itertools.product(VALUES, repeat=3):
        n, d = evaluate(*values)
        if (n != 0) if d == 0 else (n % d != 0):
            return False
    return True


@settings(max_examples=120)
@given(polynomials(), st.one_of(polynomials(), sums), st.integers(1, 3), st.integers(0, 3))
def test_a_proof_is_never_wrong(factor, divisor, scale, rest):
    """Also for products that are off by a constant or need a fraction."""
    for numerator, denominator in ((factor, divisor), (sympy.expand(factor * divisor + rest), scale * divisor)):
        if is_multiple(numerator, denominator):
            assert brute_force(numerator, denominator)


@settings(max_examples=60)
@given(st.lists(atoms, min_size=1, max_size=4), st.integers(1, 96), st.data())
def test_every_product_is_proven_a_multiple_of_its_factors(factors, constant, data):
    """What tiling asks: the whole iteration space, multiplied out, against some of its dims."""
    chosen = data.draw(st.sets(st.sampled_from(range(len(factors)))))
    numerator = sympy.expand(constant * sympy.prod(factors))
    denominator = sympy.prod(factors[index] for index in chosen)
    # The atoms may hide more than six different things; beyond the bound the answer is no, not wrong.
    atoms_used = len(numerator.atoms(sympy.Symbol, FloorDiv))
    if atoms_used <= MOST_SYMBOLS:
        assert is_multiple(numerator, sympy.expand(denominator))


@pytest.mark.parametrize(
    ("numerator", "denominator", "is_proven"),
    [
        # Of models.
        (sympy.expand((H + 2) * (W + 2)), W + 2, True),
        (sympy.expand((H - 1) * (W - 1)), H - 1, True),
        (sympy.expand(576 * (H + 2) * (W + 2)), 96 * (W + 2), True),
        (sympy.expand(T * (H + 2) * (W + 2)), sympy.expand((H + 2) * (W + 2)), True),
        (sympy.expand((FloorDiv(H, 2) + 1) * (FloorDiv(W, 2) + 1)), FloorDiv(W, 2) + 1, True),
        (sympy.Integer(12), sympy.Integer(4), True),
        (12 * H, sympy.Integer(4), True),
        (sympy.Integer(0), H + 1, True),
        (H * W + 2 * H + 2 * W + 5, W + 2, False),
        (sympy.expand((H + 2) * (W + 2)), 2 * (W + 2), False),
        # True, but no identity of polynomials.
        (H * (H + 1), sympy.Integer(2), False),
        (H, W, False),
        (sympy.Integer(1), H, False),
        (H, sympy.Integer(0), False),
        (sympy.Integer(7), sympy.Integer(2), False),
        (H / 2, sympy.Integer(1), False),
        (2.0 * H, H, False),
        (sympy.sqrt(H) * W, W, False),
        # It may be no integer.
        (sympy.Symbol("x") * W, W, False),
        (ModularIndexing(H, 2, 4) * W + 1, W, False),
    ],
)
def test_cases(numerator, denominator, is_proven):
    assert is_multiple(numerator, denominator) == is_proven


def test_large_expressions_are_refused_quickly():
    many = sympy.symbols("a:12", integer=True, positive=True)
    start = time.perf_counter()
    assert not is_multiple(sympy.Add(*many) * many[0], many[0])
    assert time.perf_counter() - start < 1
