"""`attention_forward`: what it computes, who is chosen, what is remembered, and what is refused."""

import dataclasses
import json
import math

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import tritium
from fidelity import assert_no_worse
from tritium import tuning
from tritium.compat import attention as compat_attention
from tritium.errors import ArgumentError, ArgumentTypeError, ConfigError
from tritium.layers.attention import candidates as entries
from tritium.layers.attention import choice, table
from tritium.layers.attention.mathematics import attention_math
from tritium.layers.attention.request import Request, draw, size_class

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
        from tritium.layers.attention import mathematics

        q, k, v = qkv()
        whole = tritium.attention_forward(q, k, v, is_causal=True, opt_mode="manual", op_type="chunked")
        monkeypatch.setattr(mathematics, "CHUNK_BYTES", 4 * 2 * 4 * 100 * 10)
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


class TestChoice:
    def test_a_key_is_measured_once_and_later_processes_find_it(self, monkeypatch, tmp_path):
        calls = []
        real = choice.compare
        monkeypatch.setattr(choice, "compare", lambda *given: calls.append(given[0].key()) or real(*given))
        q, k, v = qkv()
        for _ in range(3):
            tritium.attention_forward(q, k, v)
        assert len(calls) == 1
        # What another process starts with: the file, and nothing in memory.
        choice.forget()
        tritium.attention_forward(q, k, v)
        assert len(calls) == 1
        (path,) = tmp_path.iterdir()
        (row,) = json.loads(path.read_text())["rows"]
        assert row["winner"] in row["ms"]
        assert set(row["ms"]) == {"sdpa", "math", "chunked"}
        assert row["dropped"]["flash"] == "it runs on a GPU, the tensors are on cpu"
        assert row["versions"] == compat_attention.versions()
        # Another mask, causality, dtype or class of sizes is another key.
        tritium.attention_forward(q, k, v, is_causal=True)
        tritium.attention_forward(q, k, v, torch.ones(63, 100, dtype=torch.bool))
        tritium.attention_forward(q, k, v, torch.zeros(2, 1, 1, 100))
        tritium.attention_forward(*(t.half() for t in (q, k, v)))
        tritium.attention_forward(*(t.transpose(1, 2).contiguous() for t in (q, k, v)), head_first=True)
        tritium.attention_forward(q[:, :20], k, v)
        assert len(calls) == len(set(calls)) == 7

    def test_other_versions_measure_again(self, monkeypatch):
        q, k, v = qkv()
        tritium.attention_forward(q, k, v)
        choice.forget()
        calls = []
        real = choice.compare
        monkeypatch.setattr(choice, "compare", lambda *given: calls.append(1) or real(*given))
        monkeypatch.setattr(compat_attention, "versions", lambda: {"torch": "9.9"})
        tritium.attention_forward(q, k, v)
        assert len(calls) == 1

    def test_memory_is_bounded(self, monkeypatch):
        monkeypatch.setattr(choice, "REMEMBERED", 2)
        for width in (16, 32, 48):
            tritium.attention_forward(*qkv(7, 7, width=width))
        assert [row.key.count("width=") > 0 for row in choice.choices()] == [True, True]
        assert "width=16 " not in "".join(row.key for row in choice.choices())

    def test_the_fastest_wins_and_pytorch_s_own_wins_ties(self, monkeypatch):
        monkeypatch.setattr(choice, "timed", lambda runs, where: {"sdpa": 1.0, "math": 0.5, "chunked": 2.0})
        assert choice.compare(request(), CPU).winner == "math"
        monkeypatch.setattr(choice, "timed", lambda runs, where: {"sdpa": 1.0, "math": 0.99, "chunked": 2.0})
        assert choice.compare(request(), CPU).winner == "sdpa"

    def test_a_candidate_that_is_not_close_is_dropped_with_the_figure(self, monkeypatch):
        def rough(q, k, v, mask, scale, causal):
            return attention_math(q, k, v, mask, scale * 1.01, causal)

        def broken(*given):
            raise RuntimeError("no such kernel\nand more")

        def empty(q, k, v, mask, scale, causal):
            return torch.full_like(q, math.nan)

        known = {name: entries.candidates()[name] for name in ("sdpa", "math")}
        for name, run in (("rough", rough), ("broken", broken), ("empty", empty)):
            known[name] = entries.Candidate(name, run, lambda request: None)
        monkeypatch.setattr(choice, "candidates", lambda: known)
        row = choice.compare(request(), CPU)
        assert set(row.ms) == {"sdpa", "math"}
        assert "against float64, allowed" in row.dropped["rough"]
        assert row.dropped["broken"] == "RuntimeError: no such kernel"
        assert "nan against float64" in row.dropped["empty"]

    def test_who_holds_all_scores_is_not_tried_on_a_video(self):
        video = request(32_760, 32_760)
        reason = choice._not_measured(entries.candidates()["math"], video, tracing=False)
        assert reason == "not measured: its scores would take 32.0 GiB"
        for name in ("sdpa", "chunked"):
            assert choice._not_measured(entries.candidates()[name], video, tracing=False) is None
        on_a_gpu = dataclasses.replace(video, device="cuda")
        for name, dtype in (("chunked", torch.float32), ("products", torch.bfloat16)):
            asked = dataclasses.replace(on_a_gpu, dtype=dtype)
            assert "scores" in choice._not_measured(entries.candidates()[name], asked, tracing=False)

    def test_candidates_are_timed_as_they_run(self, monkeypatch):
        """A default device is a mode that Python asks about every operator: who has many of them would look slow."""
        modes = []

        def run(*asked):
            modes.append(torch._C._len_torch_function_stack())
            return attention_math(*asked)

        known = {**entries.candidates(), "mine": entries.Candidate("mine", run, lambda request: None)}
        for module in (choice, entries):
            monkeypatch.setattr(module, "candidates", lambda: known)
        tritium.attention_forward(*qkv())
        assert len(modes) > 1
        assert set(modes) == {0}

    def test_a_call_that_was_right_makes_no_wrong_one_right(self):
        q, k, v = qkv()
        right = {"head_first": False, "scale": 1.0}
        tritium.attention_forward(q, k, v, **right)
        for wrong in ({"head_first": 0}, {"is_causal": 0}, {"fused": 1}, {"enable_gqa": 0}, {"scale": True}):
            with pytest.raises(ArgumentTypeError):
                tritium.attention_forward(q, k, v, **{**right, **wrong})
        with pytest.raises(ArgumentError):
            tritium.attention_forward(q, k, v, **right, opt_mode="fast")

    def test_a_call_is_described_once(self, monkeypatch):
        described = []
        of = Request.of
        monkeypatch.setattr(Request, "of", lambda *asked: described.append(asked) or of(*asked))
        q, k, v = qkv()
        for _ in range(3):
            out = tritium.attention_forward(q, k, v, scale=0.3)
        torch.testing.assert_close(out, tritium.attention_forward(q, k, v, scale=0.3, fused=False))
        assert len(described) == 1
        tritium.attention_forward(q, k, v, scale=0.3, is_causal=True)
        assert len(described) == 2

    @pytest.mark.parametrize("told", [True, False])
    def test_nothing_is_compiled_while_something_is_compiled(self, monkeypatch, told):
        # Two compilers in two threads, one of which waits for the other, would wait for ever.
        if not told:
            # As torch 2.11 answers from inside an operator.
            monkeypatch.setattr(torch.compiler, "is_compiling", lambda: False)
        known = {**entries.candidates()}
        known["mine"] = entries.Candidate("mine", attention_math, lambda request: None, compiles=True)
        for module in (choice, entries):
            monkeypatch.setattr(module, "candidates", lambda: known)
        q, k, v = qkv()
        with torch.inference_mode():
            torch.compile(lambda q: tritium.attention_forward(q, k, v), backend="aot_eager", fullgraph=True)(q)
            tritium.attention_forward(q, k, v, is_causal=True)
        traced, eager = choice.choices()
        assert "something else is being compiled" in traced.dropped["mine"]
        assert "mine" in eager.ms

    def test_a_winner_that_cannot_do_it_here_is_passed_over(self):
        row = table.Row(request().key(), "chunked", {"chunked": 1.0, "math": 3.0, "sdpa": 2.0})
        assert choice._fastest(row, request()) == "chunked"
        symbolic = Request(**{**vars(request()), "symbolic": True})
        assert choice._fastest(row, symbolic) == "sdpa"

    def test_shipped_tables_say_what_their_numbers_say(self):
        paths = sorted(tuning.tables.SHIPPED.glob("attention-*.json"))
        assert paths
        for path in paths:
            rows = table.read(path)
            assert len(rows) == len(json.loads(path.read_text())["rows"]) > 0
            for row in rows.values():
                best = min(row.ms, key=row.ms.get)
                kept = row.ms.get("sdpa", math.inf) <= row.ms[best] * (1 + choice.MARGIN)
                assert row.winner == ("sdpa" if kept else best), row.key

    def test_static_takes_the_shipped_table_and_then_a_rule(self, monkeypatch):
        row = table.Row(request().key(), "math", {"math": 1.0})
        monkeypatch.setattr(table, "shipped", lambda device, key: row if key == row.key else None)
        assert choice.choose(request(), "static", None, None, CPU).name == "math"
        assert choice.choose(request(causal=True), "static", None, None, CPU).name == "sdpa"
        assert not choice.choices()

    @pytest.mark.parametrize(
        ("changes", "capability", "expected"),
        [
            ({}, (9, 0), "cudnn"),
            ({}, (8, 0), "sdpa"),
            ({"mask": (1, 1, 1, 100)}, (9, 0), "sdpa"),
            ({"dtype": torch.float32}, (9, 0), "sdpa"),
            ({"width": 512, "value_width": 512}, (9, 0), "sdpa"),
            ({"grad": True}, (9, 0), "sdpa"),
            ({"device": "cpu"}, None, "sdpa"),
        ],
    )
    def test_the_rule(self, changes, capability, expected):
        asked = request(device="cuda", dtype=torch.bfloat16, width=128, value_width=128)
        assert choice.rule(Request(**{**vars(asked), **changes}), capability) == expected

    @pytest.mark.parametrize(
        ("changes", "declined"),
        [
            ({}, {"flash3", "sage"}),
            ({"mask": (2, 1, 1, 64)}, {"flash", "products", "flash3", "sage"}),
            ({"causal": True}, {"products", "flash3", "sage"}),
            ({"causal": True, "queries": 32}, {"cudnn", "flash", "products", "flash3", "sage"}),
            ({"dtype": torch.float32}, {"cudnn", "flash", "products", "flash3", "sage"}),
            ({"kv_heads": 1}, {"efficient", "products", "flash3", "sage"}),
            ({"width": 512, "value_width": 512}, {"cudnn", "flash", "flex", "flash3", "sage"}),
            ({"symbolic": True}, {"chunked", "flash3", "sage"}),
            ({"grad": True}, {"products", "flex", "flash3", "sage"}),
        ],
    )
    def test_who_declines_what_on_a_gpu(self, changes, declined):
        asked = request(64, 64, device="cuda", dtype=torch.bfloat16, width=128, value_width=128)
        asked = Request(**{**vars(asked), **changes})
        assert set(entries.candidates()) - set(entries.able(asked)) == declined

    def test_the_environment_wins(self, monkeypatch):
        q, k, v = qkv()
        monkeypatch.setenv("TRITIUM_ATTENTION", "math")
        assert choice.choose(request(), "runtime", None, None, CPU).name == "math"
        assert choice.choose(request(), "manual", "chunked", None, CPU).name == "math"
        tritium.CompilationConfig()
        monkeypatch.setenv("TRITIUM_ATTENTION", "static")
        assert choice.choose(request(), "manual", "chunked", None, CPU).name == "sdpa"
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

    def test_a_package_adds_a_candidate(self, monkeypatch, tmp_path):
        from tritium import catalog
        from tritium.errors import CatalogError

        def plugged(name):
            mine = entries.Candidate(name, attention_math, lambda request: None)
            monkeypatch.setattr(catalog, "plugins", lambda group, kind: [catalog.Entry(mine, tmp_path, group)])
            entries.candidates.cache_clear()

        try:
            plugged("mine")
            q, k, v = qkv()
            out = tritium.attention_forward(q, k, v, opt_mode="manual", op_type="mine")
            exact = exact_of(q, k, v)
            assert_no_worse(out, exact.float(), exact)
            tritium.attention_forward(q, k, v)
            assert "mine" in choice.choices()[0].ms
            plugged("flash")
            with pytest.raises(CatalogError, match="'flash' is declared twice"):
                entries.candidates()
        finally:
            monkeypatch.undo()
            entries.candidates.cache_clear()

    def test_a_file_that_cannot_be_read_is_measured_anew(self, tmp_path):
        q, k, v = qkv()
        tritium.attention_forward(q, k, v)
        (path,) = tmp_path.iterdir()
        path.write_text("{")
        choice.forget()
        tritium.attention_forward(q, k, v)
        assert len(json.loads(path.read_text())["rows"]) == 1


