"""The provider that an attention chooses, eagerly and in graphs."""

import json

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import FakeTensorMode

import tritium
from support.attention import exact_of, qkv
from support.fidelity import assert_no_worse
from tritium import catalog, ops, tuning
from tritium.compat import attention as compat_attention
from tritium.errors import ArgumentError, CatalogError, ConfigError
from tritium.layers import choose
from tritium.ops import Provider
from tritium.ops.attention import OP, rule, trial
from tritium.ops.attention.providers import tile_for_a_wide_mask


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

    @pytest.mark.parametrize("options", [{}, {"opt_mode": "manual", "op_type": "math"}], ids=str)
    def test_a_call_is_described_once(self, monkeypatch, options):
        calls = []
        monkeypatch.setattr(choose, "choose", counted(choose.choose, calls))
        q, k, v = qkv()
        for _ in range(3):
            out = tritium.attention_forward(q, k, v, scale=0.3, **options)
        torch.testing.assert_close(out, tritium.attention_forward(q, k, v, scale=0.3, fused=False))
        assert len(calls) == 1
        tritium.attention_forward(q, k, v, scale=0.3, is_causal=True, **options)
        assert len(calls) == 2

    def test_providers_that_hold_all_scores_skip_a_video(self):
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

    def test_a_graph_stores_a_separate_verdict(self):
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
        table = tuning.Table({key: tuning.Verdict(key, "math", {"math": 1.0})})
        monkeypatch.setattr(tuning.tables, "shipped", lambda machine: table)
        assert choose.choose(OP, arguments(), "static") == "math"
        assert choose.choose(OP, arguments(causal=True), "static") == "sdpa"
        assert not tuning.verdicts()

    @pytest.mark.parametrize("mode", ["runtime", "lossy"])
    def test_ranks_measure_nothing(self, mode, monkeypatch):
        """Each would measure for itself, and a rank with another provider rounds otherwise."""
        q = torch.randn(1, 8, 2, 16)
        with monkeypatch.context() as patched:
            patched.setattr(choose.compat.collectives, "has_other_ranks", lambda: True)
            tritium.attention_forward(q, q, q, opt_mode=mode)
        assert not tuning.verdicts()
        tritium.attention_forward(q, q, q, opt_mode=mode)
        assert tuning.verdicts()

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
            ({"width": 100}, {"cudnn", "flash", "efficient"}),
            ({"width": 100, "dtype": torch.float32}, {"cudnn", "flash", "products"}),
            ({"keys": 1}, {"cudnn"}),
        ],
    )
    def test_declines_on_a_gpu(self, changes, declined):
        # Two packages and a GPU are not here.
        declined = declined | {"flash3", "sage", "int8"}
        assert set(ops.providers(OP)) - able(on_a_gpu(**changes)) == declined

    def test_gradients_are_declined_by_providers_without_a_backward(self):
        given = on_a_gpu()
        given.q.requires_grad_()
        assert able(on_a_gpu()) - able(given) == {"products", "flex"}

    def test_heads_must_be_contiguous_for_kernels(self):
        with FakeTensorMode():
            q = torch.empty(1, 2, 64, 64, device="cuda", dtype=torch.bfloat16)
            whole, apart = (OP.bind(*[t] * 3, None, 0.25, False) for t in (q, q.transpose(2, 3)))
        assert {"cudnn", "flash", "efficient"} <= able(whole)
        assert not {"cudnn", "flash", "efficient"} & able(apart)
        assert "sdpa" in able(apart)

    def test_wide_masks_on_a_gpu(self, monkeypatch):
        """Kernels decline a mask in float32 for a query in half precision; verdicts for both are separate."""
        monkeypatch.setattr(trial.device, "capability", lambda where: (9, 0))
        given, narrow = on_a_gpu(), on_a_gpu()
        with FakeTensorMode():
            given.mask = torch.zeros(1, 1, 1, 64, device="cuda")
            narrow.mask = given.mask.bfloat16()
        assert OP.trial.shape(given) != OP.trial.shape(narrow)
        assert able(given) == {"math", "chunked", "flex"}
        assert rule(given) == "flex"
        given.q.requires_grad_()
        assert rule(given) == "chunked"

    @pytest.mark.parametrize("room", [101_376, 166_912, 232_448])
    @pytest.mark.parametrize("width", [16, 100, 128, 256])
    def test_tiles_leave_room_for_a_wide_mask(self, width, room):
        """On GPUs with the least, a usual and the most shared memory."""
        queries, keys, stages, _ = tile_for_a_wide_mask(width, width, 2, room)
        held = 1 << (width - 1).bit_length()
        assert queries * held * 2 + stages * (keys * 2 * held * 2 + queries * keys * 4) <= room
        # FlexAttention has blocks of 128.
        assert 128 % queries == 128 % keys == 0

    def test_the_environment_wins(self, monkeypatch):
        q, k, v = qkv()
        monkeypatch.setenv("TRITIUM_ATTENTION", "math")
        assert choose.choose(OP, arguments(), "runtime") == "math"
        assert choose.choose(OP, arguments(), "chunked") == "math"
        tritium.CompilationConfig()
        monkeypatch.setenv("TRITIUM_ATTENTION", "static")
        assert choose.choose(OP, arguments(), "chunked") == "sdpa"
        monkeypatch.setenv("TRITIUM_ATTENTION", "mats")
        with pytest.raises(
            ArgumentError, match="TRITIUM_ATTENTION=mats: there is no attention provider 'mats'; did you mean"
        ):
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


