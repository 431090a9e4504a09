"""Sparse attention at chosen densities against dense attention, on the shape of Wan's self-attention.

Every variant is four steps, because a mask may serve for four: `tritium` makes one mask and reorders the tokens in every
step, `a mask each step` makes four, `permuted once` is given tokens in the order of blocks, `lists given` is the kernel
alone. The relative L2 is the loss against dense attention on random numbers, which have no structure to keep.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch

from tritium import ops
from tritium.bench.layer_functions import Case
from tritium.bench.workload import Normals, shapes_of
from tritium.layers.sparse import masks
from tritium.layers.sparse.choose import attend
from tritium.layers.sparse.forward import lists_of
from tritium.layers.sparse.layout import SparseLayout
from tritium.layers.sparse.schedule import SparseAttention

STEPS = 4
DENSITIES = (0.5, 0.25)

# Wan at 81 frames of 480 x 832.
LATENT, HEADS, WIDTH, BLOCK = (21, 30, 52), 40, 128, 128
SMALL_LATENT, SMALL_HEADS, SMALL_WIDTH, SMALL_BLOCK = (9, 10, 12), 2, 64, 16


def cases(device_type: str, dtype: torch.dtype, *, small: bool) -> Iterator[Case]:
    for density in DENSITIES:
        yield case(density, device_type, dtype, small=small)


def case(density: float, device_type: str, dtype: torch.dtype, *, small: bool) -> Case:
    latent, heads, width, block = (
        (SMALL_LATENT, SMALL_HEADS, SMALL_WIDTH, SMALL_BLOCK) if small else (LATENT, HEADS, WIDTH, BLOCK)
    )
    layout, normal = SparseLayout(latent, 0, block), Normals(device_type, dtype, source=device_type)
    q, k, v = (normal(1, layout.tokens, heads, width) for _ in range(3))
    scale = width**-0.5
    ordered = [layout.permute(tensor) for tensor in (q, k, v)]
    sparsity = sparsity_for(density, ordered[0], ordered[1], layout, scale)
    mask = masks.rainfusion(ordered[0], ordered[1], layout, layout, scale, sparsity)
    edges = layout.edges(device_type)
    lists = lists_of(mask, edges, edges, block, 1, causal=False)
    dense_names = {"cuda": "cudnn", "cpu": "sdpa"}
    op = ops.catalog()["attention"]
    given = op.bind(*(tensor.transpose(1, 2) for tensor in (q, k, v)), None, scale, False)
    providers = ops.providers(op)
    dense = dense_names[device_type] if providers[dense_names[device_type]].decline(given) is None else "sdpa"

    def dense_step(step: int) -> torch.Tensor:
        del step
        return providers[dense].run(given).transpose(1, 2)  # type: ignore[union-attr]

    def scheduled(**options: int | bool | str) -> Callable[[int], torch.Tensor]:
        attention = SparseAttention(layout, sparsity=sparsity, **options)  # type: ignore[arg-type]
        streams = ordered if options.get("permuted") else (q, k, v)

        def one(step: int) -> torch.Tensor:
            if step == 0:
                attention.reset()
            return attention(*streams, step=step, layer=0)

        return one

    def listed(step: int) -> torch.Tensor:
        del step
        return attend(ordered[0], ordered[1], ordered[2], lists, edges, edges, block, scale)

    steps = {
        f"dense {dense}": dense_step,
        "tritium": scheduled(reuse_steps=STEPS),
        "a mask each step": scheduled(),
        "permuted once": scheduled(reuse_steps=STEPS, permuted=True),
        "lists given": listed,
    }
    if device_type == "cuda":
        steps["flex"] = scheduled(reuse_steps=STEPS, by="flex")
    share = float(masks.density(mask, layout, layout))
    return Case(
        name=f"density {density}",
        variants={name: functools.partial(_four, one) for name, one in steps.items()},
        note=f"{STEPS} steps of {layout.tokens} tokens, {heads} heads of {width}, effective density {share:.3f}",
        shapes=shapes_of({"q": q, "k": k, "v": v}),
        optional=frozenset({"flex"}),
    )


def _four(one: Callable[[int], torch.Tensor]) -> torch.Tensor:
    out = one(0)
    for step in range(1, STEPS):
        out = one(step)
    return out


def sparsity_for(density: float, q: torch.Tensor, k: torch.Tensor, layout: SparseLayout, scale: float) -> float:
    """Return the sparsity that gives an effective density, which includes the first frame: it is always seen."""
    low, high = 0.0, 1.0
    for _ in range(12):
        middle = (low + high) / 2
        found = float(masks.density(masks.rainfusion(q, k, layout, layout, scale, middle), layout, layout))
        low, high = (middle, high) if found > density else (low, middle)
    return low
