"""`qk_norm_rope` beyond the contract: what it replaces, what belongs to which part, and the code of its kernel."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounterWithBackend

from support.hopper import compile_instead_of_launching
from tritium import device, envs, ops
from tritium.ops import qk_norm_rope, rope
from tritium.ops.op import draw_from
from tritium.ops.qk_norm_rope.reference import arguments as draw_arguments

EPS = 1e-6


def arguments(tokens, heads, width, norm, mode, **options):
    """Arguments in float64, so that results can be compared to the last digits."""
    draw, options = draw_from(torch.float64, "cpu"), {"batch": 2, "table_dtype": torch.float64, **options}
    options |= {"weighted": norm != "none", "rotated": [True] * 3}
    return draw_arguments(draw, tokens, heads, width, norm, mode, **options)


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
        options = {"k_heads": k_heads, "table_width": pairs if one_a_pair else None, "heads_first": heads_first}
        made = arguments(tokens, heads, 2 * pairs, norm, mode, **options)
        for result, name in zip(qk_norm_rope.reference(**made), ("q", "k"), strict=True):
            torch.testing.assert_close(result, as_models_write_it(made, name), rtol=1e-12, atol=1e-12)

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
        numbers = {"rope": "complex", "tables": [torch.randn(1, 7, 4, dtype=torch.complex64)], "sines": [None]}
        assert declined(**made | numbers) is None
        assert "float64" in declined(**made | numbers | {"tables": [numbers["tables"][0].to(torch.complex128)]})

    @pytest.mark.parametrize("name", ["q", "k", "q_weights", "k_weights", "tables", "sines"])
    def test_float64_or_a_dtype_of_its_own(self, made, name):
        assert "float64" in declined(**made | {name: [t.double() for t in made[name]]})
        assert "one dtype" in declined(**made | {name: [made[name][0], made[name][1].half()]})

    @pytest.mark.parametrize(
        ("names", "change", "reason"),
        [
            (("q", "k", "q_weights", "k_weights", "tables", "sines"), lambda parts: [*parts, parts[0]], "two parts"),
            (("q_weights",), lambda parts: [parts[0], None], "weight"),
            (("k",), lambda parts: [x[..., :6] for x in parts], "width"),
            (("q", "k"), lambda parts: [x[..., :7] for x in parts], "width"),
            (("q",), lambda parts: [x[:, :, :1].expand(-1, -1, 5000, -1) for x in parts], "32,768"),
            (("tables", "sines"), lambda parts: [t[..., :1] for t in parts], "4 or 8 numbers"),
            (("tables",), lambda parts: [parts[0], parts[1][..., :4]], "the same for all parts"),
        ],
    )
    def test_forms_that_the_kernel_does_not_have(self, made, names, change, reason):
        assert reason in declined(**made | {name: change(made[name]) for name in names})


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


@pytest.mark.skipif(not device.has_triton(), reason="triton is not installed")
@pytest.mark.parametrize(
    "label", ["FLUX", "Qwen-Image", "SD3: no rotation", "Wan", "half, heads of 128", "interleaved, heads of 72"]
)
def test_numbers_stay_in_registers(label, monkeypatch):
    """The code for an sm_90 reads and writes 16 bytes at a time, and changes no layout through shared memory."""
    made = compile_instead_of_launching(monkeypatch)
    [sample] = [s for s in qk_norm_rope.OP.samples(torch.bfloat16, "cpu") if s.label == label]
    qk_norm_rope.run_triton(qk_norm_rope.OP.bind(**sample.arguments))
    [code] = made.values()
    assert "convert_layout" not in code["ttgir"]
    accesses = [line for line in code["ptx"].splitlines() if "ld.global" in line or "st.global" in line]
    assert accesses
    assert all(".v4.b32" in line for line in accesses), accesses
