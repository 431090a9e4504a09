"""`attention_forward`: what it computes, which provider is chosen, and errors."""

import json
import math

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import FakeTensorMode

import tritium
from support.fidelity import assert_no_worse
from tritium import catalog, ops, tuning
from tritium.compat import attention as compat_attention
from tritium.errors import ArgumentError, ArgumentTypeError, CatalogError, ConfigError
from tritium.layers.attention import choose
from tritium.ops import Provider
from tritium.ops.attention import OP, rule, trial
from tritium.ops.attention.reference import chunked

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def qkv(queries=63, keys=100, heads=4, kv_heads=None, width=32, batch=2, dtype=torch.float32, head_first=False):
    generator = torch.Generator().manual_seed(queries * keys)

    def random(tokens, heads):
        shape = (batch, heads, tokens, width) if head_first else (batch, tokens, heads, width)
        return torch.randn(shape, generator=generator).to(dtype)

    return random(queries, heads), random(keys, kv_heads or heads), random(keys, kv_heads or heads)


def exact_of(q, k, v, mask=None, *, scale=None, causal=False, head_first=False):
    """Attention in float64 by other means than the package's: PyTorch's own, with every mask made explicit."""
    if not head_first:
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    keep = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool)
    bias = torch.zeros(q.shape[2], k.shape[2], dtype=torch.float64)
    if causal:
        keep = keep.tril()
    if mask is not None and mask.dtype == torch.bool:
        keep = keep & mask
    elif mask is not None:
        bias = bias + mask.double()
    bias = bias.masked_fill(~keep, -math.inf)
    group = q.shape[1] // k.shape[1]
    k, v = (t.double().repeat_interleave(group, 1) for t in (k, v))
    out = F.scaled_dot_product_attention(q.double(), k, v, bias, scale=scale)
    return out if head_first else out.transpose(1, 2)


def masks():
    generator = torch.Generator().manual_seed(5)

    def kept(*shape):
        mask = torch.rand(shape, generator=generator) < 0.6
        mask[..., 0] = True
        return mask

    shapes = {"2-D": (63, 100), "3-D": (4, 63, 100), "4-D": (2, 4, 63, 100), "a row": (2, 1, 1, 100), "one": (1, 100)}
    for name, shape in shapes.items():
        keep = kept(*shape)
        yield pytest.param(keep, id=f"keep {name}")
        yield pytest.param(torch.zeros(shape).masked_fill(~keep, -math.inf), id=f"add {name}")
    yield pytest.param(torch.randn(2, 4, 63, 100, generator=generator), id="any numbers")
    yield pytest.param(torch.zeros(63, 100), id="add nothing")


