"""Prove that one size is a multiple of another: `(H + 2) * (W + 2)` of `W + 2`, for all H and W.

Before torch 2.14, Inductor expands sizes and then finds no proof for `H*W + 2*H + 2*W + 4` and `W + 2`: a kernel over
two padded or cropped dynamic dims gets one flat grid. Newer versions have such a proof and do not use this module.

The proof is polynomial division: `numerator == quotient * denominator` as polynomials with integer coefficients holds
for all values of the symbols. A term that is not polynomial (`H // 2`) counts as another symbol. The sizes of the
current call are not used.
"""

from __future__ import annotations

import functools

import sympy

# Tensor sizes have a handful of symbols. Division is fast up to these limits; beyond them compiling would be slow.
MOST_SYMBOLS = 6
MOST_TERMS = 64


@functools.lru_cache(maxsize=4096)
def is_multiple(numerator: sympy.Expr | int, denominator: sympy.Expr | int) -> bool:
    """Return True if `numerator` is a multiple of `denominator` for all values of the symbols.

    >>> H, W = sympy.symbols("H W", integer=True, positive=True)
    >>> is_multiple(sympy.expand(96 * (H + 2) * (W + 2)), W + 2), is_multiple((H + 2) * (W + 2), 2 * W + 4)
    (True, False)
    """
    numerator, denominator = sympy.sympify(numerator), sympy.sympify(denominator)
    if denominator.is_zero:
        return False
    if numerator.is_Integer and denominator.is_Integer:
        return bool(numerator % denominator == 0)
    try:
        dividend, divisor = sympy.parallel_poly_from_expr((numerator, denominator))[0]
    except (sympy.PolificationFailed, sympy.PolynomialError):
        return False
    if not _within_bounds(dividend) or not _within_bounds(divisor):
        return False
    # With a single divisor, the remainder is zero exactly if it divides, in any order of the terms.
    quotient, rest = sympy.div(dividend, divisor, domain=sympy.QQ)
    return rest.is_zero and all(coefficient.is_integer for coefficient in quotient.coeffs())


def _within_bounds(polynomial: sympy.Poly) -> bool:
    return (
        len(polynomial.gens) <= MOST_SYMBOLS
        and len(polynomial.terms()) <= MOST_TERMS
        and polynomial.domain in (sympy.ZZ, sympy.QQ)
        and all(generator.is_integer for generator in polynomial.gens)
    )
