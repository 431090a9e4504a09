"""Blocks that repeat are compiled once: the same numbers as eager for every way in which blocks can differ or be tied."""

import contextlib
import json

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import tritium
from support.blocks import Block, Model, inputs
from support.small_models import Stack, block_inputs, flux, flux_inputs
from support.zoo import ZOO
from tritium import Backend, CompilationConfig, FusionPatterns, compat
from tritium.compiler.blocks import cut
from tritium.compiler.blocks.reuse import _kept
from tritium.compiler.blocks.segments import Facts

EAGER = CompilationConfig(reuse_blocks=True, engine="eager")


def model_of(kind, count=6, **arguments):
    torch.manual_seed(0)
    return Model(*(kind(**arguments) for _ in range(count))).requires_grad_(False)


def reuse(compiled):
    """What the pass says of each graph."""
    passes = [entry for record in tritium.explain(compiled).records for entry in record.passes]
    return [entry for entry in passes if entry.name == "reuse_blocks"]


def check(model, *calls, config=EAGER, **options):
    """The compiled model gives eager's numbers and changes inputs as eager does; returns what the pass says."""
    compiled = torch.compile(model, backend=Backend(config), fullgraph=True, **options)
    with torch.no_grad():
        for call in calls or [inputs()]:
            mine, theirs = ([part.clone() for part in call] for _ in range(2))
            torch.testing.assert_close(compiled(*mine), model(*theirs), atol=0, rtol=0)
            torch.testing.assert_close(mine, theirs, atol=0, rtol=0)
    entries = reuse(compiled)
    assert all(entry.failed is None for entry in entries)
    return entries


def counts(entry):
    """Pieces, and those of them that were compiled."""
    assert entry.summary is not None, entry.declined
    words = entry.summary.split()
    return int(words[0]), int(words[2])


class TestEqualBlocks:
    def test_are_compiled_once(self):
        (entry,) = check(model_of(Block, 8))
        total, compiled = counts(entry)
        assert total == 10
        # Before, first, middle, behind: the first gets no end of another block.
        assert compiled == 4
        assert entry.changed

    def test_a_number_that_differs_is_another_piece(self):
        blocks = [Block(eps=eps) for eps in (1e-6, 1e-6, 1e-6, 1e-5, 1e-5, 1e-5, 1e-5, 1e-5)]
        (entry,) = check(Model(*blocks).requires_grad_(False))
        assert counts(entry) == (10, 5)

    def test_a_hook_on_one_block_is_another_piece(self):
        model = model_of(Block, 8)
        model.blocks[4].register_forward_hook(lambda module, arguments, result: result * 2)
        (entry,) = check(model)
        assert counts(entry)[1] in (5, 6)

    def test_a_lora_on_some_blocks_is_another_piece(self):
        class Lora(nn.Module):
            def __init__(self, base):
                super().__init__()
                self.base, self.a, self.b = base, nn.Linear(16, 2, bias=False), nn.Linear(2, 32, bias=False)

            def forward(self, x):
                return self.base(x) + self.b(self.a(x)) * 0.5

        model = model_of(Block, 10)
        for block in model.blocks[3:7]:
            block.up = Lora(block.up)
        (entry,) = check(model.requires_grad_(False))
        assert counts(entry) == (12, 5)

    def test_another_processor_in_some_blocks_is_another_piece(self):
        class Switched(Block):
            def forward(self, x, temb):
                return super().forward(x, temb) if self.plain else super().forward(x.relu(), temb)

        model = model_of(Switched, 10)
        for place, block in enumerate(model.blocks):
            block.plain = place % 2 == 0
        (entry,) = check(model)
        assert counts(entry)[1] <= 6

    def test_a_model_inside_of_a_function_and_of_another_model(self):
        model = model_of(Block, 8)
        wrapped = Wrapper(model)
        for function in (lambda x, temb: model(x, temb), model.forward, wrapped):
            torch._dynamo.reset()
            compiled = torch.compile(function, backend=Backend(EAGER))
            with torch.no_grad():
                assert torch.equal(compiled(*inputs()), model(*inputs()))
            (entry,) = reuse(compiled)
            assert counts(entry) == (10, 4)

    def test_of_nested_lists_the_inner_ones_are_taken_if_the_outer_differ(self):
        class Stage(Model):
            def __init__(self, last):
                super().__init__(*(Block() for _ in range(5)))
                self.last = last

            def forward(self, x, temb):
                return self.last(super().forward(x, temb))

        stages = nn.ModuleList([Stage(torch.tanh), Stage(torch.sin)]).requires_grad_(False)
        (entry,) = check(Stages(stages))
        total, compiled = counts(entry)
        assert total >= 12
        assert compiled <= 6

    def test_too_few_are_compiled_whole(self):
        (entry,) = check(model_of(Block, 3))
        assert entry.declined is not None
        assert "pieces are equal to another" in entry.declined
        assert not entry.changed