class TestMeaning:
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("head_first", [False, True])
    @pytest.mark.parametrize("options", [{}, {"opt_mode": "static"}, {"fused": False}], ids=str)
    def test_every_mode_agrees_with_float64(self, dtype, head_first, options):
        q, k, v = qkv(dtype=dtype, head_first=head_first)
        out = tritium.attention_forward(q, k, v, head_first=head_first, **options)
        exact = exact_of(q, k, v, head_first=head_first)
        assert_no_worse(out, exact.to(dtype), exact)

    @pytest.mark.parametrize("layout", [None, "BNSD", "BSND", "BSH"])
    @pytest.mark.parametrize("head_first", [False, True])
    @pytest.mark.parametrize("op_type", ["sdpa", "math", "chunked"])
    def test_every_candidate_in_every_layout(self, op_type, layout, head_first):
        q, k, v = qkv(head_first=head_first)
        out = tritium.attention_forward(
            q, k, v, head_first=head_first, opt_mode="manual", op_type=op_type, layout=layout
        )
        exact = exact_of(q, k, v, head_first=head_first)
        assert_no_worse(out, exact.float(), exact)

    @pytest.mark.parametrize("causal", [False, True])
    @pytest.mark.parametrize("mask", masks())
    def test_no_mask_is_dropped_or_inverted(self, mask, causal):
        q, k, v = qkv()
        exact = exact_of(q, k, v, mask, causal=causal)
        for options in ({}, {"fused": False}, {"opt_mode": "manual", "op_type": "chunked"}):
            out = tritium.attention_forward(q, k, v, mask, is_causal=causal, **options)
            assert_no_worse(out, exact.float(), exact)

    @pytest.mark.parametrize(("queries", "keys"), [(7, 7), (63, 100), (100, 63), (1, 7)])
    def test_causality_is_aligned_to_the_first_key(self, queries, keys):
        q, k, v = qkv(queries, keys)
        exact = exact_of(q, k, v, causal=True)
        for options in ({}, {"fused": False}, {"opt_mode": "manual", "op_type": "chunked"}):
            assert_no_worse(tritium.attention_forward(q, k, v, is_causal=True, **options), exact.float(), exact)

    def test_masked_then_not_masked_with_the_same_shapes(self):
        q, k, v = qkv()
        plain, masked = exact_of(q, k, v), exact_of(q, k, v, torch.ones(63, 100, dtype=torch.bool).tril())
        for mask, exact in ((None, plain), (torch.ones(63, 100, dtype=torch.bool).tril(), masked), (None, plain)):
            assert_no_worse(tritium.attention_forward(q, k, v, mask), exact.float(), exact)

    def test_a_scale_of_its_own(self):
        q, k, v = qkv()
        for scale in (0.5, 1, 0.0):
            exact = exact_of(q, k, v, scale=float(scale))
            for fused in (True, False):
                assert_no_worse(tritium.attention_forward(q, k, v, None, scale, fused), exact.float(), exact)

    def test_grouped_heads(self):
        q, k, v = qkv(heads=6, kv_heads=2)
        exact = exact_of(q, k, v)
        for options in ({}, {"fused": False}, {"opt_mode": "manual", "op_type": "chunked"}):
            assert_no_worse(tritium.attention_forward(q, k, v, enable_gqa=True, **options), exact.float(), exact)

    def test_a_row_without_a_key_gives_zeros(self):
        q, k, v = qkv()
        mask = torch.ones(63, 100, dtype=torch.bool)
        mask[5] = False
        for options in ({"fused": False}, {"opt_mode": "manual", "op_type": "chunked"}):
            out = tritium.attention_forward(q, k, v, mask, **options)
            assert torch.equal(out[:, 5], torch.zeros_like(out[:, 5]))
            assert out.isfinite().all()

    def test_chunks_are_cut_as_small_as_they_must_be(self, monkeypatch):
        q, k, v = qkv()
        whole = tritium.attention_forward(q, k, v, is_causal=True, opt_mode="manual", op_type="chunked")
        monkeypatch.setitem(chunked.__globals__, "CHUNK_BYTES", 4 * 2 * 4 * 100 * 10)
        cut = tritium.attention_forward(q, k, v, is_causal=True, opt_mode="manual", op_type="chunked")
        torch.testing.assert_close(cut, whole)

    def test_values_of_another_width_and_no_tokens(self):
        q, k, _ = qkv()
        v = torch.randn(2, 100, 4, 48)
        exact = exact_of(q, k, v)
        assert_no_worse(tritium.attention_forward(q, k, v), exact.float(), exact)
        assert tritium.attention_forward(q[:, :0], k, v).shape == (2, 0, 4, 48)

    def test_gradients_are_kept(self):
        q, k, v = (t.requires_grad_() for t in qkv(7, 7))
        tritium.attention_forward(q, k, v).sum().backward()
        assert q.grad.abs().sum() > 0


def verdict(shape="", provider="sdpa", **ms):
    return tuning.Verdict(tuning.Key("attention", shape, "float32"), provider, ms or {provider: 1.0})


def arguments(queries=63, keys=100, *, device="cpu", dtype=torch.float32, width=32, heads=4, mask=None, causal=False):
    """An attention of fake tensors, with tokens before heads in memory."""
    with FakeTensorMode():
        q, k, v = (
            torch.empty(2, tokens, count, width, device=device, dtype=dtype).transpose(1, 2)
            for tokens, count in ((queries, 4), (keys, heads), (keys, heads))
        )
        mask = None if mask is None else torch.empty(mask, device=device, dtype=torch.bool)
    return OP.bind(q, k, v, mask, width**-0.5, causal)


