"""Pieces are compiled once, kept for later graphs of the model, and go with freezing, captures and reports."""

import json

import pytest
import torch
from torch import nn

import tritium
from support.blocks import EAGER, Block, Model, Scaled, check, counts, inputs, model_of, reuse
from support.small_models import Stack, block_inputs, flux, flux_inputs
from support.zoo import ZOO
from tritium import Backend, CompilationConfig, FusionPatterns, compat
from tritium.compiler.blocks import cut
from tritium.compiler.blocks.reuse import _kept


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
        for blocks in ((3, 6), (4, 8)):
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

    def test_numbers_that_stay_inputs_are_not_shared(self, stub):
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
def test_kernels_are_reported_once_and_by_the_next_process(in_process, tmp_path):
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
