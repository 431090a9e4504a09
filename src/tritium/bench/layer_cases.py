"""All layer functions, called eagerly, against the spelling of models and against torch.compile of the reference."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name everybody knows
from torch import nn

from tritium import ops
from tritium.bench.layer_functions import Case
from tritium.bench.workload import Normals, shapes_of
from tritium.layers.activation import get_activation_layer
from tritium.layers.group_norm import group_norm_silu
from tritium.layers.layer_norm import fast_layernorm, layernorm_scale_shift
from tritium.layers.query_key import qk_norm_rope
from tritium.layers.residual import residual_norm_modulate
from tritium.layers.rms_norm import RMSNorm
from tritium.layers.rotary import rotary_position_embedding
from tritium.layers.scaled_add import muls_add


def cases(device_type: str, dtype: torch.dtype, *, small: bool) -> Iterator[Case]:
    normal = Normals(device_type, dtype, source=device_type)
    # FLUX.1 at 1024 x 1024, and a layer of SDXL's decoder there.
    tokens, heads, width = (64, 2, 64) if small else (4608, 24, 128)
    x, y = (normal(1, tokens, heads * width) for _ in range(2))
    q, k = (normal(1, tokens, heads, width) for _ in range(2))
    gate, scale, shift = (normal(1, heads * width) for _ in range(3))
    cos, sin = (normal(tokens, width).float() for _ in range(2))
    weight = normal(width)
    layer = nn.LayerNorm(heads * width, eps=1e-6, elementwise_affine=False)
    affine = nn.LayerNorm(heads * width).to(device_type, dtype)
    activation = get_activation_layer("gelu-tanh")
    rms = RMSNorm(width).to(device_type, dtype)
    image = normal(1, 32, 16, 16) if small else normal(1, 256, 512, 512)
    groups = 32
    note = f"{tokens} tokens, {heads} heads of {width}"

    def rotated(x: torch.Tensor) -> torch.Tensor:
        first, second = x.float().chunk(2, -1)
        turned = torch.cat([-second, first], -1)
        return (x.float() * cos[None, :, None] + turned * sin[None, :, None]).to(x.dtype)

    def residual() -> torch.Tensor:
        stream = x + gate[:, None] * y
        return F.layer_norm(stream, (stream.shape[-1],), None, None, 1e-6) * (1 + scale[:, None]) + shift[:, None]

    def normed(x: torch.Tensor) -> torch.Tensor:
        return rotated(F.rms_norm(x, (width,), weight, 1e-6))

    def both() -> torch.Tensor:
        # Both are computed, and the second is compared.
        return [normed(q), normed(k)][1]

    yield _case(
        "rotary_position_embedding", note, {"x": q}, lambda: rotated(q),
        lambda: rotary_position_embedding(q, cos, sin),
        "rope", (q, cos[None, :, None], sin[None, :, None], "half", False, None),
    )  # fmt: skip
    yield _case(
        "RMSNorm", note, {"x": q}, lambda: F.rms_norm(q, (width,), rms.weight, 1e-6), lambda: rms(q),
        "rms_norm", (q, rms.weight, 1e-6, None),
    )  # fmt: skip
    yield _case(
        "fast_layernorm", note, {"x": x}, lambda: affine(x), lambda: fast_layernorm(affine, x),
        F.layer_norm, (x, affine.normalized_shape, affine.weight, affine.bias, affine.eps),
    )  # fmt: skip
    yield _case(
        "layernorm_scale_shift", note, {"x": x},
        lambda: layer(x) * (1 + scale[:, None]) + shift[:, None],
        lambda: layernorm_scale_shift(layer, x, scale, shift),
        "ada_norm", (x, None, None, scale[:, None], shift[:, None], 1e-6, "layer", None),
    )  # fmt: skip
    yield _case(
        "gelu-tanh", note, {"x": x}, lambda: F.gelu(x, approximate="tanh"), lambda: activation(x),
        functools.partial(F.gelu, approximate="tanh"), (x,),
    )  # fmt: skip
    yield _case(
        "muls_add", note, {"x": x}, lambda: x * 0.5 + y, lambda: muls_add(x, y, 0.5), "scaled_add", (x, 0.5, y, None)
    )
    yield _case(
        "residual_norm_modulate", note, {"x": x}, residual,
        lambda: residual_norm_modulate(x, y, gate, scale, shift)[1],
        "residual_norm_modulate",
        (x, y, gate[:, None], None, None, scale[:, None], shift[:, None], 1e-6, "layer", None, None),
    )  # fmt: skip
    yield _case(
        "qk_norm_rope", note, {"q": q, "k": k}, both,
        lambda: qk_norm_rope(q, k, weight, weight, cos[None], sin[None], rope="half")[1],
        "qk_norm_rope", ([q], [k], [weight], [weight], [cos[None]], [sin[None]], 1e-6, "head", "half", False),
    )  # fmt: skip
    yield _case(
        "group_norm_silu", f"{image.shape[1]} channels", {"x": image}, lambda: F.silu(F.group_norm(image, groups)),
        lambda: group_norm_silu(image, groups), "group_norm_silu", (image, groups, None, None, 1e-5, None),
    )  # fmt: skip


def _case(
    name: str,
    note: str,
    tensors: dict[str, torch.Tensor],
    eager: Callable[[], torch.Tensor],
    ours: Callable[[], torch.Tensor],
    reference: str | Callable[..., Any],
    arguments: tuple[Any, ...],
) -> Case:
    """Make a case; `reference` is the name of an op, or PyTorch's function for it."""
    function = ops.catalog()[reference].reference if isinstance(reference, str) else reference
    compiled = functools.partial(_of_pair, torch.compile(function), arguments)
    variants: dict[str, Callable[[], torch.Tensor]] = {"eager": eager, "inductor": compiled, "tritium": ours}
    return Case(name, variants, note, shapes_of(tensors))


def _of_pair(function: Callable[..., Any], arguments: tuple[Any, ...]) -> torch.Tensor:
    """Return the tensor to compare: the last result of a function that returns several."""
    out = function(*arguments)
    if isinstance(out, tuple):
        return out[-1]  # type: ignore[no-any-return]
    return out  # type: ignore[no-any-return]