def on_a_gpu(queries=64, keys=64, **changes):
    return arguments(queries, keys, **{"device": "cuda", "dtype": torch.bfloat16, "width": 128, **changes})


def able(given):
    return {name for name, provider in ops.providers(OP).items() if provider.decline(given) is None}


class TestChoice:
    def test_a_class_of_calls_is_measured_once(self, monkeypatch, tmp_path):
        calls = []
        monkeypatch.setattr(tuning.first_use, "compare_alone", counted(tuning.first_use.compare_alone, calls))
        q, k, v = qkv()
        for _ in range(3):
            tritium.attention_forward(q, k, v)
        assert len(calls) == 1
        # What another process starts with: the file, and nothing in memory.
        tuning.forget()
        tritium.attention_forward(q, k, v)
        assert len(calls) == 1
        (path,) = tmp_path.iterdir()
        (row,) = json.loads(path.read_text())["rows"]
        assert row["provider"] in row["ms"]
        assert set(row["ms"]) == {"sdpa", "math", "chunked"}
        assert row["remarks"]["flash"] == "it runs on a GPU, the tensors are on cpu"
        assert row["versions"] == compat_attention.versions()
        # Another mask, causality, dtype, memory format or class of sizes is another key.
        tritium.attention_forward(q, k, v, is_causal=True)
        tritium.attention_forward(q, k, v, torch.ones(63, 100, dtype=torch.bool))
        tritium.attention_forward(q, k, v, torch.zeros(2, 1, 1, 100))
        tritium.attention_forward(*(t.half() for t in (q, k, v)))
        tritium.attention_forward(*(t.transpose(1, 2).contiguous() for t in (q, k, v)), head_first=True)
        tritium.attention_forward(q[:, :20], k, v)
        assert len(calls) == len(set(calls)) == 7

    def test_a_call_is_described_once(self, monkeypatch):
        calls = []
        monkeypatch.setattr(choose, "choose", counted(choose.choose, calls))
        q, k, v = qkv()
        for _ in range(3):
            out = tritium.attention_forward(q, k, v, scale=0.3)
        torch.testing.assert_close(out, tritium.attention_forward(q, k, v, scale=0.3, fused=False))
        assert len(calls) == 1
        tritium.attention_forward(q, k, v, scale=0.3, is_causal=True)
        assert len(calls) == 2

    def test_providers_that_hold_all_scores_are_not_measured_for_a_video(self):
        video = arguments(32_760, 32_760)
        assert trial.skip("math", video, False) == "not measured: its scores would take 32.0 GiB"
        for name in ("sdpa", "chunked"):
            assert trial.skip(name, video, False) is None
        for name in ("chunked", "products"):
            assert "scores" in trial.skip(name, on_a_gpu(32_760, 32_760), False)

    def test_flex_is_not_measured_while_something_is_compiled(self):
        # Two compilers in two threads, one of which waits for the other, would wait for ever.
        assert "something else is being compiled" in trial.skip("flex", on_a_gpu(), True)
        assert trial.skip("flex", on_a_gpu(), False) is None
        assert trial.skip("flex", arguments(), False) == "not measured on cpu"

    def test_a_graph_stores_its_verdict_apart_and_prefers_eager_ones(self):
        q, k, v = qkv()
        compiled = torch.compile(tritium.attention_forward, backend="aot_eager", dynamic=True, fullgraph=True)
        with torch.inference_mode():
            compiled(q, k, v)
            (traced,) = tuning.verdicts()
            assert "symbolic" in traced.remarks["chunked"]
            tritium.attention_forward(q, k, v)
            (_, eager) = tuning.verdicts()
            assert "chunked" in eager.ms
            assert eager.key != traced.key
            torch.compiler.reset()
            compiled(q, k, v)
        assert len(tuning.verdicts()) == 2

    def test_static_takes_the_shipped_table_and_then_a_rule(self, monkeypatch):
        key = tuning.Key.of("attention", OP.trial.shape(arguments()), torch.float32)
        table = tuning.Table({key: verdict(key.shape, "math")})
        monkeypatch.setattr(tuning.tables, "shipped", lambda machine: table)
        assert choose.choose(arguments(), "static").name == "math"
        assert choose.choose(arguments(causal=True), "static").name == "sdpa"
        assert not tuning.verdicts()

    @pytest.mark.parametrize(
        ("changes", "capability", "expected"),
        [
            ({}, (9, 0), "cudnn"),
            ({}, (8, 0), "sdpa"),
            ({"mask": (1, 1, 1, 64)}, (9, 0), "sdpa"),
            ({"dtype": torch.float32}, (9, 0), "sdpa"),
            ({"width": 512}, (9, 0), "sdpa"),
            ({"device": "cpu"}, None, "sdpa"),
            ({"queries": 0}, (9, 0), "sdpa"),
        ],
    )
    def test_the_rule(self, changes, capability, expected, monkeypatch):
        monkeypatch.setattr(trial.device, "capability", lambda where: capability)
        assert rule(on_a_gpu(**changes)) == expected

    @pytest.mark.parametrize(
        ("changes", "declined"),
        [
            ({}, set()),
            ({"mask": (2, 1, 1, 64)}, {"flash", "products"}),
            ({"causal": True}, {"products"}),
            ({"causal": True, "queries": 32}, {"cudnn", "flash", "products"}),
            ({"dtype": torch.float32}, {"cudnn", "flash", "products"}),
            ({"heads": 1}, {"efficient", "products"}),
            ({"width": 512}, {"cudnn", "flash", "flex"}),
        ],
    )
    def test_declines_on_a_gpu(self, changes, declined):
        # Two packages are not installed here.
        assert set(ops.providers(OP)) - able(on_a_gpu(**changes)) == declined | {"flash3", "sage"}

    def test_gradients_are_declined_by_providers_without_a_backward(self):
        given = on_a_gpu()
        given.q.requires_grad_()
        assert able(on_a_gpu()) - able(given) == {"products", "flex"}

    def test_the_environment_wins(self, monkeypatch):
        q, k, v = qkv()
        monkeypatch.setenv("TRITIUM_ATTENTION", "math")
        assert choose.choose(arguments(), "runtime").name == "math"
        assert choose.choose(arguments(), "manual", "chunked").name == "math"
        tritium.CompilationConfig()
        monkeypatch.setenv("TRITIUM_ATTENTION", "static")
        assert choose.choose(arguments(), "manual", "chunked").name == "sdpa"
        monkeypatch.setenv("TRITIUM_ATTENTION", "mats")
        with pytest.raises(ArgumentError, match="TRITIUM_ATTENTION=mats: there is no attention 'mats'; did you mean"):
            tritium.attention_forward(q, k, v)
        monkeypatch.setenv("TRITIUM_ATTENTION", "flash")
        with pytest.raises(ArgumentError, match="those that can: sdpa, math, chunked"):
            tritium.attention_forward(q, k, v)
        monkeypatch.delenv("TRITIUM_ATTENTION")
        monkeypatch.setenv("TRITIUM_ATENTION", "math")
        with pytest.raises(ConfigError, match="did you mean 'TRITIUM_ATTENTION'"):
            tritium.CompilationConfig()

    def test_a_package_adds_a_provider(self, monkeypatch, tmp_path):
        def plugged(name):
            mine = Provider(
                name, "attention", lambda given: OP.compute(**vars(given)), lambda given: None, inlined=True
            )
            entries = {"tritium.providers": [catalog.Entry(mine, tmp_path, "a package")]}
            monkeypatch.setattr(catalog, "plugins", lambda group, kind: entries.get(group, []))
            ops._plugged_in.cache_clear()

        try:
            plugged("mine")
            q, k, v = qkv()
            out = tritium.attention_forward(q, k, v, opt_mode="manual", op_type="mine")
            exact = exact_of(q, k, v)
            assert_no_worse(out, exact.float(), exact)
            tritium.attention_forward(q, k, v)
            assert "mine" in tuning.verdicts()[0].ms
            plugged("flash")
            with pytest.raises(CatalogError, match="op 'attention' has a provider 'flash' already"):
                ops.providers(OP)
        finally:
            monkeypatch.undo()
            ops._plugged_in.cache_clear()

    def test_a_named_provider_is_kept_for_the_call(self, monkeypatch):
        calls = []
        monkeypatch.setattr(choose, "choose", counted(choose.choose, calls))
        q, k, v = qkv()
        with torch.inference_mode():
            first, other = (
                [tritium.attention_forward(q, k, v, opt_mode="manual", op_type=name) for _ in range(2)]
                for name in ("math", "chunked")
            )
        assert len(calls) == 2
        assert torch.equal(*first)
        assert torch.equal(*other)


