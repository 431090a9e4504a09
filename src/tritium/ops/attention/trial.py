"""How the providers of `attention` are compared at the first call of a shape class, and the rule without a verdict."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from tritium import device, fidelity
from tritium.compat import attention as compat_attention
from tritium.ops.attention import providers
from tritium.ops.attention.providers import PROVIDERS
from tritium.ops.attention.reference import Sizes, arguments, attention_math
from tritium.ops.op import Arguments, FirstUse, Shape, Trial, draw_from, present

# The number of queries whose result is compared with float64.
CHECKED = 128

# The least ratio of signal to error in dB of lossy providers, for every head.
LEAST_SQNR = 25.0

# Scores of 4608 tokens and 24 heads are 1.9 GiB, those of video 160 GiB, which would exhaust the model's memory.
MOST_SCORES = 2 << 30
# Where providers that hold many scores are not measured beyond that. On a GPU `chunked` takes eight seconds for video,
# where kernels take 40 ms.
HOLDS_SCORES = {"math": ("cpu", "cuda"), "chunked": ("cuda",), "products": ("cuda",)}

# Elsewhere they are used only by name.
MEASURED_ON_A_GPU = ("flex", "products")

# They start a compiler, which is impossible while another function is being compiled.
COMPILES = ("flex",)


def shape(given: Arguments) -> Shape:
    """Return the key of a measurement: token counts rounded to classes, everything else exact."""
    mask = "none"
    if given.mask is not None:
        dims = zip("BNQK", given.mask.shape, strict=True)
        kind = "keep" if given.mask.dtype == torch.bool else "add32" if providers.has_wide_mask(given) else "add"
        mask = f"{kind}-{''.join(name if present(size) > 1 else '1' for name, size in dims)}"
    memory, sizes = "BNSD" if providers.has_heads_first_in_memory(given) else "BSND", Sizes.of(given)
    return {
        "batch": sizes.batch,
        "heads": sizes.heads,
        "kv_heads": sizes.kv_heads,
        "queries": size_class(sizes.queries),
        "keys": size_class(sizes.keys),
        "square": int(sizes.queries == sizes.keys),
        "width": sizes.width,
        "value_width": sizes.value_width,
        "mask": mask,
        "causal": int(given.causal),
        "memory": memory if providers.is_packed(given) else f"{memory}-apart",
        "grad": int(providers.needs_gradients(given)),
    }


def size_class(tokens: int) -> int:
    """Round to the nearest of 1, 1.4, 2, 2.8, 4 ...: sizes of a class share one measurement.

    >>> [size_class(tokens) for tokens in (1, 77, 512, 4096, 4608, 32760)]
    [1, 91, 512, 4096, 4096, 32768]
    """
    return round(2 ** (round(2 * math.log2(max(1, tokens))) / 2))


def alike(given: Arguments) -> Callable[[], Mapping[str, Any]] | None:
    """Return a function that creates random arguments like these; None for an empty attention."""
    sizes = Sizes.of(given)
    if 0 in sizes:
        return None
    layout = {"heads_first": providers.has_heads_first_in_memory(given), "packed": providers.is_packed(given)}
    shape_of_mask = None if given.mask is None else tuple(map(present, given.mask.shape))
    mask_dtype = None if given.mask is None else given.mask.dtype
    dtype, where, causal = given.q.dtype, given.q.device, given.causal

    def create() -> dict[str, Any]:
        draw, mask = draw_from(dtype, where), None
        if shape_of_mask is not None:
            mask = draw(*shape_of_mask) < 0.67
            # Leave every row a key: providers differ in the result of a row without one.
            mask[..., 0] = True
            if mask_dtype != torch.bool:
                mask = torch.zeros(shape_of_mask, device=where, dtype=mask_dtype).masked_fill_(~mask, -math.inf)
        return arguments(draw, sizes, mask, causal=causal, **layout)

    return create


def check(given: Arguments) -> Callable[[torch.Tensor], str | None]:
    """Compute the last queries in float64; the returned function compares a result with these."""
    rows = slice(max(0, given.q.shape[2] - CHECKED), None)
    exact, eager = exact_rows(given, rows)
    allowed = fidelity.allowed(eager, exact)

    def too_far(out: torch.Tensor) -> str | None:
        error = fidelity.error(out[:, :, rows], exact)
        # Compared this way so that NaN counts as too large.
        return None if error <= allowed else f"error {error:.2e} against float64, allowed {allowed:.2e}"

    return too_far


def exact_rows(given: Arguments, rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the result of some queries in float64, and in the dtype of the query."""
    q, k, v, mask, first = given.q, given.k, given.v, given.mask, rows.start
    some = mask[:, :, rows] if mask is not None and mask.shape[2] > 1 else mask
    # One head at a time: for video, all heads in float64 would not fit in memory.
    parts: list[tuple[torch.Tensor, torch.Tensor]] = []
    group = q.shape[1] // k.shape[1]
    for head in range(q.shape[1]):
        one, of_key = slice(head, head + 1), slice(head // group, head // group + 1)
        own = some[:, one] if some is not None and some.shape[1] > 1 else some
        arguments = (q[:, one, rows], k[:, of_key], v[:, of_key], own, given.scale, given.causal)
        wide = tuple(t.double() if isinstance(t, torch.Tensor) and t.is_floating_point() else t for t in arguments)
        parts.append((attention_math(*wide, first_row=first), attention_math(*arguments, first_row=first)))  # type: ignore[arg-type]
    exact, eager = (torch.cat(side, dim=1) for side in zip(*parts, strict=True))
    return exact, eager


def with_outliers(given: Arguments) -> Callable[[], Mapping[str, Any]] | None:
    """Return a function that creates arguments like these whose queries and keys have outlier channels, as in trained models."""
    create = alike(given)
    if create is None:
        return None

    def created() -> dict[str, Any]:
        made = {**create()}
        for name, channels, factor in (("q", 64, 3.0), ("k", 32, 10.0)):
            side = made[name]
            column = torch.arange(side.shape[3], device=side.device)
            # The mean of all keys, which a softmax does not see.
            moved = (30.0 * (column == 5)).to(side.dtype) if name == "k" else 0.0
            made[name] = side * torch.where(column % channels == 0, factor, 1.0).to(side.dtype) + moved
        return made

    return created


def check_lossy(given: Arguments) -> Callable[[torch.Tensor], str | None]:
    """Compute the last queries in float64; the returned function asks for LEAST_SQNR in every head."""
    rows = slice(max(0, given.q.shape[2] - CHECKED), None)
    exact = exact_rows(given, rows)[0]

    def too_far(out: torch.Tensor) -> str | None:
        error = (out[:, :, rows].double() - exact).square().sum((0, 2, 3))
        ratio = float((10 * torch.log10(exact.square().sum((0, 2, 3)) / error)).min())
        return None if ratio >= LEAST_SQNR else f"SQNR {ratio:.1f} dB with outlier channels, at least {LEAST_SQNR:.0f}"

    return too_far


def skip(name: str, given: Arguments, compiling: bool) -> str | None:
    where = given.q.device.type
    if name in MEASURED_ON_A_GPU and where != "cuda":
        return f"not measured on {where}"
    score_bytes = Sizes.of(given).score_bytes
    if where in HOLDS_SCORES.get(name, ()) and score_bytes > MOST_SCORES:
        return f"not measured: its scores would take {score_bytes / 2**30:.1f} GiB"
    if name in COMPILES and compiling:
        return "it has to be compiled, and something else is being compiled now"
    return None


def rule(given: Arguments) -> str:
    """Return the provider for a call without a verdict: cuDNN on Hopper and later, else sdpa.

    cuDNN is the fastest there. If sdpa declines, flex, chunked and math follow.
    """
    order = ["sdpa", "flex", "chunked", "math"]
    capability = device.capability(given.q.device)
    sizes = Sizes.of(given)
    fastest = capability is not None and capability >= (9, 0) and given.mask is None and sizes.width <= 128
    if fastest and not providers.needs_gradients(given) and 0 not in sizes:
        order.insert(0, "cudnn")
    declines = {provider.name: provider.decline for provider in PROVIDERS}
    return next(name for name in order if declines[name](given) is None)


TRIAL = Trial(
    shape,
    first_use=FirstUse(
        alike=alike, check=check, default=rule, versions=compat_attention.versions, skip=skip, preferred="sdpa"
    ),
    lossy_use=FirstUse(
        alike=with_outliers,
        check=check_lossy,
        default=rule,
        versions=compat_attention.versions,
        skip=skip,
        preferred="sdpa",
    ),
)
