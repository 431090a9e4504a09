"""The contract of every op in the catalogue: meaning, fake, providers."""

import inspect
from collections.abc import Sequence

import pytest
import torch
import torch.utils._pytree as pytree
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from support.fidelity import assert_no_worse
from support.hopper import compile_instead_of_launching
from support.interpreter import interpreted
from tritium import device, envs, ops
from tritium.ops import norm_quantize, quantize_parts, quantize_rows

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
OPS = list(ops.catalog().values())


def cases(device_type: str):
    for op in OPS:
        for dtype in DTYPES:
            for sample in op.samples(dtype, device_type):
                yield pytest.param(
                    op, dtype, sample, id=f"{op.name}-{str(dtype).removeprefix('torch.')}-{sample.label}"
                )


# Bytes and indices stay as they are.
WIDENED = (torch.float16, torch.bfloat16, torch.float32, torch.complex64)

# What the results of an op mean, where numbers are stored with scales: the last two.
STORED = ("quantize_rows", "quantize_parts", "norm_quantize")


def meaning(*results):
    *others, q, scale = results
    return *others, q.double() * scale


def before_rounding(op, wide):
    """The exact values of an op in STORED, which the references in float64 round to 8 bits."""
    if op.name == "quantize_rows":
        return (quantize_rows.rotated(wide["x"], wide.get("rotate", 0)),)
    if op.name == "quantize_parts":
        rows = quantize_parts.joined_parts(wide["parts"], wide["kinds"])
        return (quantize_rows.rotated(rows, wide.get("rotate", 0)),)
    kept = {**wide, "keep": True, "out_dtype": torch.float64, "residual_dtype": torch.float64}
    residual, rows, *_ = norm_quantize.reference(**kept)
    rotated = quantize_rows.rotated(rows, wide.get("rotate", 0))
    return residual, rows if wide.get("keep") else rows.new_empty(0), rotated


def widened(value):
    if isinstance(value, list):
        return [widened(part) for part in value]
    if not isinstance(value, torch.Tensor) or value.dtype not in WIDENED:
        return value
    return value.to(torch.complex128 if value.is_complex() else torch.float64)


def tensors_of(sample) -> list[torch.Tensor]:
    flat = [part for value in sample.arguments.values() for part in (value if isinstance(value, list) else [value])]
    return [part for part in flat if isinstance(part, torch.Tensor)]


def numbers(op, result) -> tuple[torch.Tensor, ...]:
    made = parts(result)
    return meaning(*made) if op.name in STORED else made


