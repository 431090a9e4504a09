"""Kernels of all pieces compile while code is generated; caches, failures and reports are as if each piece waited."""

import copy

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor import async_compile, triton_bundler
from torch._inductor.codecache import LambdaFuture

import tritium
from support.blocks import Block, Model, counts, inputs, model_of, reuse
from tritium import Backend, CompilationConfig, compat
from tritium.compat.late_kernels import LateKernels
from tritium.compiler import together

INDUCTOR = CompilationConfig(reuse_blocks=True)


class Kernels:
    """Stands for the compiler of kernels, which do nothing; `events` has the submissions and the waits."""

    def __init__(self, fails=lambda number: False):
        self.events, self.fails = [], fails

    def submit(self, *_):
        number = self.events.count("submitted")
        self.events.append("submitted")
        return LambdaFuture(lambda: self._result(number))

    def _result(self, number):
        self.events.append("waited")
        if self.fails(number):
            raise ValueError("this kernel cannot be compiled")
        return lambda *_: None


@pytest.fixture
def kernels(monkeypatch):
    kernels = Kernels()
    monkeypatch.setattr(async_compile.AsyncCompile, "cpp_pybinding", lambda _, *given: kernels.submit(*given))
    with compat.inductor.empty_cache(), compat.inductor.inductor_patched({"compile_threads": 2}):
        yield kernels


def run(model, *, dynamic=False, batch=2, **options):
    compiled = torch.compile(model, backend=Backend(INDUCTOR), dynamic=dynamic, fullgraph=True, **options)
    with torch.no_grad():
        compiled(*inputs(batch))
    return compiled


