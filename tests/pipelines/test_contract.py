"""A shape contract in several threads: it affects its own calls and nothing else."""

import inspect
import threading

import pytest
import torch

import tritium
from support import tiny_pipeline
from tritium import CompilationConfig, Plan, Shapes, compat
from tritium.errors import ShapeViolation

EAGER = CompilationConfig(engine="eager")


def inputs(tokens=64):
    generator = torch.Generator().manual_seed(0)
    hidden_states = torch.randn(1, tokens, tiny_pipeline.WIDTH, generator=generator)
    return {"hidden_states": hidden_states, "guidance": None, "return_dict": False}


def optimized(pipe, on_violation="compile", blocks=()):
    """A warmed-up handle; with `blocks`, Python runs between compiled blocks."""
    shapes = Shapes(sizes=32, on_violation=on_violation)
    by_component = {"transformer": blocks} if blocks else {}
    handle = tritium.optimize(pipe, Plan(config=EAGER, progress=False, shapes=shapes, blocks=by_component))
    handle.warmup()
    return handle


@pytest.fixture
def pipe():
    return tiny_pipeline.Pipeline()


class Threads:
    """Run functions in one thread each; raise the first error of any."""

    def __init__(self, *functions):
        self.errors = []
        self.results = {}
        self._threads = [threading.Thread(target=self._run, args=(f,), name=f.__name__) for f in functions]

    def _run(self, function):
        try:
            with torch.no_grad():
                self.results[function.__name__] = function()
        except BaseException as error:
            self.errors.append(error)

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_):
        for thread in self._threads:
            thread.join(60)
        for error in self.errors:
            raise error


def runs_compiled():
    """Whether torch.compile compiles an unrelated function in this thread."""
    function = torch.compile(lambda x: x + 1 if torch.compiler.is_dynamo_compiling() else x, backend="eager")
    return bool(function(torch.zeros(1)))


class Meeting:
    """Keeps a thread of some name inside a call of a pipeline's transformer until it is let go."""

    def __init__(self, pipe, name):
        self.name, self.inside, self.go = name, threading.Event(), threading.Event()
        pipe.transformer.embedder.register_forward_pre_hook(self._wait)

    def _wait(self, module, arguments):
        if threading.current_thread().name == self.name:
            self.inside.set()
            assert self.go.wait(30)


class TestThreads:
    @pytest.mark.parametrize("on_violation", ["compile", "eager", "error"])
    def test_calls_that_end_out_of_order_leave_nothing(self, pipe, on_violation):
        with optimized(pipe, on_violation, blocks="Block") as handle:
            first, second = Meeting(pipe, "one"), Meeting(pipe, "two")
            tokens = {"one": 64, "two": 64} if on_violation == "error" else {"one": 36, "two": 49}

            def one():
                return pipe.transformer(**inputs(tokens["one"]))[0]

            def two():
                return pipe.transformer(**inputs(tokens["two"]))[0]

            with Threads(one, two) as threads:
                assert first.inside.wait(30)
                assert second.inside.wait(30)
                assert runs_compiled()
                assert torch._dynamo.config.recompile_limit == 8
                first.go.set()
                threads._threads[0].join(60)
                second.go.set()
            assert runs_compiled()
            assert torch._dynamo.eval_frame._stance.stance == "default"
            for name, found in threads.results.items():
                handle.use({"transformer": "eager"})
                with torch.no_grad():
                    assert torch.equal(found, pipe.transformer(**inputs(tokens[name]))[0])
                handle.use({"transformer": "tritium"})
        assert runs_compiled()

    @pytest.mark.parametrize("on_violation", ["compile", "eager", "error"])
    def test_a_promised_call_lets_other_threads_compile(self, pipe, on_violation):
        other = tiny_pipeline.Pipeline()
        with optimized(pipe, on_violation, blocks="Block"), tritium.optimize(other, Plan(config=EAGER, progress=False)):
            meeting = Meeting(pipe, "one")

            def one():
                return pipe.transformer(**inputs())[0]

            with Threads(one):
                assert meeting.inside.wait(30)
                assert runs_compiled()
                with torch.no_grad():
                    other.transformer(**inputs(25))
                meeting.go.set()

    def test_another_thread_s_compilation_breaks_no_promise(self, pipe):
        begun, over = threading.Event(), threading.Event()

        def slow(gm, example_inputs):
            begun.set()
            assert over.wait(30)
            return gm

        def compiling():
            return torch.compile(lambda x: x + 1, backend=slow)(torch.ones(3))

        with optimized(pipe, "error") as handle:
            with Threads(compiling), torch.no_grad():
                assert begun.wait(30)
                try:
                    assert not compat.dynamo.is_compiling()
                    pipe(height=32, width=32)
                finally:
                    over.set()
            assert handle.violations == []

    def test_dims_are_marked_while_another_thread_compiles(self):
        begun, over = threading.Event(), threading.Event()

        def slow(gm, example_inputs):
            begun.set()
            over.wait(5)
            return gm

        def compiling():
            return torch.compile(lambda x: x.sin(), backend=slow)(torch.ones(3))

        model = tritium.compile(torch.nn.Linear(4, 4), EAGER, dynamic_dims={"input": [0]})
        with torch.no_grad(), Threads(compiling):
            assert begun.wait(30)
            threading.Timer(0.3, over.set).start()
            model(torch.randn(5, 4))
        with torch.no_grad():
            graphs = compat.dynamo.graphs_compiled()
            for tokens in (6, 7, 8):
                model(torch.randn(tokens, 4))
            assert compat.dynamo.graphs_compiled() == graphs


