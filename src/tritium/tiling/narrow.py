"""Compute indices in 32 bits if a kernel's index type is 32 bits and the result is proven to be equal.

Inductor passes every dynamic size as 64 bits, since a product of sizes may be used as a value. As a result, each
`xindex // ks0` is a 64-bit division, about four times as expensive as one of 32 bits.

The rewrite changes the text of a generated kernel. Its arguments stay the same; a whole index expression that provably
fits uses 32-bit copies of the sizes:

    ks0_i32 = ks0.to(tl.int32)
    x1 = (xindex // ks0_i32) % ks1_i32          # was: (xindex // ks0) % ks1

A proof needs a bound. The kernel's index type is 32 bits because the number of its elements and the extents of its
buffers were compared with 2^31 - 1, and guards ensure that; every intermediate result of an expression must be at most
one of those for all sizes. Expressions that are not an index (a size used in a mean) or lack a proof keep 64 bits:
narrowed variables are widened in them.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import sympy

from tritium.tiling.divisibility import MOST_SYMBOLS, MOST_TERMS

LARGEST = 2**31 - 1

# The least and the largest value of an expression.
Interval = tuple[sympy.Expr, sympy.Expr]

_POINTER = re.compile(r"(in_out|in|out)_ptr\d+")
_DEFINITION = re.compile(r"^def [\w.]+\(.*\):$")


@dataclass(frozen=True)
class Facts:
    """The proven properties of the numbers in a kernel."""

    # Size arguments by name, as expressions of the graph's symbols.
    sizes: Mapping[str, sympy.Expr]
    # The number of values of an index variable: 0 up to this, exclusively.
    extents: Mapping[str, sympy.Expr]
    # Expressions that guards limit to 2^31 - 1.
    limits: Sequence[sympy.Expr]
    # The smallest value of a symbol, or None if unknown.
    least: Callable[[sympy.Symbol], int | None]


@dataclass(frozen=True)
class NarrowKernel:
    """A kernel's text, and how many of its expressions with dynamic sizes use 32 and 64 bits."""

    source: str
    narrow: int
    wide: int

    @property
    def summary(self) -> str | None:
        if not self.narrow and not self.wide:
            return None
        return f"{self.narrow} of {self.narrow + self.wide} index expressions with dynamic sizes in 32 bits"


def narrow(source: str, facts: Facts) -> NarrowKernel:
    """Return the kernel with 32-bit index arithmetic wherever the result is proven to be equal."""
    lines = source.split("\n")
    start = next((number for number, line in enumerate(lines) if _DEFINITION.match(line)), None)
    if start is None or not facts.sizes:
        return NarrowKernel(source, 0, 0)
    end = start + 1
    while end < len(lines) and (not lines[end].strip() or lines[end].startswith(" ")):
        end += 1
    # The kernel's name is filled in later; its placeholder is not valid Python.
    tree = ast.parse("\n".join(["def kernel():", *lines[start + 1 : end]]))
    work = _Rewrite(facts, tree)
    if not work.narrow:
        return NarrowKernel(source, 0, work.wide)
    body = lines[start + 1 : end]
    for line, column, end_column, text in sorted(work.edits, reverse=True):
        # Line 1 is the definition; columns count bytes.
        encoded = body[line - 2].encode()
        body[line - 2] = (encoded[:column] + text.encode() + encoded[end_column:]).decode()
    # Numbers in the order of their values: ks2 before ks10.
    names = sorted(work.used, key=lambda name: (len(name), name))
    copies = [f"    {name}_i32 = {name}.to(tl.int32)" for name in names]
    return NarrowKernel("\n".join([*lines[: start + 1], *copies, *body, *lines[end:]]), work.narrow, work.wide)


class _Rewrite:
    """Collect the names of a kernel that become narrow, and the edits for them."""

    def __init__(self, facts: Facts, tree: ast.Module) -> None:
        self.facts = facts
        self.edits: list[tuple[int, int, int, str]] = []
        self.used: set[str] = set()
        self.narrow = self.wide = 0
        bounds, nodes = Bounds(facts), list(ast.walk(tree))
        definitions = [
            (target.id, value)
            for node in nodes
            if isinstance(node, ast.Assign)
            for target, value in [(node.targets[0], node.value)]
            if len(node.targets) == 1 and isinstance(target, ast.Name) and target.id in facts.extents
        ]
        unproven = {name for name, value in definitions if bounds.of(value) is None}
        # Index variables that are 64 bits now because they depend on a 64-bit size, of which the unproven stay so.
        wide: set[str] = set()
        while more := {name for name, value in definitions if _names(value) & (facts.sizes.keys() | wide)} - wide:
            wide |= more
        self._narrow_names = wide - unproven
        uses = [index for node in nodes if (index := _index_use(node)) is not None and bounds.of(index) is not None]
        self._proven = {id(value) for name, value in definitions if name not in unproven} | set(map(id, uses))
        self._edit(tree, within=False)

    def _edit(self, node: ast.AST, *, within: bool) -> None:
        if not within and id(node) in self._proven:
            within = True
            self.narrow += bool(_names(node) & self.facts.sizes.keys())
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            where = (node.lineno, node.col_offset, node.end_col_offset or node.col_offset)
            if within and node.id in self.facts.sizes:
                self.used.add(node.id)
                self.edits.append((*where, f"{node.id}_i32"))
            elif not within and node.id in self._narrow_names:
                self.edits.append((*where, f"{node.id}.to(tl.int64)"))
            return
        if not within and isinstance(node, (ast.Assign, ast.Expr)):
            self.wide += self._has_wide_expression(node)
        for child in ast.iter_child_nodes(node):
            self._edit(child, within=within)

    def _has_wide_expression(self, node: ast.AST) -> bool:
        if id(node) in self._proven:
            return False
        if isinstance(node, ast.Name):
            return node.id in self.facts.sizes
        return any(map(self._has_wide_expression, ast.iter_child_nodes(node)))


