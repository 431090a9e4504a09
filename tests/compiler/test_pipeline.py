"""Passes: requests are merged, applied and restored; failures are local and visible."""

import threading

import pytest
import torch
from torch import fx

import tritium
from support.small_models import Block, block_inputs
from tritium import compat
from tritium.compiler import lower
from tritium.errors import CatalogError, RequestConflict, UnrequestedConfig
from tritium.passes import ConfigRequest, Decline, Pass

EAGER = tritium.CompilationConfig(engine="eager")
NAME = "triton.max_tiles"


def asks(name: str, value, key: str = NAME) -> Pass:
    def run(graph, context):
        return ConfigRequest({key: value}, because=f"{name} wants it")

    return Pass(name, run)


def setting(name: str = NAME):
    return compat.inductor.inductor_settings()[name]


@pytest.fixture
def seen(monkeypatch):
    """What Inductor's settings were while it would have compiled; nothing is compiled."""
    found = []

    def compile_fx(gm, example_inputs):
        found.append(compat.inductor.inductor_settings())
        return gm.forward

    monkeypatch.setattr(compat.inductor, "compile_fx", compile_fx)
    return found


def run(*passes, config=None, **kwargs):
    backend = tritium.Backend(config or tritium.CompilationConfig(), passes=passes)
    compiled = torch.compile(Block(), backend=backend, **kwargs)
    with torch.inference_mode():
        compiled(*block_inputs())
    return tritium.explain(compiled)


def entry(report, name: str) -> dict:
    return next(found for found in report.passes if found["name"] == name)


class TestRequests:
    def test_are_applied_around_lowering_and_restored(self, seen):
        before = setting()
        report = run(asks("mine", 3))
        assert seen[0][NAME] == 3
        assert setting() == before
        assert entry(report, "mine")["requests"] == [{"settings": {NAME: 3}, "because": "mine wants it"}]
        assert "mine wants it" in str(report)

    def test_are_restored_when_lowering_raises(self, monkeypatch):
        before, calls = setting(), []

        def compile_fx(gm, example_inputs):
            calls.append(setting())
            raise RuntimeError("no code today")

        monkeypatch.setattr(compat.inductor, "compile_fx", compile_fx)
        with pytest.warns(RuntimeWarning, match="no code today"):
            run(asks("mine", 3))
        assert calls == [3, before]
        assert setting() == before

    def test_hold_in_another_thread_and_leave_the_first_alone(self, seen):
        before, errors, inside = setting(), [], []

        def compile_there():
            try:
                run(asks("mine", 3))
                inside.append(setting())
            except Exception as error:
                errors.append(error)

        thread = threading.Thread(target=compile_there)
        thread.start()
        thread.join()
        assert errors == []
        assert seen[0][NAME] == 3
        assert inside == [before]
        assert setting() == before

    def test_a_list_of_requests(self, seen):
        def both(graph, context):
            return [ConfigRequest({NAME: 3}, because="a"), ConfigRequest({"triton.tile_reductions": True}, because="b")]

        report = run(Pass("both", both))
        assert (seen[0][NAME], seen[0]["triton.tile_reductions"]) == (3, True)
        assert len(entry(report, "both")["requests"]) == 2

    def test_a_conflict_is_an_error_that_names_both(self, seen):
        before = setting()
        with pytest.raises(
            Exception, match=r"passes 'one' and 'two' request different values for triton\.max_tiles"
        ) as error:
            run(asks("one", 3), asks("two", 2))
        inner = getattr(error.value, "inner_exception", error.value)
        assert isinstance(inner, RequestConflict)
        assert seen == []
        assert setting() == before

    def test_the_callers_option_wins_and_the_report_says_so(self, seen):
        report = run(asks("mine", 3), options={NAME: 2})
        assert seen[0][NAME] == 2
        assert "the caller asked for 2" in entry(report, "mine")["declined"]

    def test_mode_is_inductor_s(self, seen):
        run(mode="max-autotune-no-cudagraphs")
        assert seen[0]["max_autotune"] is True
        assert setting("max_autotune") is False

    def test_an_unknown_setting_turns_the_pass_off(self, seen):
        with pytest.warns(RuntimeWarning, match=r"no Inductor setting triton\.max_tilse"):
            report = run(asks("mine", 3, key="triton.max_tilse"))
        assert "triton.max_tilse" in entry(report, "mine")["failed"]
        assert len(seen) == 1

    def test_setting_configuration_without_a_request_is_an_error(self, seen):
        before = setting()

        def assigns(graph, context):
            compat.inductor.inductor_config().triton.max_tiles = 3

        with pytest.warns(RuntimeWarning, match="must return a ConfigRequest"):
            report = run(Pass("assigns", assigns))
        assert entry(report, "assigns")["failed"].startswith(UnrequestedConfig.__name__)
        assert setting() == before
        assert seen[0][NAME] == before

    def test_a_decline_is_reported(self, seen):
        report = run(Pass("shy", lambda graph, context: Decline("not today")))
        assert entry(report, "shy")["declined"] == "not today"
        assert "declined: not today" in str(report)