def counted(function, calls):
    def call(*given, **named):
        calls.append(str(given[1]) if isinstance(given[1], tuning.Key) else "")
        return function(*given, **named)

    return call


def test_sizes_fall_into_classes():
    assert trial.size_class(4608) == trial.size_class(4096) != trial.size_class(5632)


@pytest.mark.parametrize(
    "mask", [None, torch.zeros(2, 1, 1, 100), torch.zeros(7, 1, 1, 100).half()[:1], torch.ones(1, 4, 63, 100) > 0]
)
@pytest.mark.parametrize("head_first", [False, True])
@pytest.mark.parametrize("apart", [False, True])
def test_arguments_alike_have_the_same_key(mask, head_first, apart):
    sides = [t if head_first else t.transpose(1, 2) for t in qkv(head_first=head_first)]
    if apart:
        sides = [t.transpose(1, 3).contiguous().transpose(1, 3) for t in sides]
    given = OP.bind(*sides, mask, 0.2, False)
    alike = OP.bind(**OP.trial.first_use.alike(given)())
    assert OP.trial.shape(alike) == OP.trial.shape(given)
    assert ("apart" in OP.trial.shape(given)["memory"]) == apart


class TestErrors:
    @pytest.mark.parametrize(
        ("changes", "error", "words"),
        [
            ({"query": [1]}, ArgumentTypeError, "query must be a tensor, got list"),
            ({"key": None}, ArgumentTypeError, "key must be a tensor"),
            ({"value": torch.ones(2, 7, 8)}, ArgumentError, "value must have rank 4, got 3"),
            ({"fused": 1}, ArgumentTypeError, "fused must be True or False"),
            ({"head_first": None}, ArgumentTypeError, "head_first must be True or False"),
            ({"attn_mask": [True]}, ArgumentTypeError, "attn_mask must be a tensor or None"),
            ({"attn_mask": torch.ones(7, 7, dtype=torch.int64)}, ArgumentTypeError, "boolean, where True keeps"),
            ({"attn_mask": torch.ones(7)}, ArgumentError, "rank 2 or 3 or 4, got 1"),
            ({"attn_mask": torch.zeros(7, 7).to(torch.float8_e4m3fn)}, ArgumentTypeError, "attn_mask must be boolean"),
            (
                {"key": torch.ones(2, 7, 0, 8), "value": torch.ones(2, 7, 0, 8), "enable_gqa": True},
                ArgumentError,
                "a multiple",
            ),
            ({"attn_mask": torch.ones(7, 6)}, ArgumentError, "cannot be broadcast"),
            ({"scale": "1"}, ArgumentTypeError, "scale must be a number or None"),
            ({"scale": math.nan}, ArgumentError, "scale must be a number, got nan"),
            ({"key": torch.ones(3, 7, 4, 8)}, ArgumentError, "one batch"),
            ({"key": torch.ones(2, 7, 4, 6)}, ArgumentError, "heads of one width"),
            ({"key": torch.ones(2, 6, 4, 8)}, ArgumentError, "same tokens and heads"),
            ({"query": torch.ones(2, 7, 8, 8)}, ArgumentError, "unless enable_gqa=True"),
            ({"query": torch.ones(2, 7, 6, 8), "enable_gqa": True}, ArgumentError, "a multiple of those of key"),
            ({"query": torch.ones(2, 7, 4, 8).half()}, ArgumentTypeError, "must have one dtype"),
            ({"query": torch.ones(2, 7, 4, 8, device="meta")}, ArgumentError, "query on meta, key on cpu"),
            ({"opt_mode": "fast"}, ArgumentError, "no opt_mode 'fast'"),
            ({"op_type": "math"}, ArgumentError, "for opt_mode 'manual'"),
            ({"opt_mode": "manual", "op_type": "flahs"}, ArgumentError, "did you mean 'flash'"),
            ({"opt_mode": "manual", "op_type": "flash"}, ArgumentError, "those that can: sdpa, math, chunked"),
            ({"opt_mode": "manual", "op_type": ["sdpa"]}, ArgumentTypeError, "op_type must be a string or None"),
            ({"opt_mode": "manual", "layout": "SBND"}, ArgumentError, "no layout 'SBND'"),
        ],
    )
    def test_errors(self, changes, error, words):
        given = {name: torch.ones(2, 7, 4, 8) for name in ("query", "key", "value")}
        with pytest.raises(error, match=words):
            tritium.attention_forward(**{**given, **changes})