class TestInsideACompiledFunction:
    @pytest.mark.parametrize("on_violation", ["compile", "eager", "error"])
    @pytest.mark.parametrize("form", ["module", "function"])
    def test_a_part_becomes_part_of_the_callers_graph(self, pipe, on_violation, form):
        with optimized(pipe, on_violation), torch.no_grad():
            transformer = pipe.transformer
            expected = transformer(**inputs())[0]
            around = transformer if form == "module" else lambda **call: (transformer(**call)[0] * 1,)
            torch.testing.assert_close(torch.compile(around, backend="eager")(**inputs())[0], expected)
            assert torch.equal(transformer(**inputs())[0], expected)

    def test_the_callers_stance_is_followed(self, pipe):
        with optimized(pipe, "error") as handle, torch.no_grad():
            expected = pipe.transformer(**inputs())[0]
            with torch.compiler.set_stance("force_eager"):
                assert torch.equal(pipe.transformer(**inputs())[0], expected)
            assert handle.violations == []


class TestCalls:
    @pytest.mark.parametrize("on_violation", ["compile", "error"])
    def test_a_default_that_is_left_out_is_the_same_call(self, pipe, on_violation):
        with optimized(pipe, on_violation) as handle, torch.no_grad():
            call = inputs()
            pipe.transformer(**call)
            del call["guidance"]
            pipe.transformer(**call)
            pipe.transformer(call.pop("hidden_states"), **call)
            pipe.transformer(inputs()["hidden_states"], None, 1.0, return_dict=False)
            assert handle.violations == []

    @pytest.mark.parametrize(("blocks", "done"), [((), "compiled"), ("Block", "nothing to compile")])
    def test_a_violation_says_whether_it_compiled(self, pipe, blocks, done):
        with optimized(pipe, blocks=blocks) as handle, torch.no_grad():
            graphs = compat.dynamo.graphs_compiled()
            pipe.transformer(**{**inputs(), "return_dict": True})
            assert (compat.dynamo.graphs_compiled() > graphs) == (done == "compiled")
            (violation,) = handle.violations
            assert violation.done == done
            assert "return_dict is True, promised was False" in violation.what

    def test_arguments_that_the_module_does_not_take(self, pipe):
        with optimized(pipe, "error"), pytest.raises(TypeError, match="nonsense"):
            pipe.transformer(**inputs(), nonsense=1)

    def test_a_promised_call_binds_nothing(self, pipe, monkeypatch):
        """The steady state of a contract is one look into a set."""
        with optimized(pipe, "error") as handle, torch.no_grad():
            pipe.transformer(**inputs())
            bound = []
            bind = inspect.Signature.bind
            monkeypatch.setattr(inspect.Signature, "bind", lambda *a, **k: bound.append(a) or bind(*a, **k))
            contract = handle.part("transformer").contract
            monkeypatch.setattr(contract, "signature", lambda *_: pytest.fail("the facts of a promised call"))
            for _ in range(3):
                pipe.transformer(**inputs())
            assert bound == []

    def test_numbers_that_are_equal_and_not_the_same_are_told_apart(self):
        from tritium.pipelines.contract import _spelling

        calls = [{"x": value} for value in (1, 1.0, True, 0.0, -0.0, "1", None)]
        assert len({_spelling((), call) for call in calls}) == len(calls)
        nan = float("nan")
        assert _spelling((nan,), {}) == _spelling((float("nan"),), {})

    def test_weights_that_change_the_code_are_refused(self, pipe):
        with optimized(pipe, "error"), torch.no_grad():
            pipe.transformer.blocks[0].norm.eps = 1e-3
            with pytest.raises(ShapeViolation, match=r"as promised, and yet to be compiled again.*eps"):
                pipe.transformer(**inputs())