class Bounds:
    """Compute intervals of index expressions, as expressions of the sizes."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self._fits: dict[sympy.Expr, bool] = {}

    def of(self, node: ast.expr) -> Interval | None:
        """Return the least and the largest value, or None if a part of the expression is not known to fit in 32 bits."""
        found = self._of(node)
        return found if found is not None and self.fits(found[1]) and self.fits(-found[0]) else None

    def _of(self, node: ast.expr) -> Interval | None:
        match node:
            case ast.Constant(value=int(value)) if not isinstance(value, bool):
                return sympy.Integer(value), sympy.Integer(value)
            case ast.Name(id=name) if name in self.facts.sizes:
                return self.facts.sizes[name], self.facts.sizes[name]
            case ast.Name(id=name) if name in self.facts.extents:
                return sympy.Integer(0), self.facts.extents[name] - 1
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                inner = self.of(operand)
                return None if inner is None else (-inner[1], -inner[0])
            case ast.BinOp(left=left, op=operator, right=right):
                one, two = self.of(left), self.of(right)
                return None if one is None or two is None else self._combined(operator, one, two)
        return None

    def _combined(self, operator: ast.operator, one: Interval, two: Interval) -> Interval | None:
        are_positive = self.at_least(one[0], 0) and self.at_least(two[0], 0)
        match operator:
            case ast.Add():
                return one[0] + two[0], one[1] + two[1]
            case ast.Sub():
                return one[0] - two[1], one[1] - two[0]
            case ast.Mult():
                return self._product(one, two)
            # A divisor of 0 is invalid in 64 bits too.
            case ast.FloorDiv() if are_positive:
                is_constant = two[0] == two[1] and two[0].is_Integer and two[0] > 0
                return sympy.Integer(0), _floor_at_most(one[1], two[0]) if is_constant else one[1]
            case ast.Mod() if are_positive:
                return sympy.Integer(0), two[1] - 1
        return None

    def _product(self, one: Interval, two: Interval) -> Interval | None:
        """Return the interval of a product, or None if a factor can have both signs."""
        is_negated = False
        factors = []
        for least, largest in (one, two):
            if self.at_least(least, 0):
                factors.append((least, largest))
            elif self.at_least(-largest, 0):
                factors.append((-largest, -least))
                is_negated = not is_negated
            else:
                return None
        least, largest = (first * second for first, second in zip(*factors, strict=True))
        return (-largest, -least) if is_negated else (least, largest)

    def fits(self, value: sympy.Expr) -> bool:
        """Return True if a value is at most 2^31 - 1 whenever the guards hold."""
        if value not in self._fits:
            limits = [sympy.Integer(LARGEST), *self.facts.limits]
            self._fits[value] = any(self.at_least(limit - value, 0) for limit in limits)
        return self._fits[value]

    def at_least(self, value: sympy.Expr, bound: int) -> bool:
        """Return True if a value is at least a bound for all values of the symbols.

        Each symbol is its least value plus a non-negative number; the proof is that the difference, written this way,
        has no negative coefficient.
        """
        value = sympy.sympify(value - bound)
        least = {symbol: self.facts.least(symbol) for symbol in value.free_symbols}
        if any(number is None or number < 0 for number in least.values()):
            return False
        return _is_never_negative(value, frozenset(least.items()))


# Equal blocks of a model have equal kernels: most calls repeat earlier ones.
@functools.lru_cache(maxsize=8192)
def _is_never_negative(value: sympy.Expr, least: frozenset[tuple[sympy.Symbol, int]]) -> bool:
    shifted = sympy.expand(value.xreplace({symbol: symbol + number for symbol, number in least}))
    if shifted.is_Rational:
        return bool(shifted >= 0)
    try:
        polynomial = sympy.Poly(shifted)
    except sympy.PolynomialError:
        return False
    if len(polynomial.gens) > MOST_SYMBOLS or len(polynomial.terms()) > MOST_TERMS:
        return False
    # The generators are the symbols, which now start at 0, and quotients of them.
    plain = all(generator.is_Symbol or generator.is_nonnegative for generator in polynomial.gens)
    return plain and all(coefficient >= 0 for coefficient in polynomial.coeffs())


def _floor_at_most(value: sympy.Expr, divisor: sympy.Integer) -> sympy.Expr:
    """Return an upper bound of `value // divisor`, exact if only a constant is not divisible.

    >>> W = sympy.Symbol("W", integer=True, positive=True)
    >>> _floor_at_most(2 * W - 1, sympy.Integer(2)), _floor_at_most(W, sympy.Integer(2))
    (W - 1, W/2)
    """
    terms = sympy.Add.make_args(sympy.expand(value))
    whole = sympy.Add(*(term for term in terms if term.as_coeff_Mul()[0] % divisor == 0 and not term.is_number))
    rest = sympy.expand(value - whole)
    return whole / divisor + rest // divisor if rest.is_Integer else value / divisor


def _index_use(node: ast.AST) -> ast.expr | None:
    """Return the index in `pointer + (index)` or `(index).to(tl.int32)`, where its width has no effect."""
    match node:
        case ast.BinOp(left=ast.Name(id=name), op=ast.Add(), right=index) if _POINTER.fullmatch(name):
            return index
        case ast.Call(
            func=ast.Attribute(value=index, attr="to"), args=[ast.Attribute(value=ast.Name(id="tl"), attr="int32")]
        ):
            return index
    return None


def _names(node: ast.AST) -> set[str]:
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