def counted(function, calls):
    def call(*given, **named):
        calls.append(str(given[1]) if isinstance(given[1], tuning.Key) else "")
        return function(*given, **named)

    return call


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
        with pytest.raises(ArgumentError, match="there is no attention provider 'mathe'; did you mean 'math'"):
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
        before = choose.identity(choose.DENSE)
        tritium.attention_forward(q, k, v)
        assert [len(names) for names in traced] == [1, 1, 1]
        assert traced[0] == traced[2] != traced[1]
        # A new measurement counts as well.
        assert choose.identity(choose.DENSE) != before

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

    @pytest.mark.thorough
    @pytest.mark.codegen
    @pytest.mark.parametrize(
        "options", [{}, {"attn_mask": torch.ones(64, 64).tril(3) > 0}, {"is_causal": True}], ids=list
    )
    def test_flex_on_a_cpu_when_it_is_named(self, options):
        def function(q, k, v):
            return tritium.attention_forward(q * 2, k, v, opt_mode="manual", op_type="flex", **options) + 1

        q, k, v = qkv(64, 64)
        with torch.inference_mode():
            out = function(q, k, v)
            exact = 1 + exact_of(q * 2, k, v, options.get("attn_mask"), causal="is_causal" in options)
            assert_no_worse(out, exact.float(), exact)
            torch.testing.assert_close(torch.compile(function, fullgraph=True)(q, k, v), out)

    def test_flex_and_causality_in_a_graph(self):
        q, k, v = qkv(40, 40)
        compiled = torch.compile(tritium.attention_forward, fullgraph=True, backend="aot_eager")
        out = compiled(q, k, v, opt_mode="manual", op_type="flex", is_causal=True)
        exact = exact_of(q, k, v, causal=True)
        assert_no_worse(out, exact.float(), exact)

    @pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.bfloat16])
    def test_a_mask_in_one_graph(self, dtype):
        q, k, v = qkv(7, 63, dtype=torch.bfloat16)
        mask = (torch.arange(63) < 40).expand(7, 63)
        mask = mask if dtype == torch.bool else torch.where(mask, 0.0, -torch.inf).to(dtype)
        compiled = torch.compile(tritium.attention_forward, backend="aot_eager", fullgraph=True)
        with torch.inference_mode():
            torch.testing.assert_close(compiled(q, k, v, mask), tritium.attention_forward(q, k, v, mask))
