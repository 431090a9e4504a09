"""Kernels of quantized linears: each producer of 8-bit rows against its 16-bit kernel and Inductor's code, and products.

Each variant is captured ten times in a CUDA graph, over several inputs that together exceed the L2 cache: the host costs
nothing, as inside a captured block. The milliseconds are those of one call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the conventional name

from tritium import compat, measure, ops
from tritium.bench.results import Row
from tritium.bench.settings import Settings
from tritium.ops import norm_quantize, op, quantize_parts, quantize_rows, residual_norm_modulate, scaled_linear
from tritium.ops.quantize_rows import FP8, INT8

# Calls in a captured graph, and the bytes that they read at least before they read the first ones again.
CALLS, SPREAD = 10, 150e6

# Each replays every variant once. A round in every balanced order would take minutes for the candidates of a product.
ROUNDS = 9

# Names of the variants that ratios are against.
PRODUCER, PRODUCT = "16 bits", "bf16 cuBLAS"


@dataclass
class Case:
    """One kernel at one shape: functions by variant, and the arguments of each call."""

    name: str
    variants: dict[str, Callable[..., Any]]
    draw: Callable[[], tuple[Any, ...]]
    note: str
    # The variant that ratios are against, and the one whose results are the expected ones.
    reference: str = PRODUCER
    truth: Callable[..., torch.Tensor] | None = None
    # Returns numbers from a variant's results.
    read: Callable[[Any], torch.Tensor] = field(default=lambda result: result)
    # Describes the error of a variant, given its function.
    judge: Callable[[Callable[..., Any]], str] | None = None
    # Calls in a captured graph.
    calls: int = CALLS


def captured(
    function: Callable[..., Any], inputs: Sequence[tuple[Any, ...]], device_type: str, calls: int = CALLS
) -> Callable[[], Any]:
    """Return a function that replays some calls; on a CPU it makes one call."""
    if device_type != "cuda":
        return lambda: function(*inputs[0])
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(2):
            function(*inputs[0])
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(calls):
            function(*inputs[index % len(inputs)])
    replay: Callable[[], Any] = graph.replay
    return replay


def measure_case(case: Case, settings: Settings, notify: Callable[[str], None] = print) -> list[Row]:
    """Time the variants of a case interleaved, and compare the numbers of each with the exact ones."""
    where, first = settings.device_type, case.draw()
    size = sum(part.numel() * part.element_size() for part in _tensors(first))
    inputs = [first, *(case.draw() for _ in range(min(8, int(SPREAD / max(size, 1)))) if where == "cuda")]
    truth = case.truth(*first) if case.truth is not None else case.read(case.variants[case.reference](*first))
    calls, failed, loss, remarks = {}, {}, {}, {}
    for name, function in case.variants.items():
        try:
            with torch.inference_mode():
                loss[name] = measure.relative_l2(case.read(function(*first)).float(), truth.float())
                if case.judge is not None:
                    remarks[name] = case.judge(function)
                calls[name] = captured(function, inputs, where, case.calls)
        except Exception as error:  # noqa: BLE001 - a candidate that needs too much shared memory is one result
            failed[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:120] if str(error) else ''}"
            notify(f"{case.name}: {name} failed: {failed[name]}")
    notify(f"{case.name}: timing {len(calls)} variants, {len(failed)} failed")
    timings = measure.interleave(calls, where, rounds=ROUNDS, burst=1)
    each = case.calls if where == "cuda" else 1
    against = timings.get(case.reference)
    rows = []
    for name, timing in timings.items():
        scaled = {key: value if key == "samples" else value / each for key, value in asdict(timing).items()}
        rows.append(
            Row(
                workload=case.name,
                variant=name,
                mode=None,
                dtype=settings.dtype_text,
                shrunk=settings.small,
                note=case.note,
                shapes={str(place): list(part.shape) for place, part in enumerate(_tensors(first))},
                **scaled,
                ratio=None if against is None else against.median_ms / timing.median_ms,
                first_call_s=0.0,
                first_call_cold=False,
                peak_memory_bytes=None,
                relative_l2=loss[name],
                disturbed=None,
                remark=remarks.get(name) or "; ".join(f"{what} failed: {why}" for what, why in failed.items()) or None,
            )
        )
    return rows


def _tensors(arguments: Sequence[Any]) -> list[torch.Tensor]:
    flat = [part for value in arguments for part in (value if isinstance(value, list) else [value])]
    return [part for part in flat if isinstance(part, torch.Tensor)]


def values(result: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the numbers that quantized rows stand for."""
    q, scale = result[-2:]
    return q.float() * scale


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile with Inductor, apart from other functions with the same code."""
    assert isinstance(function, FunctionType)
    made = compat.dynamo.with_code_of_its_own(function)
    return torch.compile(made, dynamic=False)


def _triton(one: op.Op, launch: Mapping[str, Any] | None = None) -> Callable[..., Any]:
    """Return a function that runs the Triton provider, with other launch options if given: module attributes."""
    provider = ops.providers(one)["triton"]
    module: Any = {
        "quantize_parts": quantize_parts,
        "norm_quantize": norm_quantize,
        "scaled_linear": scaled_linear,
    }.get(one.name)

    def call(*arguments: Any) -> Any:
        given = one.bind(*arguments)
        reason = provider.decline(given)
        if reason is not None:
            raise ValueError(reason)
        if launch is None:
            return provider.run(given)
        kept = module.launch_options
        module.launch_options = lambda *_, **__: launch["options"]
        try:
            return provider.run(given)
        finally:
            module.launch_options = kept

    return call


# A function that makes a case on the device of some settings.
Maker = Callable[[Settings], Case]

# Formats of the rows, and the sizes of rotated groups.
ROWS = ((FP8, 0), (INT8, 0), (INT8, 64))


def producers(*, small: bool) -> list[Maker]:
    """Return the producers of FLUX's blocks at 1024 px, or small ones for a CPU."""
    image, joint, text, width = (8, 12, 4, 64) if small else (4096, 4608, 512, 3072)
    makers: list[Maker] = []
    for dtype, rotate in ROWS:
        word = f"{str(dtype)[6:]}{f' rotated {rotate}' if rotate else ''}"
        tokens_of_norms = {"norm": image, **({"text norm": text} if dtype == FP8 else {})}
        for name, tokens in tokens_of_norms.items():
            makers.append(functools.partial(_norm_case, f"{name} {word}", tokens, width, dtype, rotate))
        for name, kinds, widths, tokens in (
            ("gelu", "gelu_tanh", (4 * width,), image),
            ("cat", "plain,gelu_tanh", (width, 4 * width), joint),
            ("attention output", "plain", (width,), joint),
            *([("text gelu", "gelu_tanh", (4 * width,), text)] if dtype == FP8 else []),
        ):
            makers.append(functools.partial(_parts_case, f"{name} {word}", kinds, widths, tokens, dtype, rotate))
    return makers


