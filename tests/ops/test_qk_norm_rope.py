"""`qk_norm_rope` beyond the contract: what it replaces, what belongs to which part, and the code of its kernel."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounterWithBackend

from tritium import device, envs, ops
from tritium.ops import qk_norm_rope, rope

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
    @settings(max_examples=60)
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


def declined(**made):
    return qk_norm_rope.decline_triton(qk_norm_rope.OP.bind(**made))


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
        assert declined(**made) is None
        tables = {"tables": [t.float() for t in made["tables"]], "sines": [t.float() for t in made["sines"]]}
        assert declined(**made | tables) is None
        numbers = torch.view_as_complex(random(1, 7, 4, 2).float())
        assert declined(**made | {"rope": "complex", "tables": [numbers], "sines": [None]}) is None

    def test_three_parts(self, made):
        three = {k: [*v, v[0]] if isinstance(v, list) else v for k, v in made.items()}
        assert "two parts" in declined(**three)

    @pytest.mark.parametrize("name", ["q", "k", "q_weights", "k_weights", "tables", "sines"])
    def test_float64_or_a_dtype_of_its_own(self, made, name):
        assert "float64" in declined(**made | {name: [t.double() for t in made[name]]})
        assert "one dtype" in declined(**made | {name: [made[name][0], made[name][1].half()]})

    def test_complex128(self, made):
        numbers = torch.view_as_complex(random(1, 7, 4, 2))
        reason = declined(**made | {"rope": "complex", "tables": [numbers], "sines": [None]})
        assert "float64" in reason

    def test_some_weights(self, made):
        assert "weight" in declined(**made | {"q_weights": [made["q_weights"][0], None]})

    def test_heads_that_differ_or_are_odd_or_wide(self, made):
        assert "width" in declined(**made | {"k": [x[..., :6] for x in made["k"]]})
        odd = {"q": [x[..., :7] for x in made["q"]], "k": [x[..., :7] for x in made["k"]]}
        assert "width" in declined(**made | odd)
        many = {"q": [x[:, :, :1].expand(-1, -1, 5000, -1) for x in made["q"]]}
        assert "32,768" in declined(**made | many)

    def test_tables_of_another_width(self, made):
        one = {"tables": [t[..., :1] for t in made["tables"]], "sines": [t[..., :1] for t in made["sines"]]}
        assert "4 or 8 numbers" in declined(**made | one)
        mixed = {"tables": [made["tables"][0], made["tables"][1][..., :4]]}
        assert "the same for all parts" in declined(**made | mixed)


class TestLaunch:
    @given(heads=st.integers(1, 256), width=st.integers(1, 128).map(lambda n: 2 * n), halves=st.booleans())
    def test_every_head_is_taken_and_no_round_is_empty(self, heads, width, halves):
        options, _ = qk_norm_rope.launch_options(heads, width, 2, halves=halves)
        assert options["ROUNDS"] * options["HEADS"] >= heads > (options["ROUNDS"] - 1) * options["HEADS"]
        assert options["HEADS"].bit_count() == 1

    @pytest.mark.parametrize(
        ("heads", "width", "halves"), [(24, 128, False), (38, 64, False), (40, 128, False), (24, 128, True)]
    )
    def test_a_load_is_16_bytes_a_thread(self, heads, width, halves):
        cut, options = qk_norm_rope.launch_options(heads, width, 2, halves=halves)
        numbers = cut["HEADS"] * width // (2 if halves else 1)
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
        constant |= {name for name, value in values.items() if value is None or (isinstance(value, int) and value == 1)}
        types, attributes = {}, {}
        for place, name in enumerate(kernel.arg_names):
            value = values[name]
            is_tensor = isinstance(value, torch.Tensor)
            types[name] = f"*{TYPES[value.dtype]}" if is_tensor else "i32"
            if name in constant:
                types[name] = "constexpr"
            elif is_tensor or (isinstance(value, int) and value % 16 == 0):
                attributes[(place,)] = [["tt.divisibility", 16]]
        places = {(kernel.arg_names.index(name),): values[name] for name in constant}
        source = ASTSource(kernel, signature=types, constexprs=places, attrs=attributes)
        made.append(triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm)

    monkeypatch.setattr(triton.JITFunction, "run", compile_instead)
    [sample] = [s for s in qk_norm_rope.OP.samples(torch.bfloat16, "cpu") if s.label == label]
    qk_norm_rope.run_triton(qk_norm_rope.OP.bind(**sample.arguments))
    [code] = made
    assert "convert_layout" not in code["ttgir"]
    accesses = [line for line in code["ptx"].splitlines() if "ld.global" in line or "st.global" in line]
    assert accesses
    assert all(".v4.b32" in line for line in accesses), accesses