class TestRewrites:
    def test_a_pass_may_rewrite(self):
        def double(graph: fx.Graph, context):
            for node in graph.find_nodes(op="call_function", target=torch.nn.functional.linear):
                with graph.inserting_after(node):
                    twice = graph.call_function(torch.add, (node, node))
                twice.meta = dict(node.meta)
                node.replace_all_uses_with(twice, delete_user_cb=lambda user, twice=twice: user is not twice)

        model, inputs = Block(), block_inputs()
        with torch.inference_mode():
            plain = torch.compile(model, backend=tritium.Backend(EAGER))(*inputs)
            torch._dynamo.reset()
            compiled = torch.compile(model, backend=tritium.Backend(EAGER, passes=[Pass("double", double)]))
            doubled = compiled(*inputs)
        torch.testing.assert_close(doubled - inputs[0], 2 * (plain - inputs[0]))
        assert entry(tritium.explain(compiled), "double")["changed"] is True

    def test_names_are_unique(self):
        with pytest.raises(CatalogError, match="pass 'fuse' is declared twice"):
            tritium.Backend(EAGER, passes=[asks("fuse", 1)])


class TestFailure:
    def broken(self, graph: fx.Graph, context):
        next(iter(graph.find_nodes(op="output"))).args = ((),)
        raise ZeroDivisionError("half way")

    def test_a_failing_pass_is_undone_and_the_model_runs(self, tmp_path):
        config = EAGER.with_(graph_log_url=str(tmp_path))
        model, inputs = Block(), block_inputs()
        with torch.inference_mode(), pytest.warns(RuntimeWarning, match="pass 'broken' failed"):
            compiled = torch.compile(model, backend=tritium.Backend(config, passes=[Pass("broken", self.broken)]))
            torch.testing.assert_close(compiled(*inputs), model(*inputs))
        report = tritium.explain(compiled)
        assert entry(report, "broken")["failed"] == "ZeroDivisionError: half way"
        assert entry(report, "broken")["changed"] is False
        assert report.sites["rms_norm"].fused == 1
        failure = report.failures[0]
        assert failure["part"] == "pass 'broken'"
        written = {path.name for path in (tmp_path / "Block.forward-0_0").iterdir()}
        assert {"failed-pass_broken-before.txt", "failed-pass_broken-broken.onnx"} <= written

    def test_graphs_are_written_even_when_nobody_asked(self, tmp_path, monkeypatch):
        monkeypatch.setattr(compat.inductor, "cache_dir", lambda: tmp_path)
        with pytest.warns(RuntimeWarning, match="graphs in"):
            report = run(Pass("broken", self.broken), config=EAGER)
        from pathlib import Path

        folder = Path(report.failures[0]["graphs_at"])
        assert tmp_path in folder.parents
        assert "rms_norm" in (folder / "failed-pass_broken-before.txt").read_text()

    def test_lowering_steps_down_once_then_runs_uncompiled(self, monkeypatch, tmp_path):
        attempts = []

        def compile_fx(gm, example_inputs):
            attempts.append([str(node.target) for node in gm.graph.nodes])
            raise RuntimeError(f"attempt {len(attempts)}")

        monkeypatch.setattr(compat.inductor, "compile_fx", compile_fx)
        monkeypatch.setattr(compat.inductor, "cache_dir", lambda: tmp_path)
        model, inputs = Block(), block_inputs()
        config = tritium.CompilationConfig(force_provider="reference", enable_freezing=True)
        with torch.inference_mode(), pytest.warns(RuntimeWarning, match="lowering"):
            compiled = torch.compile(model, backend=tritium.Backend(config))
            assert torch.equal(compiled(*inputs), model(*inputs))
            compiled(*inputs)
        assert len(attempts) == 2
        assert any("tritium.rms_norm" in target for target in attempts[0])
        assert not any("tritium" in target for target in attempts[1])
        report = tritium.explain(compiled)
        assert [failure["reason"] for failure in report.failures] == [
            "RuntimeError: attempt 1",
            "RuntimeError: attempt 2",
        ]
        assert report.records[0].engine == "eager"
        assert report.sites["rms_norm"].declined == 1

    def test_an_untouched_graph_is_not_lowered_twice(self, monkeypatch, tmp_path):
        attempts = []

        def compile_fx(gm, example_inputs):
            attempts.append(1)
            raise RuntimeError("no")

        monkeypatch.setattr(compat.inductor, "compile_fx", compile_fx)
        monkeypatch.setattr(compat.inductor, "cache_dir", lambda: tmp_path)
        with pytest.warns(RuntimeWarning, match="lowering"):
            run()
        assert len(attempts) == 1

    def test_what_dynamo_steers_by_passes_through(self, monkeypatch):
        def compile_fx(gm, example_inputs):
            raise torch._dynamo.exc.SkipFrame("steering")

        monkeypatch.setattr(compat.inductor, "compile_fx", compile_fx)
        model, inputs = Block(), block_inputs()
        with torch.inference_mode():
            assert torch.equal(torch.compile(model, backend=tritium.Backend())(*inputs), model(*inputs))


def test_saltless_gradients(seen):
    """A graph that needs gradients reaches Inductor with nothing of ours in its settings."""
    compiled = torch.compile(Block(), backend=tritium.Backend(passes=[asks("mine", 3)]))
    compiled(*block_inputs())
    assert seen[0][NAME] != 3
    assert seen[0][lower.SALT] is None


def test_the_users_own_post_grad_pass_still_runs():
    class Own(torch._inductor.custom_graph_pass.CustomGraphPass):
        def __call__(self, graph):
            calls.append(graph)

        def uuid(self):
            return "own"

    calls = []
    salted = compat.inductor.salted_pass(b"ours", Own())
    salted(fx.Graph())
    assert len(calls) == 1
    assert salted.uuid() == (b"ours", "own")
    assert compat.inductor.salted_pass(b"ours", None).uuid() == (b"ours",)
    # A plain function has no identity: Inductor must not cache what it did.
    assert compat.inductor.salted_pass(b"ours", lambda graph: None).uuid() is None
    assert compat.inductor.salted_pass(b"ours", [Own(), Own()]).uuid() == (b"ours", "own", "own")
