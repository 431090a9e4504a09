"""32-bit index arithmetic: only where every result is proven to fit. One test for each way it could be unsound."""

import ast
import itertools
import textwrap

import numpy as np
import pytest
import sympy
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import tritium
from tiling.generated import generate, triton_on_cpu
from tritium import compat
from tritium.tiling.narrow import LARGEST, Bounds, Facts, narrow

H, W, N = sympy.symbols("H W N", integer=True, positive=True)


def facts(**changes):
    """A kernel over 96 padded images of H x W that reads them unpadded."""
    known = {
        "sizes": {"ks0": W + 2, "ks1": H + 2, "ks2": W, "ks3": H},
        "extents": {
            "xindex": 96 * (H + 2) * (W + 2),
            "x0": W + 2,
            "x1": H + 2,
            "x2": sympy.Integer(96),
        },
        "limits": [96 * (H + 2) * (W + 2), 96 * H * W],
        "least": {H: 2, W: 2}.get,
    }
    return Facts(**{**known, **changes})


def kernel(*lines: str) -> str:
    body = textwrap.indent("\n".join(lines), "    ")
    return f"import triton\n\n@triton.jit\ndef Placeholder.KERNEL_NAME(in_ptr0, out_ptr0, ks0, ks1):\n{body}\n"


def body_of(source: str) -> list[str]:
    lines = source.split("\n")
    start = next(number for number, line in enumerate(lines) if line.startswith("def "))
    return [line.strip() for line in lines[start + 1 :] if line.strip()]


def test_a_padding_kernel_becomes_narrow():
    source = kernel(
        "x0 = (xindex % ks0)",
        "x1 = ((xindex // ks0) % ks1)",
        "x2 = xindex // (ks0*ks1)",
        "tmp0 = tl.load(in_ptr0 + ((-1) + x0 + ((-1)*ks2) + ks2*x1 + ks2*ks3*x2), xmask)",
    )
    done = narrow(source, facts())
    assert body_of(done.source) == [
        "ks0_i32 = ks0.to(tl.int32)",
        "ks1_i32 = ks1.to(tl.int32)",
        "ks2_i32 = ks2.to(tl.int32)",
        "ks3_i32 = ks3.to(tl.int32)",
        "x0 = (xindex % ks0_i32)",
        "x1 = ((xindex // ks0_i32) % ks1_i32)",
        "x2 = xindex // (ks0_i32*ks1_i32)",
        "tmp0 = tl.load(in_ptr0 + ((-1) + x0 + ((-1)*ks2_i32) + ks2_i32*x1 + ks2_i32*ks3_i32*x2), xmask)",
    ]
    assert (done.narrow, done.wide) == (4, 0)


@pytest.mark.parametrize(
    "lines",
    [
        ["x0 = (xindex % 64)"],
        # The mean over H and W divides by their product: a value, whatever its bound is.
        ["tmp1 = ks2*ks3", "tmp2 = tmp1.to(tl.float32)", "tmp3 = (ks2*ks3).to(tl.float32)"],
        # The result is at most W, but 96 * 96 * W * H on the way is not bounded by anything.
        ["x0 = ((9216*ks2*ks3) // (9216*ks3)) % ks0"],
        [f"x0 = (xindex % ks0) % {LARGEST + 1}"],
        [f"x0 = (xindex % ks0) % {2**40}"],
        # A variable is narrow only if all of its definitions are.
        ["for r0_offset in tl.range(0, 8):", "    x0 = (xindex % ks0)", "x0 = (xindex % (ks0*ks1*ks2*ks3))"],
    ],
)
def test_kernels_that_stay_wide(lines):
    assert narrow(kernel(*lines), facts()).source == kernel(*lines)


