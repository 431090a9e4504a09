"""Attention: where it is recognised, that it stays as it is without a verdict, what is declined and why."""

import pytest
import torch
import torch.nn.functional as F
from diffusers.models.attention import BasicTransformerBlock

import tritium
from support.attention import exact_of
from support.fidelity import assert_no_worse
from support.recognition import EAGER, check_declined, recognise
from tritium import fusions, tuning
from tritium.compiler.passes.fuse import fuse
from tritium.ops import attention
from tritium.passes import PassContext
from tritium.tuning import Machine, Verdict, first_use

HERE = Machine("machine", "9.0", 132)


def heads(tokens: int = 9, count: int = 4, width: int = 16, seed: int = 0) -> torch.Tensor:
    made = torch.randn(2, tokens, count * width, generator=torch.Generator().manual_seed(seed))
    return made.view(2, tokens, count, width).transpose(1, 2)


def sides(**sizes) -> list[torch.Tensor]:
    return [heads(**sizes, seed=seed) for seed in range(3)]


def fused(function, *inputs, device_type="cpu", **settings):
    """The result, the one site of attention, and the functions in the graph after the pass."""
    found = PassContext(tritium.CompilationConfig(**settings), device_type)
    targets = []

    def backend(gm, example_inputs):
        found.example_inputs = example_inputs
        fuse(gm.graph, found, fusions.catalog().values())
        targets.extend(node.target for node in gm.graph.nodes)
        gm.recompile()
        return gm.forward

    torch._dynamo.reset()
    with torch.inference_mode():
        result = torch.compile(function, backend=backend, fullgraph=True)(*inputs)
    (site,) = [site for site in found.sites if site.fusion == "attention"]
    return result, site, targets


@pytest.fixture(autouse=True)
def _measures_nothing(monkeypatch, tmp_path):
    def refuse(*arguments):
        raise AssertionError("a compilation measures nothing")

    monkeypatch.setattr(first_use, "compare_alone", refuse)
    monkeypatch.setattr(tuning.tables, "user_folder", lambda: tmp_path)
    tuning.forget()
    yield
    tuning.forget()


def plain(q, k, v):
    return F.scaled_dot_product_attention(q, k, v)


class TestLeftAsItIs:
    @pytest.mark.parametrize("engine", ["eager", "inductor"])
    def test_a_block_has_one_site(self, engine):
        torch.manual_seed(0)
        block, x = BasicTransformerBlock(32, 2, 16).eval(), torch.randn(2, 9, 32)
        result, sites = recognise(block, x, config=EAGER.with_(engine=engine))
        assert (sites["attention"].inductor, sites["attention"].fused, sites["attention"].declined) == (1, 0, 0)
        with torch.inference_mode():
            torch.testing.assert_close(result, block(x))
            _, site, targets = fused(block, x, engine=engine)
        assert site.provider == ""
        assert F.scaled_dot_product_attention in targets
        assert attention.OP.overload not in targets

    def test_without_a_verdict_on_a_gpu(self, monkeypatch):
        monkeypatch.setattr(tuning.tables, "_machine", lambda where: HERE)
        _, site, targets = fused(plain, *sides(), device_type="cuda")
        assert (site.outcome, site.provider) == ("inductor", "")
        assert site.reason.startswith("left to Inductor: attention was not measured for batch=2 heads=4")
        assert F.scaled_dot_product_attention in targets


MASK = torch.rand(2, 1, 1, 9, generator=torch.Generator().manual_seed(3)) > 0.3
CALLS = {
    "plain": (plain, {}),
    "a scale": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, scale=0.3), {"scale": 0.3}),
    "an integer scale": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, scale=1), {"scale": 1.0}),
    "causal": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), {"causal": True}),
    "a mask": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, MASK), {"mask": MASK}),
    "grouped heads": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k[:, :2], v[:, :2], enable_gqa=True),
        {},
    ),
}


class TestPinned:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("provider", ["chunked", "math"])
    @pytest.mark.parametrize("call", CALLS)
    def test_it_computes_every_form(self, call, provider, dtype):
        function, options = CALLS[call]
        q, k, v = (side.to(dtype) for side in sides())
        pinned = {"force_provider": {"attention": provider}}
        result, site, targets = fused(function, q, k, v, **pinned)
        assert (site.provider, site.reason) == (provider, f"pinned by force_provider={provider!r}")
        assert attention.OP.overload in targets
        assert F.scaled_dot_product_attention not in targets
        count = 2 if call == "grouped heads" else 4
        exact = exact_of(q, k[:, :count], v[:, :count], **options, head_first=True)
        assert_no_worse(result, function(q, k, v), exact)
        assert result.stride() == function(q, k, v).stride()
        result, sites = recognise(function, q, k, v, config=EAGER.with_(**pinned))
        assert (sites["attention"].recognised, sites["attention"].declined) == (1, 0)
        assert_no_worse(result, function(q, k, v), exact)

    def test_generated_code_runs_it(self):
        given = sides()
        config = tritium.CompilationConfig(force_provider={"attention": "chunked"})
        result, sites = recognise(plain, *given, config=config)
        assert sites["attention"].recognised == 1
        assert_no_worse(result, plain(*given), plain(*(side.double() for side in given)))

    @pytest.mark.parametrize(("provider", "reason"), [("math", "pinned by"), ("chunked", "whose number is symbolic")])
    def test_any_number_of_tokens_is_one_graph(self, provider, reason):
        compiled = torch.compile(plain, backend=tritium.Backend(EAGER.with_(force_provider=provider)), fullgraph=True)
        with torch.inference_mode():
            for tokens in (9, 14, 3):
                given = sides(tokens=tokens)
                for side in given:
                    torch._dynamo.mark_dynamic(side, 2)
                torch.testing.assert_close(compiled(*given), plain(*given))
        report = tritium.explain(compiled)
        assert len(report.records) == report.sites["attention"].recognised == 1
        assert reason in next(iter(report.sites["attention"].reasons))

    def test_one_that_cannot_compute_it_is_an_error(self):
        with pytest.raises(Exception, match="provider 'cudnn' of op 'attention' cannot be used: it runs on a GPU"):
            recognise(plain, *sides(), config=EAGER.with_(force_provider={"attention": "cudnn"}))


