"""Plug-ins, passes and fusions that misbehave are off by name, and everything else goes on."""

import importlib.metadata
import warnings

import pytest
import torch
import torch.nn.functional as F

import tritium
from tritium import Backend, CompilationConfig, catalog, ops
from tritium import fusions as fusion_catalogue
from tritium.cli import doctor
from tritium.compiler import pipeline
from tritium.plugins import Fusion, Pass

EAGER = CompilationConfig(engine="eager")


def function(x, w):
    return F.gelu(F.rms_norm(x, (16,), w)) + x, x * 2.0


@pytest.fixture
def call():
    torch.manual_seed(0)
    return torch.randn(2, 5, 16), torch.rand(16)


def run(call, **extensions):
    """The results, the report and Tritium's warnings of a compiled call."""
    with warnings.catch_warnings(record=True) as caught, torch.no_grad():
        warnings.simplefilter("always")
        compiled = torch.compile(function, backend=Backend(EAGER, **extensions))
        results = compiled(*call)
    found = [str(one.message) for one in caught if "tritium" in str(one.message)]
    return results, tritium.explain(compiled), found


def output_of(graph):
    return next(node for node in graph.nodes if node.op == "output")


def returning(change):
    """A pass that replaces the results of a graph, given the graph and its two results."""

    def run(graph, context):
        output = output_of(graph)
        with graph.inserting_before(output):
            output.args = (change(graph, *output.args[0]),)

    return run


def add_input(graph, context):
    with graph.inserting_before(next(iter(graph.nodes))):
        graph.placeholder("extra")


WRONG = {
    "erased": (lambda graph, context: graph.erase_node(output_of(graph)), "the graph has 0 output nodes"),
    "dropped": (returning(lambda graph, a, b: (a,)), "had 2 outputs and has 1"),
    "repeated": (returning(lambda graph, a, b: (a, b, a)), "had 2 outputs and has 3"),
    "swapped": (returning(lambda graph, a, b: (b, a)), "which was output 1"),
    "reduced": (
        returning(lambda graph, a, b: (graph.call_function(torch.sum, (a,)), b)),
        r"had shape \[2, 5, 16\], .* has shape \[\],",
    ),
    "widened": (
        returning(lambda graph, a, b: (graph.call_method("double", (a,)), b)),
        "torch.float32 .* torch.float64",
    ),
    "forgotten": (returning(lambda graph, a, b: (None, b)), "output 0 was .* and is None"),
    "an input": (add_input, "the graph's inputs were"),
}


class TestPasses:
    @pytest.mark.parametrize(("wrong", "reason"), WRONG.values(), ids=WRONG)
    def test_a_changed_interface_turns_the_pass_off(self, call, wrong, reason):
        seen = []
        last = Pass("last", lambda graph, context: seen.append(len(output_of(graph).args[0])))
        results, report, told = run(call, passes=[Pass("wrong", wrong), last])
        for result, expected in zip(results, function(*call), strict=True):
            torch.testing.assert_close(result, expected)
        (failure,) = report.failures
        assert failure["part"] == "pass 'wrong'"
        (line,) = told
        assert "pass 'wrong' failed and is turned off" in line
        with pytest.raises(AssertionError, match=reason):
            raise AssertionError(failure["reason"])
        assert seen == [2], "the next pass has the graph as it was"

    def test_a_right_rewrite_of_an_output_passes(self, call):
        right = returning(lambda graph, a, b: (a, graph.call_function(torch.mul, (b, 1.0))))
        results, report, told = run(call, passes=[Pass("right", right)])
        assert told == report.failures == []
        torch.testing.assert_close(results[1], call[0] * 2.0)


def doubled(x):
    return x * 2.0


def boom(*_, **__):
    raise RuntimeError("boom")


class TestFusions:
    @pytest.mark.parametrize("where", ["find", "accept", "decline", "arguments"])
    def test_one_that_raises_is_off_alone(self, call, where):
        more = {"spellings": (doubled,), "replacement": ops.catalog()["rms_norm"], "before": ("rope",)}
        broken = Fusion("broken", ("broken",), **({} if where == "find" else more), **{where: boom})
        results, report, told = run(call, fusions=[broken])
        torch.testing.assert_close(results[0], function(*call)[0])
        assert [failure["part"] for failure in report.failures] == ["fusion 'broken'"]
        (line,) = told
        assert "fusion 'broken' failed and is turned off" in line
        assert report.sites["rms_norm"].recognised == 1, "the other fusions go on"
        assert report.sites["gelu"].recognised == 1


class TestEntryPoints:
    @pytest.fixture
    def installed(self, monkeypatch):
        """A function that declares entry points, as an installed package does."""
        points = []
        original = importlib.metadata.entry_points

        def entry_points(*, group):
            return [*original(group=group), *(point for point in points if point.group == group)]

        monkeypatch.setattr(importlib.metadata, "entry_points", entry_points)
        caches = (fusion_catalogue._entries, pipeline._installed_passes)

        def forget():
            for cache in caches:
                cache.cache_clear()
            catalog._BROKEN.clear()

        forget()
        yield lambda name, value, group: points.append(importlib.metadata.EntryPoint(name, value, group))
        monkeypatch.undo()
        forget()

    @pytest.mark.parametrize(
        ("value", "reason"),
        [
            ("no_such_module:FUSION", "ModuleNotFoundError: No module named 'no_such_module'"),
            ("math:no_such_name", "AttributeError"),
            ("math:pi", "it is a float, not a"),
        ],
    )
    @pytest.mark.parametrize("group", ["tritium.fusions", "tritium.passes"])
    def test_one_that_does_not_load_is_off_and_doctor_lists_it(self, installed, call, value, reason, group):
        installed("theirs", value, group)
        results, report, told = run(call)
        torch.testing.assert_close(results[0], function(*call)[0])
        assert report.sites["rms_norm"].recognised == 1
        (line,) = told
        assert f"entry point 'theirs' of group {group!r} ({value}) is not used: " in line
        assert reason in line
        assert run(call)[2] == [], "it is told once"
        (found,) = doctor._broken_plugins()
        assert found in line