def test_text_without_sizes_or_without_a_kernel_does_not_change():
    source = kernel("x0 = (xindex % ks0)")
    assert narrow(source, facts(sizes={})).source == source
    assert narrow("no kernel here", facts()).source == "no kernel here"


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        # A narrow index that is used as a value is widened again.
        (
            ["x0 = (xindex % ks0)", "tmp0 = x0", "tmp1 = x0 * 100000 + tmp9"],
            ["x0 = (xindex % ks0_i32)", "tmp0 = x0.to(tl.int64)", "tmp1 = x0.to(tl.int64) * 100000 + tmp9"],
        ),
        # An index that was loaded from memory has no bound.
        (
            ["x1 = ((xindex // ks0) % ks1)", "tmp0 = tl.load(in_ptr0 + (tmp8 + ks2*x1), xmask)"],
            ["tmp0 = tl.load(in_ptr0 + (tmp8 + ks2*x1.to(tl.int64)), xmask)"],
        ),
        # Masks keep their width.
        (
            ["x0 = (xindex % ks0)", "tmp1 = x0 < ks2", "tmp2 = tl.load(in_ptr0 + (x0), tmp1 & (x0 < ks3))"],
            ["tmp1 = x0.to(tl.int64) < ks2", "tmp2 = tl.load(in_ptr0 + (x0), tmp1 & (x0.to(tl.int64) < ks3))"],
        ),
        (
            ["for r0_offset in tl.range(0, 8):", "    x0 = (xindex % ks0)", "    tmp0 = tl.load(in_ptr0 + (x0))"],
            ["x0 = (xindex % ks0_i32)", "tmp0 = tl.load(in_ptr0 + (x0))"],
        ),
    ],
)
def test_parts_of_kernels(lines, expected):
    assert body_of(narrow(kernel(*lines), facts()).source)[-len(expected) :] == expected


def test_a_product_without_a_guard_stays_wide():
    """N x W may exceed 2^31 - 1 though no buffer does: the divisor would be another number."""
    unbounded = facts(sizes={"ks0": W, "ks1": N}, least={W: 2, N: 2}.get)
    source = kernel("x0 = xindex // (ks0*ks1)")
    result = narrow(source, unbounded)
    assert result.source == source
    assert result.summary == "0 of 1 index expressions with dynamic sizes in 32 bits"


def test_a_symbol_without_bounds_stays_wide():
    """An unbacked symbol may be 0; then the product of all dims bounds no other dim."""
    source = kernel("x0 = (x2 % ks0)")
    for least in ({H: 0, W: 2}.get, {H: None, W: 2}.get, {H: -5, W: 2}.get):
        bounded = facts(sizes={"ks0": W}, limits=[96 * H * W], least=least)
        assert narrow(source, bounded).source == source
    assert "ks0_i32" in narrow(source, facts(sizes={"ks0": W}, limits=[96 * H * W])).source


class TestBounds:
    def test_the_limit_is_exact(self):
        bounds = Bounds(facts(limits=[96 * H * W]))
        assert bounds.fits(96 * H * W)
        assert not bounds.fits(96 * H * W + 1)
        assert bounds.fits(sympy.Integer(LARGEST))
        assert not bounds.fits(sympy.Integer(LARGEST + 1))

    def test_least_values_take_part(self):
        # 2 W <= H W needs H >= 2.
        assert Bounds(facts(limits=[H * W])).fits(2 * W)
        assert not Bounds(facts(limits=[H * W], least={H: 1, W: 1}.get)).fits(2 * W)
        assert not Bounds(facts(limits=[H * W])).fits(3 * W)

    operands = st.sampled_from(["ks0", "ks1", "ks2", "ks3", "x0", "x1", "x2", "xindex", "1", "2", "7", "(-1)", "(-3)"])
    expressions = st.recursive(
        operands,
        lambda inner: st.builds(
            lambda left, operator, right: f"({left} {operator} {right})",
            inner,
            st.sampled_from(["+", "-", "*", "//", "%"]),
            inner,
        ),
        max_leaves=6,
    )

    @settings(max_examples=150)
    @given(expressions, st.data())
    def test_whatever_is_proven_is_the_same_in_32_bits(self, text, data):
        """Sizes up to where the guards still hold, and index values at their ends, where results are largest."""
        node = ast.parse(text, mode="eval").body
        assume(Bounds(facts()).of(node) is not None)
        height = data.draw(st.integers(2, 4000))
        widest = LARGEST // (96 * (height + 2)) - 2
        width = data.draw(st.one_of(st.just(widest), st.integers(2, widest)))
        assert 96 * (height + 2) * (width + 2) <= LARGEST
        sizes = {"ks0": width + 2, "ks1": height + 2, "ks2": width, "ks3": height}
        extents = {"x0": width + 2, "x1": height + 2, "x2": 96, "xindex": 96 * (height + 2) * (width + 2)}
        inside = data.draw(st.integers(1, 2**31))
        for ends in itertools.product((0, inside, -1), repeat=len(extents)):
            values = {name: end % extent for (name, extent), end in zip(extents.items(), ends, strict=True)}
            exact = evaluate(node, {**sizes, **values}, int)
            if exact is not None:
                assert exact == evaluate(node, {**sizes, **values}, np.int32), text


