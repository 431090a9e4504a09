"""The pattern algebra: what each kind of pattern matches, what it captures, and which nodes belong to a match."""

import operator

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st
from torch import fx

from tritium import fusions
from tritium.errors import CatalogError
from tritium.fusions import Fusion, canonical
from tritium.fusions.expression import Expr, Forms
from tritium.fusions.match import Recogniser
from tritium.fusions.patterns import (
    captured,
    form,
    given,
    number,
    one_of,
    only_reader,
    optional,
    rest,
    shared,
    site,
    tensor,
    traced,
    value,
)

A, B, C, X = map(tensor, "abcx")


def graph_of(function):
    """The graph of a function of tensors of [2, 4], with the values that Dynamo would set."""
    module = fx.symbolic_trace(function)

    class Values(fx.Interpreter):
        def run_node(self, n):
            n.meta["example_value"] = super().run_node(n)
            return n.meta["example_value"]

    Values(module).run(*(torch.randn(2, 4) for _ in module.graph.find_nodes(op="placeholder")))
    return module.graph


def matches(pattern, function, sites=()):
    """The matches that end at the function's result, by names: captures, own nodes, shared nodes."""
    graph = graph_of(function)
    recogniser = Recogniser(graph)
    recogniser.find(sites)
    (result,) = next(iter(graph.find_nodes(op="output"))).args
    names = lambda nodes: {node.name for node in nodes}  # noqa: E731
    return [
        (
            {name: thing.node.name if isinstance(thing, Expr) else thing for name, thing in found.bindings.items()},
            names(found.nodes),
            names(found.shared),
        )
        for found in recogniser.matches(pattern, result)
    ]


def captures(pattern, function, sites=()):
    return [found[0] for found in matches(pattern, function, sites)]


class TestForms:
    def test_operands_and_nodes(self):
        pattern = form("mul", form("silu", A), B)
        assert matches(pattern, lambda a, b: F.silu(a) * b) == [({"a": "a", "b": "b"}, {"silu", "mul"}, set())]
        assert not matches(pattern, lambda a, b: F.silu(a) + b)

    def test_casts_and_identities_belong_to_the_match(self):
        pattern = form("mul", form("silu", A), B)
        ((_, nodes, _),) = matches(pattern, lambda a, b: F.silu(a).double().contiguous() * b)
        assert nodes == {"silu", "double", "contiguous", "mul"}
        strict = form("mul", form("silu", A, casts=False), B)
        assert not matches(strict, lambda a, b: F.silu(a).double() * b)
        assert matches(strict, lambda a, b: F.silu(a).contiguous() * b)

    def test_constants_and_attributes(self):
        assert captures(form("gelu", A, attrs=("tanh",)), lambda a: F.gelu(a, approximate="tanh")) == [{"a": "a"}]
        assert not captures(form("gelu", A, attrs=("tanh",)), lambda a: F.gelu(a))
        how = form("gelu", A, attrs=(value("how"),))
        assert captures(how, lambda a: F.gelu(a)) == [{"a": "a", "how": "none"}]
        assert captures(form("add", A, 1), lambda a: 1.0 + a) == [{"a": "a"}]
        assert not captures(form("add", A, 1), lambda a: 2 + a)

    def test_a_list_of_operands(self):
        joined = form("cat", rest("parts"), attrs=(value("dim"),))
        ((found, nodes, _),) = matches(joined, lambda a, b, c: torch.cat([a, b, c], -1))
        assert [part.node.name for part in found["parts"]] == ["a", "b", "c"]
        assert (found["dim"], nodes) == (1, {"cat"})


class TestCaptures:
    def test_a_name_stands_for_one_value(self):
        assert captures(form("add", A, form("mul", A, B)), lambda a, b: a + a * b) == [{"a": "a", "b": "b"}]
        assert not captures(form("add", A, form("mul", A, B)), lambda a, b, c: a + c * b)

    def test_only_a_lossless_cast_is_the_same_value(self):
        twice = form("add", A, form("silu", A))
        assert captures(twice, lambda a: a.double() + F.silu(a))
        assert not captures(twice, lambda a: a.half() + F.silu(a))

    @pytest.mark.parametrize(
        ("left", "right", "same"),
        [
            (lambda a: a[:, :2], lambda a: a[:, :2], True),
            (lambda a: a.split(2, -1)[0], lambda a: a.split(2, -1)[0], True),
            (lambda a: a[:, :2], lambda a: a[:, 2:], False),
            # Of one size, at one index.
            (lambda a: a.split([1, 1, 2], -1)[1], lambda a: a.split([2, 1, 1], -1)[1], False),
            (lambda a: a.flatten().chunk(3)[2], lambda a: a.flatten().chunk(4)[2], False),
        ],
    )
    def test_two_views_are_one_value_if_they_are_the_same(self, left, right, same):
        found = captures(form("add", A, form("silu", A)), lambda a: left(a) + F.silu(right(a)))
        assert bool(found) == same

    def test_numbers_and_tensors_are_told_apart(self):
        assert captures(form("mul", A, number("scale")), lambda a: 0.5 * a) == [{"a": "a", "scale": 0.5}]
        assert not captures(form("mul", A, number("scale")), lambda a, b: a * b)
        assert not captures(form("mul", A, B), lambda a: a * 0.5)

    def test_the_whole_of_a_pattern(self):
        pattern = form("mul", captured("sum", form("add", A, B)), C)
        assert captures(pattern, lambda a, b, c: (a + b).double() * c)[0]["sum"] == "add"
        assert captures(pattern, lambda a, b, c: (a + b).half() * c)[0]["sum"] == "half"

    def test_constants_for_what_an_alternative_lacks(self):
        product = form("mul", A, B)
        pattern = optional(form("add", product, C), product, c=None)
        assert captures(pattern, lambda a, b, c: c + a * b)[0] == {"a": "a", "b": "b", "c": "c"}
        assert captures(pattern, lambda a, b: a * b)[0] == {"a": "a", "b": "b", "c": None}
        both = one_of(given(form("silu", A), name="silu"), given(form("gelu", A), name="gelu"))
        assert captures(both, lambda a: F.gelu(a)) == [{"a": "a", "name": "gelu"}]