def _norm_case(name: str, tokens: int, width: int, dtype: torch.dtype, rotate: int, settings: Settings) -> Case:
    draw = op.draw_from(settings.dtype, settings.device_type)

    def arguments() -> tuple[Any, ...]:
        x, y = (draw(1, tokens, width) for _ in "xy")
        gate, scale, shift = draw(1, 1, 3 * width).chunk(3, -1)
        return x, y, gate, None, None, scale, shift, 1e-6, "layer", dtype, rotate

    def plain(*given: Any) -> Any:
        return residual_norm_modulate.reference(*given[:9])

    def inlined(*given: Any) -> Any:
        return norm_quantize.reference(*given)

    bf16 = _triton(residual_norm_modulate.OP)
    variants: dict[str, Callable[..., Any]] = {
        PRODUCER: lambda *given: bf16(*given[:9]),
        "16 bits Inductor": _compiled(plain),
        "8 bits Inductor": _compiled(inlined),
        "8 bits Triton": _triton(norm_quantize.OP),
    }
    for warps in (4, 8):
        tile = 256 * warps
        cut = {"ROWS": 1, "TILE": tile, "PIECES": -(-width // tile)}
        variants[f"8 bits Triton, {warps} warps"] = _triton(norm_quantize.OP, {"options": (cut, {"num_warps": warps})})

    def truth(*given: Any) -> torch.Tensor:
        return quantize_rows.rotated(residual_norm_modulate.reference(*given[:9])[1].float(), rotate)

    def read(result: Any) -> torch.Tensor:
        return values(result) if len(result) == 4 else quantize_rows.rotated(result[1].float(), rotate)

    note = f"{tokens} x {width}, residual, LayerNorm and modulation"
    return Case(name, variants, arguments, note, truth=truth, read=read)


def _parts_case(
    name: str, kinds: str, widths: Sequence[int], tokens: int, dtype: torch.dtype, rotate: int, settings: Settings
) -> Case:
    draw = op.draw_from(settings.dtype, settings.device_type)

    def arguments() -> tuple[Any, ...]:
        return [draw(1, tokens, width) for width in widths], kinds, dtype, rotate

    def plain(parts: list[torch.Tensor], *_: Any) -> Any:
        return quantize_parts.joined_parts(parts, kinds).to(parts[0].dtype).clone()

    def inlined(*given: Any) -> Any:
        return quantize_parts.reference(*given)

    variants: dict[str, Callable[..., Any]] = {
        PRODUCER: _compiled(plain),
        "8 bits Inductor": _compiled(inlined),
        "8 bits Triton": _triton(quantize_parts.OP),
    }
    for warps, tile in ((4, 512), (4, 1024), (8, 1024), (8, 2048), (16, 1024), (16, 2048)):
        cut = {"ROWS": 1, "TILE": tile}
        variants[f"8 bits Triton, {warps} warps, tiles of {tile}"] = _triton(
            quantize_parts.OP, {"options": (cut, {"num_warps": warps})}
        )

    def truth(parts: list[torch.Tensor], *_: Any) -> torch.Tensor:
        return quantize_rows.rotated(quantize_parts.joined_parts(parts, kinds), rotate)

    def read(result: Any) -> torch.Tensor:
        return values(result) if isinstance(result, tuple) else quantize_rows.rotated(result.float(), rotate)

    return Case(name, variants, arguments, f"{tokens} x {'+'.join(map(str, widths))}, {kinds}", truth=truth, read=read)


# M, K and N of FLUX's linears at 1024 px.
PRODUCTS = (
    (4096, 3072, 3072),
    (4096, 3072, 12288),
    (4096, 12288, 3072),
    (4608, 3072, 12288),
    (4608, 15360, 3072),
    (4608, 3072, 9216),
    (4608, 3072, 21504),
    (512, 3072, 3072),
    (512, 3072, 12288),
)


def products(*, small: bool) -> list[Maker]:
    """Return the products of FLUX's linears, or a small one for a CPU."""
    return [functools.partial(_product_case, *sizes) for sizes in ([(24, 64, 32)] if small else PRODUCTS)]


def _product_case(m: int, k: int, n: int, settings: Settings) -> Case:
    draw, dtype = op.draw_from(settings.dtype, settings.device_type), settings.dtype
    weight, bias = draw(n, k) / k**0.5, draw(n)
    weights = {target: quantize_rows.quantize_weight(weight, target) for target in (INT8, FP8)}

    def arguments() -> tuple[Any, ...]:
        x = draw(m, k)
        return x, [*quantize_rows.reference(x, INT8)], [*quantize_rows.reference(x, FP8)]

    def product(target: torch.dtype, run: Callable[..., Any]) -> Callable[..., Any]:
        def call(_: Any, int8: Any, fp8: Any) -> Any:
            return run(*(int8 if target == INT8 else fp8), *weights[target], bias, dtype)

        return call

    def provider(name: str) -> Callable[..., Any]:
        chosen = ops.providers(scaled_linear.OP)[name]

        def call(*given: Any) -> Any:
            bound = scaled_linear.OP.bind(*given)
            if (reason := chosen.decline(bound)) is not None:
                raise ValueError(reason)
            return chosen.run(bound)

        return call

    variants: dict[str, Callable[..., Any]] = {
        PRODUCT: lambda x, *_: F.linear(x, weight, bias),
        "fp8 cuBLAS": product(FP8, provider("scaled_mm")),
        "int8 cuBLAS and epilogue": _by_int_mm(product),
        "int8 Triton": product(INT8, provider("triton")),
        "fp8 Triton": product(FP8, provider("triton")),
    }
    for candidate in scaled_linear.CANDIDATES:
        options = {"options": scaled_linear.options_of(*candidate)}
        variants[f"int8 Triton {candidate}"] = product(INT8, _triton(scaled_linear.OP, options))
    return Case(f"product {m} x {k} x {n}", variants, arguments, "with bias", reference=PRODUCT)


def _by_int_mm(product: Callable[..., Any]) -> Callable[..., Any]:
    """Return the product by cuBLAS in int32, with the rest compiled."""

    def run(q: Any, scale: Any, weight: Any, weight_scale: Any, bias: Any, dtype: torch.dtype) -> Any:
        return scaled_linear.OP.overload(q, scale, weight, weight_scale, bias, dtype, provider="int_mm")

    return _compiled(product(INT8, run))