def parts(result) -> tuple[torch.Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def exact(op, arguments) -> tuple[torch.Tensor, ...]:
    """The op's results in float64."""
    wide = {k: torch.float64 if k.endswith("_dtype") else widened(v) for k, v in arguments.items()}
    if op.name in STORED:
        return before_rounding(op, wide)
    return parts(op.reference(**wide))


def assert_as_promised(op, sample, result) -> None:
    for made, promised in zip(parts(result), parts(op.fake(**sample.arguments)), strict=True):
        expected = promised.shape, promised.dtype, promised.stride()
        assert (made.shape, made.dtype, made.stride()) == expected, f"{op.name}, {sample.label}"


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
class TestDeclaration:
    def test_the_schema_has_the_reference_s_parameters(self, op):
        names = [argument.name for argument in op.overload._schema.arguments]
        assert names == [*inspect.signature(op.reference).parameters, "provider"]

    def test_arguments_have_the_names_of_the_reference(self, op):
        sample = next(op.samples(torch.float32, "cpu"))
        given = op.bind(*sample.arguments.values())
        assert list(vars(given)) == list(inspect.signature(op.reference).parameters)
        assert all(vars(given)[name] is value for name, value in sample.arguments.items())
        with pytest.raises(TypeError, match=f"op '{op.name}' takes"):
            op.bind()
        with pytest.raises(TypeError, match="nonsense"):
            op.bind(**sample.arguments, nonsense=1)

    def test_samples_have_awkward_sizes(self, op):
        samples = list(op.samples(torch.float32, "cpu"))
        sizes = {size for sample in samples for tensor in tensors_of(sample) for size in tensor.shape}
        assert {1, 7, 63, 100, 3072, 5120} <= sizes
        tensors = [tensor for sample in samples for tensor in tensors_of(sample)]
        assert any(not tensor.is_contiguous() for tensor in tensors)
        assert any(tensor.numel() == 0 for tensor in tensors)

    def test_pytorch_s_own_check(self, op):
        for sample in list(op.samples(torch.float32, "cpu")):
            # The check of the schema adds tensors, which PyTorch cannot do in float8.
            has_float8 = any(tensor.dtype == torch.float8_e4m3fn for tensor in tensors_of(sample))
            tests = ("test_faketensor",) if has_float8 else ("test_schema", "test_faketensor")
            torch.library.opcheck(
                op.overload, tuple(sample.arguments.values()), {"provider": "reference"}, test_utils=tests
            )

    def test_dynamic_shapes(self, op):
        """Traced with symbolic sizes: the fake says the same as the op, and asks nothing of a size."""
        for sample in list(op.samples(torch.float32, "cpu"))[:2]:
            torch.library.opcheck(
                op.overload,
                tuple(sample.arguments.values()),
                {"provider": "reference"},
                test_utils="test_aot_dispatch_dynamic",
            )

    def test_a_fake_needs_no_mode_around_it(self, op):
        """Passes call it with the tensors they have: results are fake like those, and nothing is allocated."""
        for sample in op.samples(torch.float32, "cpu"):
            mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
            given = pytree.tree_map_only(torch.Tensor, mode.from_tensor, dict(sample.arguments))
            for made, promised in zip(parts(op.fake(**given)), parts(op.fake(**sample.arguments)), strict=True):
                assert isinstance(made, FakeTensor), sample.label
                assert (len(made.shape), made.dtype) == (len(promised.shape), promised.dtype)


# Errors of 8 bits are those of test_quantized.py.
@pytest.mark.parametrize(
    ("op", "dtype", "sample"), (case for case in cases("cpu") if case.values[0].name not in STORED)
)
def test_the_reference_is_as_exact_as_its_dtype(op, dtype, sample):
    result = op.overload(*sample.arguments.values(), provider="reference")
    assert_as_promised(op, sample, result)
    for made, truth in zip(parts(result), exact(op, sample.arguments), strict=True):
        # The yardstick is the exact value, rounded once.
        assert_no_worse(made, truth.to(made.dtype), truth)


def run_providers(device_type: str, dtypes: Sequence[torch.dtype] = DTYPES, names: Sequence[str] = ()) -> int:
    """Every provider of every op on every sample against float64, outputs poisoned so that a hole shows."""
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        return check_providers(device_type, dtypes, names)
    finally:
        torch.use_deterministic_algorithms(False)


# FlexAttention compiles C++ for every sample, which tests of layers do for some. The kernel of `products` is also
# `wide_attention`'s, and takes minutes in the interpreter.
SLOW_ON_A_CPU = {("attention", "flex"), ("block_sparse_attention", "flex"), ("attention", "products")}


# Triton's interpreter cuts mantissas off when it converts to float8, where GPUs round.
ROUNDED_OTHERWISE = {(name, "triton") for name in STORED}


def is_float8(sample) -> bool:
    return sample.arguments["dtype"] == torch.float8_e4m3fn


def check_providers(device_type: str, dtypes: Sequence[torch.dtype], names: Sequence[str]) -> int:
    checked = 0
    for op in (op for op in OPS if not names or op.name in names):
        for provider in ops.providers(op).values():
            # Lossy providers are those of test_quantized_attention.py.
            if provider.lossy or (device_type == "cpu" and (op.name, provider.name) in SLOW_ON_A_CPU):
                continue
            for dtype in dtypes:
                for sample in op.samples(dtype, device_type):
                    if provider.decline(op.bind(**sample.arguments)) is not None:
                        continue
                    if device_type == "cpu" and (op.name, provider.name) in ROUNDED_OTHERWISE and is_float8(sample):
                        continue
                    before = [tensor.clone() for tensor in tensors_of(sample)]
                    result = op.overload(*sample.arguments.values(), provider=provider.name)
                    where = f"{op.name} by {provider.name}, {dtype}, {sample.label}"
                    assert_as_promised(op, sample, result)
                    eager = numbers(op, op.reference(**sample.arguments))
                    for made, plain, truth in zip(numbers(op, result), eager, exact(op, sample.arguments), strict=True):
                        assert not made.isnan().any(), where
                        assert_no_worse(made, plain, truth, where)
                    assert all(map(torch.equal, before, tensors_of(sample))), where
                    checked += 1
    assert not ops.failed_providers(), ops.failed_providers()
    return checked


@pytest.mark.skipif(not device.has_triton(), reason="triton is not installed")
@pytest.mark.parametrize(
    "dtype",
    [torch.bfloat16, *(pytest.param(one, marks=pytest.mark.thorough) for one in (torch.float32, torch.float16))],
)
def test_triton_kernels_in_the_interpreter(dtype):
    assert interpreted("ops.test_contract", "run_providers", f"'cpu', [{dtype}]") >= 80


def test_kernels_are_imported_when_a_provider_runs(in_process):
    """Triton is an optional import: declaring ops, and declining for them, needs none."""
    program = """
import sys, torch, tritium
from tritium import ops

x = torch.randn(2, 8)
op = ops.catalog()["rms_norm"]
reason = ops.providers(op)["triton"].decline(op.bind(x, None, 1e-6, None))
assert reason is not None
op.overload(x, None, 1e-6, None, provider="reference")
print("triton" in sys.modules)
"""
    assert in_process(program).split()[-1] == "False"


# Of an op, compiled for a GPU; all where time does not matter.
SAMPLES = 6


@pytest.mark.skipif(not device.has_triton(), reason="triton is not installed")
@pytest.mark.parametrize(
    ("op", "name"),
    [(op, name) for op in OPS for name in ("triton", "products") if name in ops.providers(op)],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
@pytest.mark.parametrize("most", [SAMPLES, pytest.param(None, marks=pytest.mark.thorough)])
def test_triton_kernels_compile_for_hopper_without_one(op, name, most, monkeypatch):
    """The interpreter accepts what the compiler refuses. Every launch of a sample is compiled instead of run."""
    compiled = compile_instead_of_launching(monkeypatch)
    # Not interpreted, but as willing to take a tensor of this machine as if it were.
    monkeypatch.setattr(envs, "triton_interpreted", lambda: True)
    provider = ops.providers(op)[name]
    launched = [
        given
        for sample in op.samples(torch.bfloat16, "cpu")
        if provider.decline(given := op.bind(**sample.arguments)) is None
    ]
    # Spread over the samples: neighbours launch kernels that are alike.
    for given in launched[:: -(-len(launched) // (most or len(launched)))]:
        provider.run(given)
    assert compiled
    assert all("ptx" in code for code in compiled.values())


@pytest.mark.gpu
@pytest.mark.parametrize("op", [op for op in OPS if ops.providers(op)], ids=lambda op: op.name)
def test_providers_on_the_gpu(op):
    assert run_providers("cuda", names=[op.name]) >= 3


@pytest.mark.gpu
def test_more_rows_than_a_grid_dim_holds():
    """Rows go over the grid's first dim, which holds 2^31 - 1; the others hold 65,535."""
    from tritium.ops import rms_norm

    x = torch.randn(70_000, 64, device="cuda", dtype=torch.bfloat16)
    result = rms_norm.OP.overload(x, None, 1e-6, None, provider="triton")
    assert_no_worse(
        result,
        rms_norm.reference(x, None, 1e-6, None),
        exact(rms_norm.OP, {"x": x, "weight": None, "eps": 1e-6, "out_dtype": None})[0],
    )