class TestReadersAndSites:
    def test_the_only_reader(self):
        pattern = form("silu", only_reader(form("mul", A, B)))
        assert captures(pattern, lambda a, b: F.silu((a * b).double()))
        assert not captures(pattern, lambda a, b: F.silu((p := a * b).double()) + 0 * p)

        def read_twice(a, b):
            product = a * b
            product.sum()
            return F.silu(product)

        assert not captures(pattern, read_twice)

    def test_shared_nodes_are_kept_apart(self):
        pattern = form("mul", shared(form("silu", A)), B)
        assert matches(pattern, lambda a, b: F.silu(a).contiguous() * b) == [
            ({"a": "a", "b": "b"}, {"mul"}, {"silu", "contiguous"})
        ]

    def test_the_site_of_another_fusion(self):
        gate = fusions.catalog()["gated_residual"]
        pattern = form("silu", site("gated_residual", y=form("silu", C)))
        found = matches(pattern, lambda x, g, c: F.silu((x + g * F.silu(c)).double()), [gate])
        assert found[0][0].items() >= {"x": "x", "gate": "g", "c": "c"}.items()
        # Everything of another fusion's site is shared with it.
        assert {"add", "mul", "double"} <= found[0][2]
        assert not matches(pattern, lambda x, g, c: F.silu(x + g * c), [gate])
        narrow = form("silu", site("gated_residual", casts=False))
        assert not matches(narrow, lambda x, g, c: F.silu((s := x + g * c).half()) + 0 * s, [gate])


OPERATORS = {
    "add": (operator.add, torch.add, lambda left, right: left.add(right)),
    "mul": (operator.mul, torch.mul, lambda left, right: left.mul(right)),
}


@settings(max_examples=40)
@drawn(st.data())
def test_commutative_operands_match_in_any_order_and_spelling(data):
    """`a * (b + c)` with a cast before each operand, in every order and by operator, function or method."""
    cast = lambda thing: thing.double() if data.draw(st.booleans()) else thing  # noqa: E731

    def apply(name, left, right):
        pair = (left, right) if data.draw(st.booleans()) else (right, left)
        return data.draw(st.sampled_from(OPERATORS[name]))(*map(cast, pair))

    pattern = form("mul", A, form("add", B, form("silu", C)))
    found = captures(pattern, lambda a, b, c: apply("mul", a, apply("add", b, F.silu(c))))
    assert {"a": "a", "b": "b", "c": "c"} in found
    # The same tree with another leaf is another value.
    assert not captures(pattern, lambda a, b, c: apply("mul", a, apply("add", b, c)))


FUNCTIONS = (
    (lambda x, y: x + y * F.silu(x), form("add", X, form("mul", tensor("y"), form("silu", X)))),
    (lambda x, y: x.square() - y, form("add", form("square", X), form("neg", tensor("y")))),
)


@pytest.mark.parametrize(("function", "pattern"), FUNCTIONS)
def test_a_function_is_the_pattern_of_its_arithmetic(function, pattern):
    found = captures(traced(function), function)
    assert found[0] == captures(pattern, function)[0] == {"x": "x", "y": "y"}


def test_a_pattern_is_printed_as_it_is_written():
    pattern = one_of(form("mul", A, number("n")), given(form("silu", A, casts=False), n=1))
    assert eval(repr(pattern)).text == repr(pattern)


class TestOrder:
    def test_what_is_before_matches_first_and_regions_last(self):
        names = [fusion.name for fusion in fusions.ordered(fusions.catalog().values())]
        for fusion in fusions.catalog().values():
            for other in fusion.before:
                assert names.index(fusion.name) < names.index(other)
        regions = [fusions.catalog()[name].region for name in names]
        assert regions == sorted(regions)

    @pytest.mark.parametrize(
        ("before", "reason"),
        [
            ({"a": ("b",), "b": ("a",)}, "each before the other"),
            ({"a": ("rmsnorm",), "rms_norm": ()}, "did you mean 'rms_norm'"),
        ],
    )
    def test_an_impossible_order_is_an_error(self, before, reason):
        with pytest.raises(CatalogError, match=reason):
            fusions.ordered(Fusion(name, (name,), before=others) for name, others in before.items())


def test_two_fusions_of_one_name_are_an_error():
    with pytest.raises(CatalogError, match="two fusions are named 'gelu'"):
        fusions.ordered([*fusions.catalog().values(), Fusion("gelu", ("gelu",))])


def test_two_forms_of_one_operation_are_an_error(monkeypatch):
    from tritium.fusions.canonical import operators

    other = Forms("operators")
    other.builder(torch.add)(lambda of, node: None)
    monkeypatch.setattr(operators, "FORMS", other)
    with pytest.raises(CatalogError, match="declares a form of"):
        canonical.catalog.__wrapped__()