class Wrapper(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.parts = nn.ModuleList([inner])

    def forward(self, x, temb):
        return self.parts[0](x, temb)


class Stages(nn.Module):
    def __init__(self, stages):
        super().__init__()
        self.stages = stages

    def forward(self, x, temb):
        for stage in self.stages:
            x = stage(x, temb)
        return x


class Sharing(nn.Module):
    """Blocks that hand on two parts of one buffer, and tensors of their own."""

    def __init__(self, count=8):
        super().__init__()
        self.blocks = nn.ModuleList([Pair() for _ in range(count)])

    def forward(self, x, temb):
        text = x.sin()
        for block in self.blocks:
            text, x = block(text, x, temb)
        return text, x


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Block()

    def forward(self, text, x, temb):
        both = self.inner(torch.cat([text, x], dim=1), temb)
        return both[:, : text.shape[1]], both[:, text.shape[1] :]


class TestMemory:
    def test_views_of_one_buffer_are_not_tensors_of_their_own(self):
        (entry,) = check(Sharing().requires_grad_(False))
        total, compiled = counts(entry)
        assert total >= 8
        # The first block reads two tensors, the others two views of one.
        assert 3 <= compiled <= 5

    @pytest.mark.parametrize("kind", ["input", "iadd", "buffer", "view", "rope"])
    def test_writes(self, kind):
        class Writing(Block):
            def forward(self, x, temb):
                y = super().forward(x, temb)
                if kind == "input":
                    return x.add_(y)
                if kind == "iadd":
                    x += y
                    return x
                if kind == "buffer":
                    temb[:, 0] = y.mean()
                    return y
                if kind == "view":
                    x[:, 2:].mul_(2)
                    return x + y
                out = torch.empty_like(y)
                out[..., 0::2] = y[..., 1::2] * 2
                out[..., 1::2] = y[..., 0::2]
                return out

        (entry,) = check(model_of(Writing, 8))
        if kind in ("input", "iadd", "view", "rope"):
            assert counts(entry)[1] <= 4

    def test_two_inputs_of_which_one_is_written_are_compiled_whole(self):
        class Tied(nn.Module):
            def __init__(self):
                super().__init__()
                self.blocks = nn.ModuleList([Writes() for _ in range(8)])

            def forward(self, x, temb):
                x = x * 1
                part = x[:, 1:]
                for block in self.blocks:
                    x = block(x, part, temb)
                return x, part * 1

        class Writes(Block):
            def forward(self, x, part, temb):
                y = super().forward(part, temb)
                part.add_(y)
                return x

        (entry,) = check(Tied().requires_grad_(False))
        assert "share" in entry.declined

    def test_a_tuple_stays_with_what_makes_it(self):
        class Split(nn.Module):
            def __init__(self):
                super().__init__()
                self.blocks = nn.ModuleList([Block() for _ in range(8)])

            def forward(self, x, temb):
                for block in self.blocks:
                    left, right = block(x, temb).chunk(2, dim=-1)
                    x = torch.cat([right, left], dim=-1)
                return x

        (entry,) = check(Split().requires_grad_(False))
        assert counts(entry)[1] <= 6

    def test_a_value_is_let_go_after_the_last_piece_that_reads_it(self):
        alive = []

        class Watching(Block):
            def forward(self, x, temb):
                return super().forward(x, temb)

        model = model_of(Watching, 8)
        compiled = torch.compile(model, backend=Backend(EAGER))
        with torch.no_grad():
            compiled(*inputs())
            with _Allocations(alive):
                compiled(*inputs())
        # Nothing of an early block is left at the end: the most at once is what one block and its neighbour need.
        assert max(alive) <= 2 * max(alive[: len(alive) // 4])

    def test_random_numbers_come_in_the_model_s_order(self):
        class Noisy(Block):
            def forward(self, x, temb):
                return super().forward(x + torch.rand_like(x), temb) + torch.randn_like(x)

        model = model_of(Noisy, 8)
        compiled = torch.compile(model, backend=Backend(EAGER))
        with torch.no_grad():
            torch.manual_seed(3)
            expected = model(*inputs())
            compiled(*inputs())
            torch.manual_seed(3)
            assert torch.equal(compiled(*inputs()), expected)
        assert counts(reuse(compiled)[0])[1] <= 5


class _Allocations(torch.utils._python_dispatch.TorchDispatchMode):
    """Notes how many bytes of results are alive after each operator."""

    def __init__(self, alive):
        super().__init__()
        self.alive, self.refs = alive, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        import weakref

        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.refs.append(weakref.ref(result))
        self.alive.append(sum(ref() is not None for ref in self.refs))
        return result


class TestSizes:
    def test_three_sizes_on_one_compilation(self):
        calls = [inputs(2, tokens) for tokens in (5, 7, 63)]
        with compat.dynamo.floats_as_constants():
            (entry,) = check(model_of(Block, 8), *calls, dynamic=True)
        assert counts(entry)[1] <= 5

    def test_numbers_that_are_inputs(self):
        class Scaled(Block):
            def __init__(self):
                super().__init__()
                self.factor = 0.5

            def forward(self, x, temb):
                return super().forward(x * self.factor, temb)

        model = model_of(Scaled, 8)
        (entry,) = check(model, dynamic=True)
        assert counts(entry)[1] <= 6
        model.blocks[5].factor = 3.0
        assert len(check(model, dynamic=True)) >= 1

    def test_every_size_of_its_own(self):
        entries = check(model_of(Block, 8), *(inputs(batch) for batch in (1, 2, 3)))
        assert all(counts(entry)[1] <= 5 for entry in entries)

    def test_a_size_that_data_decides_is_compiled_whole(self):
        class Picking(nn.Module):
            def __init__(self):
                super().__init__()
                self.blocks = nn.ModuleList([Block() for _ in range(8)])

            def forward(self, x, temb):
                x = x.flatten(0, 1)[torch.nonzero(x.flatten(0, 1)[:, 0] > 0)[:, 0]][None].expand(2, -1, -1)
                for block in self.blocks:
                    x = block(x, temb)
                return x

        with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
            (entry,) = check(Picking().requires_grad_(False))
        assert "is not the value of any input" in entry.declined


class TestComposes:
    @pytest.mark.parametrize("freezing", [False, True])
    def test_sites_are_counted_as_without(self, freezing, monkeypatch):
        monkeypatch.setattr(cut, "WORTH_CUTTING", 10)
        model = Stack(8).requires_grad_(False)
        found = []
        for config in (EAGER, EAGER.with_(reuse_blocks=False)):
            torch._dynamo.reset()
            compiled = torch.compile(model, backend=Backend(config.with_(enable_freezing=freezing)))
            with torch.no_grad():
                assert torch.equal(compiled(*block_inputs()), compiled(*block_inputs()))
            found.append(tritium.explain(compiled).sites)
        assert found[0] == found[1]
        assert found[0]["rms_norm"].recognised == 8

    def test_gradients_are_left_alone(self):
        model = model_of(Block, 8).requires_grad_(True)
        compiled = torch.compile(model, backend=Backend(EAGER))
        compiled(*inputs()).sum().backward()
        assert model.blocks[3].up.weight.grad is not None

    def test_autocast_inside_of_a_block_and_around_blocks(self):
        # Fused norms round another way than autocast does.
        plain = EAGER.with_(fusion_patterns=FusionPatterns(enable_adalayernorm=False, enable_mul_add=False))

        class Cast(Block):
            def forward(self, x, temb):
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    return super().forward(x, temb).float()

        (entry,) = check(model_of(Cast, 8), config=plain)
        assert counts(entry)[1] <= 5

        class Around(Model):
            def forward(self, x, temb):
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    return super().forward(x, temb)

        (entry,) = check(Around(*(Block() for _ in range(8))).requires_grad_(False), config=plain)
        assert "autocast region" in entry.declined


class Stub:
    """Stands for code generation: runs graphs as they are, and counts them."""

    def __init__(self, monkeypatch, fails=lambda count: False):
        self.compiled, self.fails = [], fails
        monkeypatch.setattr(compat.inductor, "compile_fx", self)

    def __call__(self, gm, example_inputs):
        self.compiled.append(gm)
        if self.fails(len(self.compiled)):
            raise ValueError("this piece cannot be lowered")
        return lambda *args: gm.forward(*args)


@pytest.fixture
def stub(monkeypatch):
    return Stub(monkeypatch)


INDUCTOR = CompilationConfig(reuse_blocks=True)


class TestCompilations:
    def test_of_a_stock_flux_do_not_grow_with_its_blocks(self, stub):
        numbers = []
        for blocks in ((3, 6), (19, 38)):
            stub.compiled.clear()
            torch._dynamo.reset()
            model = flux(*blocks).requires_grad_(False)
            compiled = torch.compile(model, backend=Backend(INDUCTOR), fullgraph=True)
            with torch.no_grad():
                (result,), (expected,) = compiled(**flux_inputs()), model(**flux_inputs())
            torch.testing.assert_close(result, expected)
            total, distinct = counts(reuse(compiled)[0])
            assert total == sum(blocks) + 2
            assert distinct == len(stub.compiled)
            sites = tritium.explain(compiled).sites
            assert sites["rope"].recognised == 2 * sum(blocks)
            numbers.append((len(stub.compiled), sum(len(gm.graph.nodes) for gm in stub.compiled)))
        assert numbers[0] == numbers[1]
        assert numbers[0][0] <= 7

    def test_of_pieces_that_another_graph_has_too_are_kept(self, stub):
        class Flagged(Model):
            def forward(self, x, temb, negate=False):
                x = super().forward(x, temb)
                return -x if negate else x

        model = Flagged(*(Block() for _ in range(8))).requires_grad_(False)
        compiled = torch.compile(model, backend=Backend(INDUCTOR), dynamic=False)
        with torch.no_grad():
            for tokens, negate in ((5, False), (5, True), (7, True)):
                call = (*inputs(2, tokens), negate)
                assert torch.allclose(compiled(*call), model(*call))
            # What is behind the blocks differs, then every size does.
            assert len(stub.compiled) == 4 + 1 + 4
            summaries = [entry.summary for entry in reuse(compiled)]
            assert summaries[1] == "10 pieces, 4 compiled, 3 of them found compiled"
            torch.compile(model, backend=Backend(INDUCTOR.with_(enable_freezing=True)))(*inputs())
        assert len(stub.compiled) == 9 + 4
        torch._dynamo.reset()
        assert not _kept

    def test_of_symbolic_sizes_are_not_kept(self, stub):
        model = model_of(Block, 8)
        compiled = torch.compile(model, backend=Backend(INDUCTOR), dynamic=True)
        with torch.no_grad():
            for batch in (2, 3, 5, 1):
                assert torch.allclose(compiled(*inputs(batch)), model(*inputs(batch)))
        # A batch of one is specialised.
        assert len(stub.compiled) == 8

    def test_a_piece_that_cannot_be_lowered_costs_the_cut_alone(self, monkeypatch):
        stub = Stub(monkeypatch, fails=lambda count: count == 3)
        model = model_of(Block, 8)
        compiled = torch.compile(model, backend=Backend(INDUCTOR))
        with torch.no_grad(), pytest.warns(RuntimeWarning, match="lowering of a block failed"):
            assert torch.allclose(compiled(*inputs()), model(*inputs()))
        (entry,) = reuse(compiled)
        assert "cannot be lowered" in entry.failed
        assert not entry.changed
        # Three pieces, then the graph as a whole.
        assert len(stub.compiled) == 4
        assert len(stub.compiled[-1].graph.nodes) > 400
        (record,) = tritium.explain(compiled).records
        assert [failure.part for failure in record.failures] == ["lowering of a block", "reuse_blocks"]
        assert record.engine == "inductor"

    def test_a_trace_that_starts_anew_leaves_nothing_behind(self, monkeypatch):
        again = []

        def restart(count):
            if not again:
                again.append(count)
                raise torch._dynamo.exc.TensorifyScalarRestartAnalysis
            return False

        stub = Stub(monkeypatch, fails=restart)
        model = model_of(Block, 8)
        compiled = torch.compile(model, backend=Backend(INDUCTOR))
        with torch.no_grad():
            assert torch.allclose(compiled(*inputs()), model(*inputs()))
        assert len(stub.compiled) == 5
        assert len(tritium.explain(compiled).records) == 1

    def test_numbers_that_stay_inputs_are_not_shared(self, stub):
        class Scaled(Block):
            def __init__(self):
                super().__init__()
                self.factor = 0.5

            def forward(self, x, temb):
                return super().forward(x * self.factor, temb)

        model = model_of(Scaled, 8)
        compiled = torch.compile(model, backend=Backend(INDUCTOR), dynamic=True)
        with torch.no_grad():
            assert torch.allclose(compiled(*inputs()), model(*inputs()))
        assert "numbers as inputs" in reuse(compiled)[0].declined
        # Before, the first block, and then the whole graph.
        assert len(stub.compiled) <= 4

    def test_a_graph_break_makes_graphs_that_are_cut_each(self, stub):
        class Breaking(Model):
            def forward(self, x, temb):
                x = super().forward(x, temb)
                torch._dynamo.graph_break()
                return super().forward(x, temb)

        model = Breaking(*(Block() for _ in range(8))).requires_grad_(False)
        compiled = torch.compile(model, backend=Backend(INDUCTOR))
        with torch.no_grad():
            assert torch.allclose(compiled(*inputs()), model(*inputs()))
        assert len(reuse(compiled)) == 2
        assert len(stub.compiled) == 4

    def test_inductor_s_own_graphs_are_not_cut(self, stub):
        compiled = torch.compile(model_of(Block, 8), backend=Backend(INDUCTOR), mode="reduce-overhead")
        with torch.no_grad():
            compiled(*inputs())
        assert "addresses of weights" in reuse(compiled)[0].declined
        assert len(stub.compiled) == 1


@tritium.plugins.custom_op("tests::block_sort", outputs=["x"], boundary=True)
def block_sort(x: torch.Tensor) -> torch.Tensor:
    return x.sort(dim=-1).values


class TestCapture:
    def test_the_whole_call_is_one_region(self):
        model = model_of(Block, 8)
        compiled = torch.compile(model, backend=Backend(EAGER.with_(graphs="with_compile")), dynamic=False)
        with torch.no_grad():
            held = []
            for batch in (2, 3, 2, 3):
                call = inputs(batch)
                kept = [part.clone() for part in call]
                held.append((compiled(*call), model(*kept)))
                assert all(map(torch.equal, call, kept))
            assert all(torch.equal(mine, theirs) for mine, theirs in held)
            assert sorted(row["hits"] for row in tritium.explain(compiled).captures) == [2, 2]
            model.blocks[5].up.weight.mul_(2)
            assert torch.equal(compiled(*inputs(2)), model(*inputs(2)))
            model.blocks[5].up.weight = nn.Parameter(model.blocks[5].up.weight * 0.5, requires_grad=False)
            assert torch.equal(compiled(*inputs(2)), model(*inputs(2)))
        records = tritium.explain(compiled).records
        assert all(counts(entry)[1] == 4 for entry in reuse(compiled))
        rows = [row for record in records for row in record.captures]
        assert all(row.declined is None and row.piece is None for row in rows)

    @pytest.mark.parametrize("graphs", ["off", "with_compile"])
    def test_boundaries_inside_of_blocks(self, graphs, stub):
        class Sorting(Block):
            def forward(self, x, temb):
                return super().forward(block_sort(super().forward(x, temb)), temb)

        model = model_of(Sorting, 8)
        compiled = torch.compile(model, backend=Backend(INDUCTOR.with_(graphs=graphs)))
        with torch.no_grad():
            for _ in range(3):
                assert torch.allclose(compiled(*inputs()), model(*inputs()), atol=1e-5)
        (entry,) = reuse(compiled)
        total, distinct = counts(entry)
        assert total >= 9
        assert distinct == len(stub.compiled) <= 5
        if graphs == "with_compile":
            rows = tritium.explain(compiled).captures
            assert len(rows) == 9
            assert all(row["declined"] is None and row["hits"] == 3 for row in rows)

    def test_freezing(self):
        class Doubled(Block):
            def forward(self, x, temb):
                return super().forward(x, temb) @ torch.cat([self.down.weight, self.down.weight], dim=1)[:, :16].exp()

        model = model_of(Doubled, 8)
        compiled = torch.compile(model, backend=Backend(EAGER.with_(graphs="with_compile", enable_freezing=True)))
        with torch.no_grad():
            for _ in range(2):
                assert torch.allclose(compiled(*inputs()), model(*inputs()))
                model.blocks[3].down.weight.add_(0.1)
        # The blocks, and the layers before and behind them.
        assert counts(reuse(compiled)[0])[1] == 2
        assert len(tritium.explain(compiled).frozen) == 8


QUICK = {"flux", "wan"}
MODELS = [
    name if name in QUICK else pytest.param(name, marks=pytest.mark.thorough) for name in ZOO if "decoder" not in name
]


@pytest.mark.parametrize("name", MODELS)
def test_stock_models_give_eager_s_numbers_however_they_are_cut(name, monkeypatch):
    """Their two blocks are too few to pay; here they are cut all the same."""
    monkeypatch.setattr(cut, "LEAST_EQUAL", 0)
    monkeypatch.setattr(cut, "WORTH_CUTTING", 100)
    model, call = ZOO[name].build(), ZOO[name].inputs()
    model.requires_grad_(False)
    with torch.no_grad():
        compiled = torch.compile(model, backend=Backend(EAGER))
        assert_as_close(compiled(**call), model(**call))
    entries = reuse(compiled)
    assert any(entry.summary for entry in entries), [entry.declined for entry in entries]
    assert not any(entry.failed for entry in entries)


def assert_as_close(mine, theirs):
    mine, theirs = (part if isinstance(part, (tuple, list)) else [part] for part in (mine, theirs))
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


PROGRAM = """
import json, torch, tritium
from support.blocks import Block, Model, inputs
from torch._dynamo.utils import counters

torch.manual_seed(0)
model = Model(*(Block() for _ in range(8))).requires_grad_(False)
compiled = torch.compile(model, backend=tritium.Backend(tritium.CompilationConfig(reuse_blocks=True)))
with torch.no_grad():
    torch.testing.assert_close(compiled(*inputs()), model(*inputs()))
(record,) = tritium.explain(compiled).records
(entry,) = (entry for entry in record.passes if entry.name == "reuse_blocks")
print(json.dumps({
    "hits": counters["inductor"]["fxgraph_cache_hit"], "misses": counters["inductor"]["fxgraph_cache_miss"],
    "summary": entry.summary, "failures": len(record.failures), "order": record.order,
    "kernels": [kernel.to_dict() for kernel in record.kernels], "from": record.kernels_from,
}))
"""


@pytest.mark.codegen
def test_generated_code():
    model = model_of(Block, 8)
    compiled = torch.compile(model, backend=Backend(INDUCTOR))
    with torch.no_grad():
        torch.testing.assert_close(compiled(*inputs()), model(*inputs()))
    (record,) = tritium.explain(compiled).records
    assert counts(reuse(compiled)[0]) == (10, 4)
    assert not record.failures
    assert {(kernel.piece, kernel.count) for kernel in record.kernels} == {(0, 1), (1, 1), (2, 7), (3, 1)}


@pytest.mark.thorough
@pytest.mark.codegen
def test_kernels_are_in_the_report_once_and_found_by_the_next_process(in_process, tmp_path):
    cold, warm = (json.loads(in_process(PROGRAM, cache=tmp_path / "cache", loaded=True)) for _ in range(2))
    assert (cold["hits"], cold["misses"], cold["from"]) == (0, 4, "codegen")
    assert (warm["hits"], warm["misses"], warm["from"]) == (4, 0, "store")
    assert cold["summary"] == warm["summary"] == "10 pieces, 4 compiled"
    assert cold["failures"] == warm["failures"] == 0
    assert cold["kernels"] == warm["kernels"]
    assert cold["order"] == [0, 1, *[2] * 7, 3]
    kernels = cold["kernels"]
    assert {(kernel["piece"], kernel["count"]) for kernel in kernels} == {(0, 1), (1, 1), (2, 7), (3, 1)}
    assert sum(kernel["count"] for kernel in kernels if kernel["kind"] == "library") == 2 + 8 * 3
    # A region is one piece's: those of others have other numbers.
    regions = {(kernel["piece"], kernel["region"]) for kernel in kernels if kernel["region"] is not None}
    assert len({region for _, region in regions}) == len(regions)


def test_a_tensor_subclass_is_compiled_whole():
    reasons = []

    def look(gm, example_inputs):
        reasons.append(cut.decline_graph(gm.graph))
        return gm.forward

    double = TwoTensor(torch.ones(2), torch.ones(2))
    with torch.no_grad():
        torch.compile(torch.sin, backend=look)(double)
        torch.compile(torch.cos, backend=look)(torch.ones(2))
    assert "TwoTensor" in reasons[0]
    assert reasons[1] is None


def test_dead_operations_are_left_out():
    def look(gm, example_inputs):
        facts.append(Facts(gm))
        return gm.forward

    facts = []
    with torch.no_grad(), contextlib.suppress(RuntimeError):
        torch.compile(lambda x: (x.sin(), x.cos() * 0)[0], backend=look)(torch.ones(2))
    assert all(node.users for node in facts[0].calls)