def request(queries=63, keys=100, *, causal=False, **changes):
    q, k, v = (torch.empty(2, tokens, 4, 32).transpose(1, 2) for tokens in (queries, keys, keys))
    return Request(**{**vars(Request.of(q, k, v, None, causal)), **changes})


def test_sizes_fall_into_classes():
    assert size_class(4608) == size_class(4096) != size_class(5632)


@pytest.mark.parametrize("mask", [None, torch.zeros(2, 1, 1, 100), torch.ones(1, 4, 63, 100, dtype=torch.bool)])
@pytest.mark.parametrize("head_first", [False, True])
def test_what_is_drawn_makes_the_same_request(mask, head_first):
    q, k, v = (t if head_first else t.transpose(1, 2) for t in qkv(head_first=head_first))
    asked = Request.of(q, k, v, mask, False)
    *drawn, drawn_mask = draw(asked, CPU)
    assert Request.of(*drawn, drawn_mask, False) == asked


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
            ({"attn_mask": torch.ones(7, 6)}, ArgumentError, "cannot be broadcast"),
            ({"scale": "1"}, ArgumentTypeError, "scale must be a number or None"),
            ({"scale": True}, ArgumentTypeError, "scale must be a number or None"),
            ({"key": torch.ones(3, 7, 4, 8)}, ArgumentError, "one batch"),
            ({"key": torch.ones(2, 7, 4, 6)}, ArgumentError, "heads of one width"),
            ({"key": torch.ones(2, 6, 4, 8)}, ArgumentError, "same tokens and heads"),
            ({"query": torch.ones(2, 7, 8, 8)}, ArgumentError, "unless enable_gqa=True"),
            ({"query": torch.ones(2, 7, 6, 8), "enable_gqa": True}, ArgumentError, "a multiple of the key's"),
            ({"query": torch.ones(2, 7, 4, 8).half()}, ArgumentTypeError, "one floating-point dtype"),
            ({"query": torch.ones(2, 7, 4, 8, device="meta")}, ArgumentError, "query on meta, key on cpu"),
            ({"opt_mode": "fast"}, ArgumentError, "no opt_mode 'fast'"),
            ({"op_type": "math"}, ArgumentError, "for opt_mode 'manual'"),
            ({"opt_mode": "manual", "op_type": "flahs"}, ArgumentError, "did you mean 'flash'"),
            ({"opt_mode": "manual", "op_type": "flash"}, ArgumentError, "those that can: sdpa, math, chunked"),
            ({"opt_mode": "manual", "layout": "SBND"}, ArgumentError, "no layout 'SBND'"),
        ],
    )
    def test_what_it_cannot_honour(self, changes, error, words):
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
        # As in a process that compiles before it has ever asked who there is.
        entries.candidates.cache_clear()

        def function(q, k, v):
            return tritium.attention_forward(q * 2, k, v, is_causal=True, **options)

        compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
        with torch.inference_mode():
            for queries in (63, 50, 20):
                q, k, v = qkv(queries)
                torch._dynamo.mark_dynamic(q, 1)
                with torch._dynamo.config.patch(error_on_recompile=queries != 63):
                    torch.testing.assert_close(compiled(q, k, v), function(q, k, v))

    def test_a_name_that_nobody_has_is_told_while_compiling(self):
        q, k, v = qkv()
        function = torch.compile(
            lambda q: tritium.attention_forward(q, k, v, opt_mode="manual", op_type="mathe"), backend="eager"
        )
        with pytest.raises(ArgumentError, match="there is no attention 'mathe'; did you mean 'math'"):
            function(q)

    def test_the_choice_is_made_while_compiling(self, monkeypatch):
        """The graph holds what was chosen, and running it asks nobody."""
        graphs, asked = [], []
        real = choice.choose
        from tritium.layers.attention import operator

        monkeypatch.setattr(operator, "choose", lambda *given: asked.append(1) or real(*given))
        monkeypatch.setattr(choice, "timed", lambda runs, where: {"sdpa": 2.0, "math": 1.0})

        def keep(gm, inputs):
            graphs.append(gm)
            return gm

        from torch._dynamo.backends.common import aot_autograd

        q, k, v = qkv()
        compiled = torch.compile(
            lambda q, k, v: tritium.attention_forward(q, k, v), backend=aot_autograd(fw_compiler=keep), fullgraph=True
        )
        with torch.inference_mode():
            compiled(q, k, v)
            before = len(asked)
            compiled(q, k, v)
        assert len(asked) == before > 0
        targets = {str(node.target) for node in graphs[0].graph.nodes}
        assert "aten.bmm.default" in targets
        assert not any("tritium" in target for target in targets)

    def test_what_was_compiled_for_another_choice_is_not_found(self, monkeypatch):
        """The graph that Dynamo traces is what compiled code is found by: it must differ where the choice may."""
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
        before = choice.identity()
        tritium.attention_forward(q, k, v)
        assert [len(names) for names in traced] == [1, 1, 1]
        assert traced[0] == traced[2] != traced[1]
        # A new measurement counts as well.
        assert choice.identity() != before

    def test_an_opaque_candidate_stays_one_operator(self, monkeypatch):
        known = {**entries.candidates()}
        known["mine"] = entries.Candidate("mine", attention_math, lambda request: None, opaque=True)
        for module in (choice, entries):
            monkeypatch.setattr(module, "candidates", lambda: known)
        from tritium.layers.attention import operator

        monkeypatch.setattr(operator, "candidates", lambda: known)

        def function(q, k, v):
            return tritium.attention_forward(q, k, v, opt_mode="manual", op_type="mine")

        q, k, v = qkv()
        compiled = torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=True)
        with torch.inference_mode():
            torch.testing.assert_close(compiled(q, k, v), function(q, k, v))

    def test_an_opaque_candidate_is_called_by_itself_where_nobody_watches(self, monkeypatch):
        """An operator costs the host more than a small attention costs a GPU. Modes and transforms see it all the same."""
        known = {**entries.candidates()}
        known["mine"] = entries.Candidate("mine", attention_math, lambda request: None, opaque=True)
        from tritium.layers.attention import operator

        for module in (choice, entries, operator):
            monkeypatch.setattr(module, "candidates", lambda: known)
        met = []

        class Watching(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                met.append(func)
                return func(*args, **(kwargs or {}))

        def function(q, k, v):
            return tritium.attention_forward(q, k, v, opt_mode="manual", op_type="mine")

        by = torch.ops.tritium.attention_by.default
        q, k, v = qkv()
        with torch.inference_mode():
            alone = function(q, k, v)
            with torch.profiler.profile() as profiler:
                again = function(q, k, v)
            with Watching():
                watched = function(q, k, v)
        assert not any("attention_by" in event.name for event in profiler.events())
        assert by in met
        assert torch.equal(alone, again)
        assert torch.equal(alone, watched)
        several = torch.vmap(function)(*(t.unsqueeze(0).expand(2, *t.shape) for t in (q, k, v)))
        torch.testing.assert_close(several, torch.stack([alone, alone]))

    def test_what_is_named_is_found_again(self, monkeypatch):
        q, k, v = qkv()
        with torch.inference_mode():
            first = tritium.attention_forward(q, k, v, opt_mode="manual", op_type="math")
            other = tritium.attention_forward(q, k, v, opt_mode="manual", op_type="chunked")
            monkeypatch.setattr(choice, "_named", None)
            # Known by now: nothing is chosen again, and names are not mistaken for each other.
            assert torch.equal(tritium.attention_forward(q, k, v, opt_mode="manual", op_type="math"), first)
            assert torch.equal(tritium.attention_forward(q, k, v, opt_mode="manual", op_type="chunked"), other)
            names = [candidate.name for candidate in choice._CALLS.values()]
            with pytest.raises(TypeError):
                tritium.attention_forward(q, k, v, opt_mode="manual", op_type="sdpa")
        assert {"math", "chunked"} <= set(names)

    def test_pytorch_s_own_check_of_the_opaque_operator(self):
        q, k, v = (t.transpose(1, 2) for t in qkv())
        by = torch.ops.tritium.attention_by.default
        torch.library.opcheck(by, (q, k, v, None, 0.5, True), {"candidate": "chunked"})

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


class TestScales:
    @pytest.mark.parametrize("scale", [-0.4, 0.0])
    @pytest.mark.parametrize("causal", [False, True])
    @pytest.mark.parametrize("options", [{}, {"opt_mode": "static"}, {"opt_mode": "manual", "op_type": "sdpa"}])
    def test_not_above_zero(self, scale, causal, options):
        """Kernels hide keys before they multiply: with a negative scale what is hidden would be all that is seen."""
        q, k, v = qkv(33, 33)
        out = tritium.attention_forward(q, k, v, scale=scale, is_causal=causal, **options)
        exact = exact_of(q, k, v, scale=scale, causal=causal)
        assert_no_worse(out, exact.float(), exact)


class TestFiles:
    """A folder that cannot be written, and tables that somebody has edited, cost a measurement and no more."""

    def test_a_folder_that_cannot_be_made(self, monkeypatch, tmp_path):
        (tmp_path / "file").touch()
        monkeypatch.setattr(tuning.tables, "user_folder", lambda: tmp_path / "file" / "tuned")
        q, k, v = qkv(7, 7)
        with pytest.warns(RuntimeWarning, match="cannot be kept for the next process"):
            tritium.attention_forward(q, k, v)

    def test_bytes_that_are_no_text(self, tmp_path):
        (tmp_path / "attention-other.json").write_bytes(b"\xff\xfe\x00bad")
        q, k, v = qkv(7, 7)
        compiled = torch.compile(tritium.attention_forward, fullgraph=True, backend="aot_eager")
        assert compiled(q, k, v).isfinite().all()

    @pytest.mark.parametrize(
        "change", [{"versions": None}, {"ms": None}, {"ms": {"sdpa": None}}, {"winner": ["x"]}, {"key": 3}, {"more": 1}]
    )
    def test_a_row_of_other_types_is_left_out(self, change):
        q, k, v = qkv(7, 7)
        tritium.attention_forward(q, k, v)
        (file,) = tuning.tables.user_folder().glob("attention-*.json")
        content = json.loads(file.read_text())
        (row,) = content["rows"]
        good = row | {"key": "another"}
        file.write_text(json.dumps(content | {"rows": [row | change, good]}))
        assert list(table.read(file)) == ["another"]
        choice.forget()
        assert tritium.attention_forward(q, k, v).isfinite().all()


def test_flex_and_causality_in_a_graph():
    q, k, v = qkv(40, 40)

    def function(q, k, v):
        return tritium.attention_forward(q, k, v, opt_mode="manual", op_type="flex", is_causal=True)

    out = torch.compile(function, fullgraph=True, backend="aot_eager")(q, k, v)
    exact = exact_of(q, k, v, causal=True)
    assert_no_worse(out, exact.float(), exact)


@pytest.mark.parametrize(
    ("tensors", "options", "error", "words"),
    [
        (torch.ones(1, 7, 2, 16).to(torch.float8_e4m3fn), {}, ArgumentTypeError, "floating-point dtype"),
        (torch.ones(1, 7, 2, 16), {"opt_mode": "manual", "op_type": ["sdpa"]}, ArgumentTypeError, "must be a name"),
    ],
)
def test_types_that_nothing_computes(tensors, options, error, words):
    with pytest.raises(error, match=words):
        tritium.attention_forward(tensors, tensors, tensors, **options)


def test_keys_without_heads():
    q, k, v = qkv(7, 7)
    with pytest.raises(ArgumentError, match="a multiple of the key's"):
        tritium.attention_forward(q, k[:, :, :0], v[:, :, :0], enable_gqa=True)