class TestPieces:
    def test_all_code_is_generated_before_a_kernel_is_waited_for(self, kernels):
        compiled = run(model_of(Block, 8))
        (entry,) = reuse(compiled)
        assert counts(entry)[1] > 2
        assert "one after another" not in entry.summary
        first = kernels.events.index("waited")
        assert set(kernels.events[:first]) == {"submitted"}
        assert set(kernels.events[first:]) == {"waited"}
        assert kernels.events.count("waited") == first
        (record,) = tritium.explain(compiled).records
        assert {kernel.piece for kernel in record.kernels} == set(range(counts(entry)[1]))

    def test_sizes_that_the_model_makes_equal(self, kernels):
        """Tokens and their positions: one symbol replaces the other, and each piece gets the input that defines it."""

        class Placed(Model):
            def forward(self, x, positions, text, temb):
                return super().forward(torch.cat([text, positions * x], dim=1), temb)

        model = Placed(*(Block() for _ in range(8))).requires_grad_(False)
        (x, temb), positions = inputs(tokens=7), torch.ones(7, 16)
        compiled = torch.compile(model, backend=Backend(INDUCTOR), fullgraph=True)
        for tensor, dim in ((x, 1), (positions, 0)):
            torch._dynamo.mark_dynamic(tensor, dim)
        with torch.no_grad():
            compiled(x, positions, x[:, :3].clone(), temb)
        (record,) = tritium.explain(compiled).records
        assert record.failures == []
        (entry,) = reuse(compiled)
        assert counts(entry) == (10, 4)

    def test_a_size_that_the_model_makes_a_number(self, kernels):
        """As the rows of an image that equal those of a cached table: the first piece takes the number of rows."""

        class Rows(Model):
            def forward(self, x, table, rows, temb):
                near = table[: rows // 2].sum(0)
                return super().forward(x + near, temb) if rows == len(table) else near

        model = Rows(*(Block() for _ in range(8))).requires_grad_(False)
        x, temb = inputs()
        compiled = torch.compile(model, backend=Backend(INDUCTOR), dynamic=True, fullgraph=True)
        with torch.no_grad():
            compiled(x, nn.Parameter(torch.ones(8, 16)), 8, temb)
        (record,) = tritium.explain(compiled).records
        assert record.failures == []
        (entry,) = reuse(compiled)
        assert counts(entry) == (10, 4)

    def test_a_kernel_that_cannot_be_compiled_costs_the_cut_alone(self, kernels):
        kernels.fails = lambda number: number == 1
        with pytest.warns(RuntimeWarning, match="lowering of a block failed.*this kernel cannot be compiled"):
            compiled = run(model_of(Block, 8))
        (entry,) = reuse(compiled)
        assert "cannot be lowered" in entry.failed
        (record,) = tritium.explain(compiled).records
        assert [failure.part for failure in record.failures] == ["lowering of a block", "reuse_blocks"]
        assert record.engine == "inductor"
        assert {kernel.piece for kernel in record.kernels} == {None}

    def test_every_piece_is_found_in_the_caches(self, kernels):
        model = model_of(Block, 8)
        for lookups in ("fxgraph_cache_miss", "fxgraph_cache_hit"):
            counters.clear()
            torch._dynamo.reset()
            (entry,) = reuse(run(model))
            assert {name for name in counters["inductor"] if name.startswith("fxgraph_cache")} == {lookups}
            assert counters["inductor"][lookups] == counts(entry)[1]

    @pytest.mark.parametrize(
        ("settings", "why"),
        [({"compile_threads": 1}, "in this process"), ({"triton.multi_kernel": 1}, "(triton.multi_kernel)")],
    )
    def test_wait_one_after_another_where_settings_require_it(self, kernels, settings, why):
        with compat.inductor.inductor_patched(settings):
            # Without workers, kernels are no futures.
            assert why in compat.late_kernels.decline_late_kernels()
            if settings.get("compile_threads") != 1:
                assert f"one after another: {compat.late_kernels.decline_late_kernels()}" in self._summary(kernels)

    def test_wait_one_after_another_with_dynamic_sizes_and_ranks(self, kernels, monkeypatch):
        assert "dynamic sizes" in self._summary(kernels, dynamic=True)
        monkeypatch.setattr(together, "RANKS", [Alone()])
        torch._dynamo.reset()
        assert "ranks compile in turn" in self._summary(kernels)

    def _summary(self, kernels, **options):
        kernels.events.clear()
        (entry,) = reuse(run(model_of(Block, 8), **options))
        assert kernels.events.index("waited") < kernels.events.count("submitted")
        return entry.summary


class Alone:
    def all(self, own):
        return own

    def turn(self, key):
        return compat.inductor.inductor_patched({})


class TestCacheEntries:
    """`FxGraphCache` and `TritonBundler` get what they get without a postponed wait."""

    @pytest.fixture(autouse=True)
    def folder(self, tmp_path, monkeypatch):
        monkeypatch.setattr(triton_bundler, "triton_cache_dir", lambda device: str(tmp_path))
        self.folder = tmp_path
        self.saved = []

    def _kernel(self, name):
        """A kernel that a worker has compiled: waiting for it tells the bundler its folder."""

        def result():
            (self.folder / name).mkdir()
            (self.folder / name / f"{name}.cubin").write_bytes(name.encode())
            triton_bundler.TritonBundler.put(name, 0)
            return name

        return LambdaFuture(result)

    def _wait(self, late, *names, now=()):
        bundler = triton_bundler.TritonBundler
        scope = {name: self._kernel(name) for name in names} | {"other": 1}
        # Kernels that this process compiled at once.
        for name in now:
            self._kernel(name).result()
        late._wait(lambda compiler, scope: [value.result() for value in list(scope.values())[:-1]], None, scope)
        graph = Graph()
        graph.set_triton_bundle(bundler.collect()[0])
        late._save(lambda key, graph, *rest: self.saved.append((key, copy.copy(graph), rest)), names, graph, "rest")
        return graph

    def test_contain_the_kernels_of_their_graph(self):
        bundler = triton_bundler.TritonBundler
        graphs = [LateKernels(), LateKernels()]
        codes = []
        for late, names, now in zip(graphs, (("a", "b"), ("c",)), ((), ("d",)), strict=True):
            bundler.begin_compile()
            codes.append(self._wait(late, *names, now=now))
        assert not self.saved
        for late in graphs:
            late.finish()
        kernels = [[kernel.kernel_hash for kernel in graph.bundle.kernel_artifacts] for _, graph, _ in self.saved]
        assert kernels == [["a", "b"], ["d", "c"]]
        assert self.saved[0][1].bundle.kernel_artifacts[0].artifacts[0].payload == b"a"
        assert [(key, rest) for key, _, rest in self.saved] == [(("a", "b"), ("rest",)), (("c",), ("rest",))]
        # The entry has no code, and the graph keeps its code.
        assert [graph.code for _, graph, _ in self.saved] == [None, None]
        assert [graph.code for graph in codes] == ["code", "code"]
        assert bundler._entries is None

    def test_are_written_at_once_if_no_kernel_is_waited_for(self):
        late = LateKernels()
        triton_bundler.TritonBundler.begin_compile()
        self._wait(late, now=("a",))
        assert not late
        assert len(self.saved) == 1

    def test_are_not_written_for_a_kernel_that_cannot_be_compiled(self):
        late = LateKernels()
        triton_bundler.TritonBundler.begin_compile()
        (self.folder / "a").mkdir()
        self._wait(late, "a")
        with pytest.raises(FileExistsError):
            late.finish()
        assert not self.saved
        assert triton_bundler.TritonBundler._entries is None


class Graph:
    """What `LateKernels` uses of a `CompiledFxGraph`."""

    code = "code"

    def set_triton_bundle(self, bundle):
        self.bundle = self._triton_bundle = bundle

    def prepare_for_serialization(self):
        self.code = None


def test_a_torch_without_a_hook_waits(monkeypatch):
    assert compat.late_kernels.decline_hooks() is None
    monkeypatch.delattr(triton_bundler.TritonBundler, "collect")
    assert compat.late_kernels.decline_hooks().endswith("has no torch._inductor.triton_bundler.TritonBundler.collect")
    assert compat.late_kernels.decline_late_kernels() == compat.late_kernels.decline_hooks()
