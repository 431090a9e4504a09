"""All candidates for attention on the shapes of known models, and the choice of `attention_forward`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from tritium import ops
from tritium.bench.layer_functions import Case
from tritium.bench.workload import Normals, shapes_of
from tritium.layers.attention.choose import Mode
from tritium.layers.attention.forward import attention_forward
from tritium.ops.attention.trial import skip


@dataclass(frozen=True)
class Shape:
    """One attention: tokens of query and key, heads and their width."""

    name: str
    queries: int
    keys: int
    heads: int
    width: int
    mask: bool = False
    causal: bool = False


SHAPES = (
    Shape("FLUX", 4608, 4608, 24, 128),
    Shape("Wan", 32_760, 32_760, 40, 128),
    Shape("SDXL", 4096, 4096, 10, 64),
    Shape("Wan to its prompt", 32_760, 512, 40, 128),
    Shape("FLUX, masked", 4608, 4608, 24, 128, mask=True),
    Shape("FLUX, causal", 4608, 4608, 24, 128, causal=True),
    Shape("a VAE's head of 512 at 512 x 512", 4096, 4096, 1, 512),
    Shape("a VAE's head of 512 at 1024 x 1024", 16_384, 16_384, 1, 512),
)


def cases(device_type: str, dtype: torch.dtype, *, small: bool) -> Iterator[Case]:
    for shape in SHAPES:
        yield case(shape, device_type, dtype, small=small)


def case(shape: Shape, device_type: str, dtype: torch.dtype, *, small: bool) -> Case:
    shrink = 32 if small else 1
    queries, keys = shape.queries // shrink, shape.keys // shrink
    heads = min(shape.heads, 2) if small else shape.heads
    normal = Normals(device_type, dtype, source=device_type)
    # Tokens before heads, the layout that projections produce.
    q, k, v = (normal(1, tokens, heads, shape.width) for tokens in (queries, keys, keys))
    mask = torch.arange(keys, device=device_type).view(1, 1, 1, -1) < keys - keys // 8 if shape.mask else None
    first, second, third = (tensor.transpose(1, 2) for tensor in (q, k, v))
    scale = shape.width**-0.5
    op = ops.catalog()["attention"]
    given = op.bind(first, second, third, mask, scale, shape.causal)
    providers = ops.providers(op)
    names = [name for name, provider in providers.items() if not (provider.decline(given) or skip(name, given, False))]
    # PyTorch is called directly; the others run through `attention_forward`, so that only the choices differ.
    variants: dict[str, Callable[[], Any]] = {"sdpa": functools.partial(providers["sdpa"].run, given)}
    for name in names:
        if name not in variants:
            manual: dict[str, Any] = {"opt_mode": "manual", "op_type": name}
            variants[name] = functools.partial(
                attention_forward, first, second, third, mask, head_first=True, is_causal=shape.causal, **manual
            )
    modes: tuple[tuple[Mode, str], ...] = (("runtime", "tritium"), ("static", "tritium static"))
    for mode, name in modes:
        variants[name] = functools.partial(
            attention_forward, first, second, third, mask, head_first=True, is_causal=shape.causal, opt_mode=mode
        )
    return Case(
        name=shape.name,
        variants=variants,
        note=f"{queries} x {keys} tokens, {heads} heads of {shape.width}",
        shapes=shapes_of({"q": q, "k": k, "v": v, "mask": mask}),
        optional=frozenset(names) - {"sdpa"},
    )
