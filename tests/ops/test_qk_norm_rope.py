"""`qk_norm_rope` beyond the contract: what it replaces, what belongs to which part, and the code of its kernel."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounterWithBackend

from fidelity import assert_no_worse
from tritium import device, envs, ops
from tritium.ops import cpp, qk_norm_rope, rope

EPS = 1e-6


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def arguments(tokens, heads, width, norm, mode, *, batch=2, k_heads=None, table_width=None, heads_first=False):
    """Arguments in float64, so that results can be compared to the last digits."""

    def weights(heads, seed):
        size = heads * width if norm == "row" else width
        return [None if norm == "none" else random(size, seed=seed + i) for i in range(len(tokens))]

    def table(i, seed):
        if mode == "none" or (mode == "complex" and seed == 30):
            return None
        if mode == "complex":
            return torch.view_as_complex(random(1, tokens[i], width // 2, 2, seed=seed + i))
        return random(1, tokens[i], table_width or width, seed=seed + i)

    return {
        "q": [random(batch, n, heads, width, seed=i) for i, n in enumerate(tokens)],
        "k": [random(batch, n, k_heads or heads, width, seed=5 + i) for i, n in enumerate(tokens)],
        "q_weights": weights(heads, 10),
        "k_weights": weights(k_heads or heads, 15),
        "tables": [table(i, 20) for i in range(len(tokens))],
        "sines": [table(i, 30) for i in range(len(tokens))],
        "eps": EPS,
        "norm": norm,
        "rope": mode,
        "heads_first": heads_first,
    }


def as_models_write_it(given, name):
    """One of q and k: F.rms_norm, the op `rope`, torch.cat and a transpose."""
    done = []
    for x, weight, table, sine in zip(
        given[name], given[f"{name}_weights"], given["tables"], given["sines"], strict=True
    ):
        value = x
        if given["norm"] == "row":
            flat = x.flatten(2)
            value = F.rms_norm(flat, flat.shape[-1:], weight, EPS).view_as(x)
        elif given["norm"] == "head":
            value = F.rms_norm(x, x.shape[-1:], weight, EPS)
        if table is not None:
            sine = None if sine is None else sine.unsqueeze(2)
            value = rope.reference(value, table.unsqueeze(2), sine, given["rope"], False, None)
        done.append(value)
    out = torch.cat(done, 1)
    return out.transpose(1, 2) if given["heads_first"] else out


class TestMeaning:
    @settings(deadline=None, max_examples=60)
    @given(
        tokens=st.lists(st.integers(0, 5), min_size=1, max_size=3),
        heads=st.integers(1, 4),
        k_heads=st.integers(1, 4),
        pairs=st.integers(1, 7),
        norm=st.sampled_from(qk_norm_rope.NORMS),
        mode=st.sampled_from(qk_norm_rope.ROPES),
        one_a_pair=st.booleans(),
        heads_first=st.booleans(),
    )
    def test_equals_what_it_replaces(self, tokens, heads, k_heads, pairs, norm, mode, one_a_pair, heads_first):
        width = 2 * pairs
        table_width = pairs if one_a_pair else width
        made = arguments(
            tokens, heads, width, norm, mode, k_heads=k_heads, table_width=table_width, heads_first=heads_first
        )
        for result, name in zip(qk_norm_rope.reference(**made), ("q", "k"), strict=True):
            torch.testing.assert_close(result, as_models_write_it(made, name), rtol=1e-12, atol=1e-12)

    def test_pairs_are_multiplied_with_complex_numbers(self):
        made = arguments([3], 2, 8, "none", "complex")
        q, _ = qk_norm_rope.reference(**made)
        numbers = torch.view_as_complex(made["q"][0].unflatten(-1, (-1, 2)))
        turned = torch.view_as_real(numbers * made["tables"][0].unsqueeze(2)).flatten(3)
        torch.testing.assert_close(q, turned)

    @pytest.mark.parametrize("mode", ["interleaved", "half"])
    def test_a_rotation_keeps_the_length_of_pairs(self, mode):
        made = arguments([3, 4], 2, 12, "none", mode, table_width=6)
        angles = made["tables"]
        made |= {"tables": [a.cos() for a in angles], "sines": [a.sin() for a in angles]}
        q, _ = qk_norm_rope.reference(**made)
        before = torch.cat(made["q"], 1)

        def lengths(x):
            return (x.unflatten(-1, (-1, 2)) if mode == "interleaved" else x.unflatten(-1, (2, -1)).mT).norm(dim=-1)

        assert not torch.allclose(q, before)
        torch.testing.assert_close(lengths(q), lengths(before))

    def test_each_part_has_its_own_weight_and_table(self):
        made = arguments([3, 4], 2, 8, "head", "interleaved")
        before, _ = qk_norm_rope.reference(**made)
        for name in ("q_weights", "tables", "sines"):
            after, _ = qk_norm_rope.reference(**made | {name: [made[name][0], -made[name][1]]})
            assert torch.equal(after[:, :3], before[:, :3]), name
            assert not torch.isclose(after[:, 3:], before[:, 3:]).all(-1).any(), name

    def test_a_part_without_a_table_is_only_normed(self):
        made = arguments([3, 4], 2, 8, "head", "half")
        made |= {"tables": [made["tables"][0], None], "sines": [made["sines"][0], None]}
        q, _ = qk_norm_rope.reference(**made)
        normed = F.rms_norm(made["q"][1], (8,), made["q_weights"][1], EPS)
        torch.testing.assert_close(q[:, 3:], normed)

    @pytest.mark.parametrize("mode", ["interleaved", "complex"])
    def test_one_table_may_hold_all_tokens(self, mode):
        made = arguments([3, 4], 2, 8, "head", mode)
        whole = {"tables": [torch.cat(made["tables"], 1)], "sines": [None]}
        if mode != "complex":
            whole["sines"] = [torch.cat(made["sines"], 1)]
        for one, two in zip(qk_norm_rope.reference(**made | whole), qk_norm_rope.reference(**made), strict=True):
            assert torch.equal(one, two)

    @pytest.mark.parametrize("mode", qk_norm_rope.ROPES)
    def test_compiles_as_one_graph(self, mode):
        """Otherwise nobody could compare the kernels with what Inductor makes of it."""
        made = arguments([3, 4], 2, 8, "head", mode)
        compiled = torch.compile(qk_norm_rope.reference, fullgraph=True, backend="eager")
        for one, two in zip(compiled(**made), qk_norm_rope.reference(**made), strict=True):
            torch.testing.assert_close(one, two)

    @pytest.mark.parametrize("wrong", [{"norm": "layer"}, {"rope": "matrix"}])
    def test_an_unknown_form_is_an_error(self, wrong):
        with pytest.raises(ValueError, match=next(iter(wrong.values()))):
            qk_norm_rope.reference(**arguments([3], 2, 8, "head", "interleaved") | wrong)


def test_any_number_of_tokens_without_compiling_again():
    ops.catalog()
    counter = CompileCounterWithBackend("aot_eager")

    @torch.compile(fullgraph=True, backend=counter, dynamic=True)
    def attended(*tensors):
        # Numbers written here: a float from elsewhere is an input, which Dynamo compiles twice for.
        form = (1e-6, "head", "interleaved", True)
        return torch.ops.tritium.qk_norm_rope.default(*tensors, *form, provider="reference")

    for tokens in ([3, 4], [5, 9], [11, 6]):
        made = arguments(tokens, 2, 8, "head", "interleaved", heads_first=True)
        tensors = [value for value in made.values() if isinstance(value, list)]
        for result, name in zip(attended(*tensors), ("q", "k"), strict=True):
            torch.testing.assert_close(result, as_models_write_it(made, name), rtol=1e-12, atol=1e-12)
            assert result.is_contiguous()
    assert counter.frame_count == 1


def narrowed(made, dtypes):
    """The same arguments with parts, weights and tables in other dtypes."""
    groups = {"q": 0, "k": 0, "q_weights": 1, "k_weights": 1, "tables": 2, "sines": 2}

    def cast(tensor, dtype):
        if tensor is None:
            return None
        return tensor.to(torch.complex64 if tensor.is_complex() else dtype)

    return made | {name: [cast(t, dtypes[group]) for t in made[name]] for name, group in groups.items()}


def widened(made):
    def wide(tensor):
        return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)

    return {
        name: [None if t is None else wide(t) for t in value] if isinstance(value, list) else value
        for name, value in made.items()
    }


def by_cpu(made):
    results = ops.catalog()["qk_norm_rope"].overload(*made.values(), provider="cpu")
    assert not ops.failed_providers()
    return results


@pytest.mark.skipif(cpp.cannot_run() is not None, reason=str(cpp.cannot_run()))
class TestCpu:
    @settings(deadline=None, max_examples=200)
    @given(
        tokens=st.lists(st.integers(0, 5), min_size=1, max_size=2),
        heads=st.integers(1, 4),
        k_heads=st.integers(1, 4),
        pairs=st.integers(1, 37),
        norm=st.sampled_from(qk_norm_rope.NORMS),
        mode=st.sampled_from(qk_norm_rope.ROPES),
        one_a_pair=st.booleans(),
        heads_first=st.booleans(),
        unturned=st.integers(0, 2),
        together=st.booleans(),
        dtypes=st.lists(st.sampled_from([torch.float32, torch.bfloat16]), min_size=3, max_size=3),
    )
    def test_any_form(
        self, tokens, heads, k_heads, pairs, norm, mode, one_a_pair, heads_first, unturned, together, dtypes
    ):
        table_width = pairs if one_a_pair else 2 * pairs
        made = arguments(
            tokens, heads, 2 * pairs, norm, mode, k_heads=k_heads, table_width=table_width, heads_first=heads_first
        )
        for name in ("tables", "sines"):
            if together:
                made[name] = [None if made[name][0] is None else torch.cat(made[name], 1)]
            elif unturned < len(tokens):
                made[name][unturned] = None
        made = narrowed(made, dtypes)
        assert qk_norm_rope.decline_cpu(**made) is None
        exact = qk_norm_rope.reference(**widened(made))
        for actual, plain, truth in zip(by_cpu(made), qk_norm_rope.reference(**made), exact, strict=True):
            assert actual.is_contiguous()
            assert_no_worse(actual, plain, truth)

    @pytest.mark.parametrize("threads", [1, 2, 3, 5])
    @pytest.mark.parametrize("mode", qk_norm_rope.ROPES)
    def test_any_number_of_threads_gives_the_same(self, threads, mode):
        made = narrowed(arguments([13, 60], 5, 128, "head", mode), [torch.float32] * 3)
        before = torch.get_num_threads()
        try:
            torch.set_num_threads(threads)
            results = by_cpu(made)
            torch.set_num_threads(1)
            assert all(map(torch.equal, results, by_cpu(made)))
        finally:
            torch.set_num_threads(before)

    @pytest.mark.parametrize("norm", ["head", "row"])
    @pytest.mark.parametrize("value", [float("nan"), float("inf")])
    def test_one_bad_number_spoils_what_is_normed_with_it_alone(self, norm, value):
        made = narrowed(arguments([3, 4], 5, 64, norm, "interleaved"), [torch.float32] * 3)
        good, same = by_cpu(made)
        made["q"][1][1, 2, 3, 7] = value
        q, k = by_cpu(made)
        assert torch.equal(k, same)
        spoiled = torch.zeros(2, 7, 5, dtype=torch.bool)
        spoiled[1, 5, 3 if norm == "head" else slice(None)] = True
        assert torch.equal(q[~spoiled], good[~spoiled])
        torch.testing.assert_close(q, qk_norm_rope.reference(**made)[0], equal_nan=True)

    def test_some_weights(self):
        made = narrowed(arguments([3, 4], 2, 8, "head", "interleaved"), [torch.float32] * 3)
        made["q_weights"][0] = None
        assert qk_norm_rope.decline_cpu(**made) is None
        for actual, plain in zip(by_cpu(made), qk_norm_rope.reference(**made), strict=True):
            torch.testing.assert_close(actual, plain)

    def test_declines_what_it_cannot_read(self):
        made = narrowed(arguments([3, 4], 2, 8, "head", "interleaved"), [torch.float32] * 3)
        decline = qk_norm_rope.decline_cpu
        for group in range(3):
            dtypes = [torch.float16 if group == index else torch.float32 for index in range(3)]
            said = "the kernel reads and writes float32 and bfloat16, not torch.float16"
            assert decline(**narrowed(made, dtypes)) == said
        assert "two parts" in decline(**{k: [*v, v[0]] if isinstance(v, list) else v for k, v in made.items()})
        odd = {"q": [x[..., :7] for x in made["q"]], "k": [x[..., :7] for x in made["k"]]}
        assert "even width" in decline(**made | odd)
        assert "runs on meta" in decline(**made | {"k": [x.to("meta") for x in made["k"]]})


class TestDecline:
    @pytest.fixture(autouse=True)
    def _willing(self, monkeypatch):
        monkeypatch.setattr(envs, "triton_interpreted", lambda: True)
        monkeypatch.setattr(device, "has_triton", lambda: True)

    @pytest.fixture
    def made(self):
        """Two parts in bfloat16 that the kernel takes."""
        made = arguments([3, 4], 2, 8, "head", "interleaved")
        return {k: [t.bfloat16() for t in v] if isinstance(v, list) else v for k, v in made.items()}

    def test_takes_what_models_have(self, made):
        assert qk_norm_rope.decline_triton(**made) is None
        tables = {"tables": [t.float() for t in made["tables"]], "sines": [t.float() for t in made["sines"]]}
        assert qk_norm_rope.decline_triton(**made | tables) is None
        numbers = torch.view_as_complex(random(1, 7, 4, 2).float())
        assert qk_norm_rope.decline_triton(**made | {"rope": "complex", "tables": [numbers], "sines": [None]}) is None

    def test_three_parts(self, made):
        three = {k: [*v, v[0]] if isinstance(v, list) else v for k, v in made.items()}
        assert "two parts" in qk_norm_rope.decline_triton(**three)

    @pytest.mark.parametrize("name", ["q", "k", "q_weights", "k_weights", "tables", "sines"])
    def test_float64_or_a_dtype_of_its_own(self, made, name):
        assert "float64" in qk_norm_rope.decline_triton(**made | {name: [t.double() for t in made[name]]})
        assert "one dtype" in qk_norm_rope.decline_triton(**made | {name: [made[name][0], made[name][1].half()]})

    def test_complex128(self, made):
        numbers = torch.view_as_complex(random(1, 7, 4, 2))
        reason = qk_norm_rope.decline_triton(**made | {"rope": "complex", "tables": [numbers], "sines": [None]})
        assert "float64" in reason

    def test_some_weights(self, made):
        assert "weight" in qk_norm_rope.decline_triton(**made | {"q_weights": [made["q_weights"][0], None]})

    def test_heads_that_differ_or_are_odd_or_wide(self, made):
        assert "width" in qk_norm_rope.decline_triton(**made | {"k": [x[..., :6] for x in made["k"]]})
        odd = {"q": [x[..., :7] for x in made["q"]], "k": [x[..., :7] for x in made["k"]]}
        assert "width" in qk_norm_rope.decline_triton(**made | odd)
        many = {"q": [x[:, :, :1].expand(-1, -1, 5000, -1) for x in made["q"]]}
        assert "32,768" in qk_norm_rope.decline_triton(**made | many)

    def test_tables_of_another_width(self, made):
        one = {"tables": [t[..., :1] for t in made["tables"]], "sines": [t[..., :1] for t in made["sines"]]}
        assert "4 or 8 numbers" in qk_norm_rope.decline_triton(**made | one)
        mixed = {"tables": [made["tables"][0], made["tables"][1][..., :4]]}
        assert "the same for all parts" in qk_norm_rope.decline_triton(**made | mixed)


class TestLaunch:
    @settings(deadline=None)
    @given(heads=st.integers(1, 256), width=st.integers(1, 128).map(lambda n: 2 * n), halves=st.booleans())
    def test_every_head_is_taken_and_no_round_is_empty(self, heads, width, halves):
        options = qk_norm_rope.launch_options(heads, width, 2, halves=halves)
        assert options["ROUNDS"] * options["HEADS"] >= heads > (options["ROUNDS"] - 1) * options["HEADS"]
        assert options["HEADS"].bit_count() == 1

    @pytest.mark.parametrize(
        ("heads", "width", "halves"), [(24, 128, False), (38, 64, False), (40, 128, False), (24, 128, True)]
    )
    def test_a_load_is_16_bytes_a_thread(self, heads, width, halves):
        options = qk_norm_rope.launch_options(heads, width, 2, halves=halves)
        numbers = options["HEADS"] * width // (2 if halves else 1)
        assert numbers * 2 == 16 * 32 * options["num_warps"]


TYPES = {torch.bfloat16: "bf16", torch.float32: "fp32"}


@pytest.mark.skipif(not device.has_triton(), reason="triton is not installed")
@pytest.mark.parametrize(
    "label", ["FLUX", "Qwen-Image", "SD3: no rotation", "Wan", "half, heads of 128", "interleaved, heads of 72"]
)
def test_numbers_stay_in_registers(label, monkeypatch):
    """The code for an sm_90 reads and writes 16 bytes at a time, and changes no layout through shared memory."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    made = []

    def compile_instead(kernel, *given, grid, warmup, **options):
        values = dict(zip(kernel.arg_names, given, strict=False))
        values |= {name: options.pop(name) for name in list(options) if name in kernel.arg_names}
        # What the launcher says of its arguments: which are one, and which a multiple of 16.
        constant = {param.name for param in kernel.params if param.is_constexpr}
        constant |= {name for name, value in values.items() if isinstance(value, int) and value == 1}
        types, attributes = {}, {}
        for place, name in enumerate(kernel.arg_names):
            value = values[name]
            is_tensor = isinstance(value, torch.Tensor)
            types[name] = f"*{TYPES[value.dtype]}" if is_tensor else "fp32" if isinstance(value, float) else "i32"
            if name in constant:
                types[name] = "constexpr"
            elif is_tensor or (isinstance(value, int) and value % 16 == 0):
                attributes[(place,)] = [["tt.divisibility", 16]]
        places = {(kernel.arg_names.index(name),): values[name] for name in constant}
        source = ASTSource(kernel, signature=types, constexprs=places, attrs=attributes)
        made.append(triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm)

    monkeypatch.setattr(triton.JITFunction, "run", compile_instead)
    [sample] = [s for s in qk_norm_rope.samples(torch.bfloat16, "cpu") if s.label == label]
    qk_norm_rope.run_triton(**sample.arguments)
    [code] = made
    assert "convert_layout" not in code["ttgir"]
    accesses = [line for line in code["ptx"].splitlines() if "ld.global" in line or "st.global" in line]
    assert accesses
    assert all(".v4.b32" in line for line in accesses), accesses