class TestCompiled:
    @pytest.mark.parametrize(
        "options",
        [{"opt_mode": "runtime"}, {"opt_mode": "static"}, {"opt_mode": "manual", "op_type": "math", "layout": "BNSD"}],
        ids=lambda options: options["opt_mode"],
    )
    def test_one_graph_without_a_break_for_all_lengths(self, options):
        def function(q, k, v):
            return tritium.attention_forward(q * 2, k, v, is_causal=True, **options)

        compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
        with torch.inference_mode():
            for queries in (63, 50, 20):
                q, k, v = qkv(queries)
                torch._dynamo.mark_dynamic(q, 1)
                with torch._dynamo.config.patch(error_on_recompile=queries != 63):
                    torch.testing.assert_close(compiled(q, k, v), function(q, k, v))

    def test_an_unknown_name_is_an_error_while_compiling(self):
        q, k, v = qkv()
        function = torch.compile(
            lambda q: tritium.attention_forward(q, k, v, opt_mode="manual", op_type="mathe"), backend="eager"
        )
        with pytest.raises(ArgumentError, match="there is no attention 'mathe'; did you mean 'math'"):
            function(q)

    def test_the_choice_is_made_while_compiling(self, monkeypatch):
        """The graph holds the operators of the chosen provider, and running it chooses nothing."""
        graphs, calls = [], []
        monkeypatch.setattr(choose, "choose", counted(choose.choose, calls))
        monkeypatch.setattr(tuning.compare, "timed", lambda runs, where: {"sdpa": 2.0, "math": 1.0})

        def keep(gm, inputs):
            graphs.append(gm)
            return gm

        q, k, v = qkv()
        compiled = torch.compile(
            lambda q, k, v: tritium.attention_forward(q, k, v), backend=aot_autograd(fw_compiler=keep), fullgraph=True
        )
        with torch.inference_mode():
            compiled(q, k, v)
            before = len(calls)
            compiled(q, k, v)
        assert len(calls) == before > 0
        targets = {str(node.target) for node in graphs[0].graph.nodes}
        assert "aten.bmm.default" in targets
        assert not any("tritium" in target for target in targets)

    def test_gradients_of_a_graph(self):
        q, k, v = (t.requires_grad_() for t in qkv(7, 7))
        compiled = torch.compile(tritium.attention_forward, backend="aot_eager", fullgraph=True)
        gradients = [
            torch.autograd.grad(function(q, k, v).square().sum(), (q, k, v))
            for function in (compiled, tritium.attention_forward)
        ]
        for one, other in zip(*gradients, strict=True):
            torch.testing.assert_close(one, other)

    def test_code_that_was_compiled_for_another_choice_is_not_found(self, monkeypatch):
        """Compiled code is found by the graph that Dynamo traced, which must differ where the choice may."""
        traced = []

        def look(gm, inputs):
            traced.append([node.args[-1] for node in gm.graph.nodes if "attention" in str(node.target)])
            return gm

        q, k, v = qkv()
        for override in ("math", "chunked", "math"):
            monkeypatch.setenv("TRITIUM_ATTENTION", override)
            torch._dynamo.reset()
            torch.compile(lambda q: tritium.attention_forward(q, k, v), backend=look, fullgraph=True)(q)
        monkeypatch.delenv("TRITIUM_ATTENTION")
        before = choose.identity()
        tritium.attention_forward(q, k, v)
        assert [len(names) for names in traced] == [1, 1, 1]
        assert traced[0] == traced[2] != traced[1]
        # A new measurement counts as well.
        assert choose.identity() != before

    def test_an_opaque_provider_stays_one_operator(self, monkeypatch):
        """In graphs, under modes and transforms, and eagerly."""
        opaque = Provider(ops.REFERENCE, "attention", lambda given: None, lambda given: None)
        monkeypatch.setattr(ops, "providers", lambda op: {opaque.name: opaque})

        def function(q, k, v):
            return tritium.attention_forward(q, k, v, opt_mode="manual", op_type=opaque.name)

        q, k, v = qkv()
        graphs = []
        backend = aot_autograd(fw_compiler=lambda gm, inputs: graphs.append(gm) or gm)
        with torch.inference_mode():
            alone = function(q, k, v)
            torch.testing.assert_close(torch.compile(function, backend=backend, fullgraph=True)(q, k, v), alone)
            several = torch.vmap(function)(*(t.unsqueeze(0).expand(2, *t.shape) for t in (q, k, v)))
        assert "tritium.attention.default" in {str(node.target) for node in graphs[0].graph.nodes}
        torch.testing.assert_close(alone, tritium.attention_forward(q, k, v, fused=False))
        torch.testing.assert_close(several, torch.stack([alone, alone]))

    @pytest.mark.codegen
    @pytest.mark.thorough
    def test_flex_inside_a_graph(self):
        def function(q, k, v):
            return tritium.attention_forward(q * 2, k, v, opt_mode="manual", op_type="flex") + 1

        q, k, v = qkv(64, 64)
        with torch.inference_mode():
            torch.testing.assert_close(torch.compile(function, fullgraph=True)(q, k, v), function(q, k, v))

    @pytest.mark.thorough
    @pytest.mark.codegen
    def test_flex_on_a_cpu_when_it_is_named(self):
        q, k, v = qkv(64, 64)
        mask = torch.ones(64, 64, dtype=torch.bool).tril(3)
        with torch.inference_mode():
            for options in ({}, {"attn_mask": mask}, {"is_causal": True}):
                out = tritium.attention_forward(q, k, v, opt_mode="manual", op_type="flex", **options)
                exact = exact_of(q, k, v, options.get("attn_mask"), causal="is_causal" in options)
                assert_no_worse(out, exact.float(), exact)

    def test_flex_and_causality_in_a_graph(self):
        q, k, v = qkv(40, 40)

        def function(q, k, v):
            return tritium.attention_forward(q, k, v, opt_mode="manual", op_type="flex", is_causal=True)

        out = torch.compile(function, fullgraph=True, backend="aot_eager")(q, k, v)
        exact = exact_of(q, k, v, causal=True)
        assert_no_worse(out, exact.float(), exact)


@pytest.mark.parametrize("scale", [-0.4, 0.0])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("options", [{}, {"opt_mode": "static"}, {"opt_mode": "manual", "op_type": "sdpa"}])
def test_scales_not_above_zero(scale, causal, options):
    """Kernels hide keys before they multiply: with a negative scale a hidden key would be the only visible one."""
    q, k, v = qkv(33, 33)
    out = tritium.attention_forward(q, k, v, scale=scale, is_causal=causal, **options)
    exact = exact_of(q, k, v, scale=scale, causal=causal)
    assert_no_worse(out, exact.float(), exact)