def evaluate(node, values, kind):
    """A value in exact or in 32-bit arithmetic that wraps around; None where something is divided by 0."""
    match node:
        case ast.Constant(value=value):
            return kind(value)
        case ast.Name(id=name):
            return kind(values[name])
        case ast.UnaryOp(operand=operand):
            inner = evaluate(operand, values, kind)
            return None if inner is None else kind(-inner)
    left, right = evaluate(node.left, values, kind), evaluate(node.right, values, kind)
    if left is None or right is None or (isinstance(node.op, (ast.FloorDiv, ast.Mod)) and right == 0):
        return None
    operators = {ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.FloorDiv: "floordiv", ast.Mod: "mod"}
    with np.errstate(over="ignore"):
        return getattr(left, f"__{operators[type(node.op)]}__")(right)


class TestGenerated:
    """On kernels that Inductor really generates."""

    @pytest.fixture(autouse=True)
    def _policy(self):
        with tritium.autofuse.enabled(choose_tiling=False) as declined:
            assert declined is None
            yield

    def sizes(self):
        return [kernel["sizes"] for kernel in tritium.autofuse.decisions()["kernels"]]

    def test_a_mean_keeps_the_number_of_its_elements_in_64_bits(self):
        (made,) = generate(lambda x: x.mean((1, 2)), [torch.randn(64, 32, 48)], {0: (1, 2)})
        values = [line for line in made.body.splitlines() if ".to(tl.float" in line]
        assert values
        assert not any("_i32" in line for line in values)

    def test_numel_below_and_above_the_largest(self):
        """46,340 x 46,341 elements are the last of this kind that 32 bits count."""

        def pad(x):
            return F.pad(x, (1, 1, 1, 1))

        (fits,) = generate(pad, [torch.empty(46_338, 46_339, dtype=torch.uint8)], {0: (0, 1)})
        assert "_i32" in fits.source
        (exceeds,) = generate(pad, [torch.empty(46_340, 46_340, dtype=torch.uint8)], {0: (0, 1)})
        assert "_i32" not in exceeds.source
        assert self.sizes()[-1] == "all in 64 bits: so is the kernel's index"

    def test_larger_sizes_do_not_run_the_narrow_kernel(self):
        """A kernel compiled for few elements is guarded: many elements compile another one."""
        torch._dynamo.reset()
        small, large = torch.empty(64, 48, dtype=torch.uint8), torch.empty(46_340, 46_340, dtype=torch.uint8)
        torch._dynamo.mark_dynamic(small, [0, 1])
        with triton_on_cpu() as kernels, torch.no_grad():
            compiled = torch.compile(lambda x: F.pad(x, (1, 1, 1, 1)), fullgraph=True)
            for x in (small, torch.empty(70, 50, dtype=torch.uint8), large):
                with pytest.raises(Exception, match="there is no code behind this"):
                    compiled(x)
        assert ["_i32" in kernel.source for kernel in kernels] == [True, False]

    def test_code_for_ahead_of_time_stays_wide(self, monkeypatch):
        monkeypatch.setattr(compat.generated, "compiles_ahead_of_time", lambda: True)
        (made,) = generate(lambda x: F.pad(x, (1, 1, 1, 1)), [torch.randn(64, 32, 48)], {0: (1, 2)})
        assert "_i32" not in made.source
        assert "without guards" in self.sizes()[-1]

    def test_a_fractional_argument_is_no_size(self):
        class Argument:
            name, expr = "ks0", sympy.Symbol("zf0", real=True)

        common = torch._inductor.codegen.common
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(common, "SizeArg", Argument)
            patch.setattr(compat.generated, "original_size", lambda size: size)
            arguments = type("Arguments", (), {"python_argdefs": lambda self: ([], [], [Argument()], [])})()
            assert compat.generated.kernel_sizes(type("Kernel", (), {"args": arguments})()) == {}