class TestVerdict:
    @pytest.fixture(autouse=True)
    def _gpu(self, monkeypatch):
        monkeypatch.setattr(tuning.tables, "_machine", lambda where: HERE)

    def row(self, q, k, v, suffix="", versions=None, **ms):
        op = attention.OP
        key = tuning.key_of(op, op.bind(q, k, v, None, q.shape[3] ** -0.5, False))
        key = tuning.Key(key.op, key.shape + suffix, key.dtype)
        return Verdict(key, min(ms, key=ms.get), ms, versions=versions or dict(op.trial.first_use.versions()))

    @pytest.mark.parametrize("suffix", ["", f" {first_use.COMPILING}"])
    def test_the_user_s_winner_is_used(self, tmp_path, suffix):
        q, k, v = sides()
        tuning.store(tmp_path / HERE.file_name, HERE, [self.row(q, k, v, suffix, sdpa=2.0, chunked=1.0, math=3.0)])
        result, site, targets = fused(plain, q, k, v, device_type="cuda")
        assert site.provider == "chunked"
        assert site.reason == "measured on this machine: sdpa 2 ms, chunked 1 ms, math 3 ms"
        assert attention.OP.overload in targets
        torch.testing.assert_close(result, plain(q, k, v))
        # Other sizes have no verdict; a CPU and the engine `eager` read none.
        assert fused(plain, *sides(tokens=40), device_type="cuda")[1].provider == ""
        assert fused(plain, q, k, v)[1].provider == ""
        assert fused(plain, q, k, v, device_type="cuda", engine="eager")[1].provider == ""
        pinned = fused(plain, q, k, v, device_type="cuda", force_provider={"attention": "math"})
        assert pinned[1].provider == "math"

    def test_the_shipped_winner_is_used(self, monkeypatch):
        given = sides()
        row = self.row(*given, sdpa=2.0, math=1.0)
        monkeypatch.setattr(tuning.tables, "shipped", lambda machine: tuning.Table({row.key: row}))
        assert fused(plain, *given, device_type="cuda")[1].reason == "shipped: sdpa 2 ms, math 1 ms"

    def test_what_the_model_calls_stays(self, tmp_path):
        given = sides()
        tuning.store(tmp_path / HERE.file_name, HERE, [self.row(*given, sdpa=1.0, math=3.0)])
        _, site, targets = fused(plain, *given, device_type="cuda")
        assert (site.outcome, site.provider) == ("inductor", "")
        assert "sdpa is what the model calls; measured on this machine: sdpa 1 ms" in site.reason
        assert F.scaled_dot_product_attention in targets

    def test_a_verdict_of_other_versions_is_none(self, tmp_path):
        given = sides()
        tuning.store(tmp_path / HERE.file_name, HERE, [self.row(*given, versions={"torch": "1"}, sdpa=2.0, math=1.0)])
        assert fused(plain, *given, device_type="cuda")[1].provider == ""


BROADCAST = "the shapes of query, key and value are broadcast"
DECLINED = {
    "dropout of nothing": (
        lambda q: F.scaled_dot_product_attention(q, q, q, dropout_p=1e-9),
        "the attention drops weights at random",
    ),
    "a mask of two dims": (
        lambda q: F.scaled_dot_product_attention(q, q, q, q[0, 0, :, :9] > 0),
        "the mask has not the four dims of the scores",
    ),
    "one sample of keys": (lambda q: F.scaled_dot_product_attention(q, q[:1], q[:1]), BROADCAST),
    "one head of keys": (lambda q: F.scaled_dot_product_attention(q, q[:, :1], q[:, :1]), BROADCAST),
}


@pytest.mark.parametrize("name", DECLINED)
def test_is_left_alone_with_a_reason(name):
    function, reason = DECLINED[name]
    check_declined("attention", reason, function, heads())


def test_another_layout_than_the_op_s_is_left_alone():
    """On a CPU the result lies in memory as the query does."""
    q = heads().contiguous()
    _, sites = recognise(lambda q: plain(q, q, q), q, config=EAGER.with_(force_provider={"attention": "math"}))
    assert sites["attention"].declined == 1


@pytest.mark.parametrize(("q", "wide"), [(heads()[0], 0), (heads(count=1, width=320), 1)], ids=["3-D", "wide heads"])
def test_what_is_no_site(q, wide):
    result, sites = recognise(lambda q: plain(q, q, q), q)
    assert "attention" not in sites
    assert sum(counts.recognised for family, counts in sites.items() if family == "wide_attention") == wide
    torch.testing.assert_close(result, plain(q, q, q))
