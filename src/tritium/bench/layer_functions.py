"""Layer functions as workloads: `attention` and `sparse-attention`, each a list of cases with shapes of known models.

The variants of a case run on the same tensors, interleaved. `ratio` is against the case's reference, which every note
names. On a CPU the shapes shrink, and the results say so.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from tritium import measure, ops
from tritium.bench.comparison import Comparison
from tritium.bench.results import Row
from tritium.bench.settings import Notify, Settings, silent
from tritium.bench.workload import Normals, shapes_of
from tritium.errors import brief
from tritium.layers.attention.forward import Mode, attention_forward
from tritium.layers.sparse import masks
from tritium.layers.sparse.forward import attend, lists_of
from tritium.layers.sparse.layout import SparseLayout
from tritium.layers.sparse.schedule import SparseAttention
from tritium.ops.attention.trial import skip

# A variant this many times slower than the fastest is not timed: rounds would take minutes, and a GPU that is idle for ten
# milliseconds changes its clock.
HOPELESS = 8.0


@dataclass(frozen=True)
class Case:
    """Variants of one function on one set of tensors; the first is the reference."""

    name: str
    variants: Mapping[str, Callable[[], Any]]
    note: str
    shapes: dict[str, list[int]] = field(default_factory=dict)
    # Variants that are left out if they fail or are too slow; ours and the reference are always measured.
    optional: frozenset[str] = frozenset()

    @property
    def reference(self) -> str:
        return next(iter(self.variants))


def run(name: str, settings: Settings, notify: Notify) -> list[Row]:
    """Measure every case of a workload, each built when it is reached."""
    settings.refuse_options_of_models(name, "measures functions")
    rows: list[Row] = []
    with torch.inference_mode():
        for case in CASES[name](settings.device_type, settings.dtype, small=settings.small):
            notify(f"{name}: {case.name}", 0.0)
            measured = _measure(f"{name}: {case.name}", case, settings)
            settings.on_rows(measured)
            rows += measured
            if settings.device_type == "cuda":
                torch.cuda.empty_cache()
    notify(f"{name}: done", 1.0)
    return rows


def _measure(name: str, case: Case, settings: Settings) -> list[Row]:
    where = settings.device_type
    warm: dict[str, float] = {}
    left_out: dict[str, str] = {}
    comparison = Comparison(
        workload=name,
        settings=replace(settings, cold=False),
        notify=silent,
        note=f"{case.note}; ratio against {case.reference}",
        shapes=case.shapes,
        shrunk=settings.small,
        reference=case.reference,
    )
    for variant, call in case.variants.items():
        try:
            comparison.add(variant, call).fields["mode"] = None
            comparison.result(variant)
            warm[variant] = measure.first_call(call, where)
        except Exception as error:
            # A kernel that does not support these shapes, or runs out of memory: the note says so.
            if variant not in case.optional:
                raise
            left_out[variant] = "out of memory" if isinstance(error, torch.OutOfMemoryError) else brief(error)
    for variant in sorted(case.optional & warm.keys()):
        if warm[variant] > HOPELESS * min(warm.values()):
            left_out[variant] = f"over {HOPELESS:g} times the fastest one's time"
    for variant in left_out:
        comparison.variants.pop(variant, None)
    comparison.note += "".join(f"; without {variant} ({why})" for variant, why in left_out.items())
    comparison.finish(comparison.result(case.reference), burst=5 if where == "cuda" else 1)
    return comparison.rows()


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


def attention_case(shape: Shape, device_type: str, dtype: torch.dtype, *, small: bool) -> Case:
    """Compare all candidates for attention with the choice of `attention_forward`."""
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
    names = [name for name, reason in ops.declines(op, given).items() if not (reason or skip(name, given, False))]
    given_forward = functools.partial(
        attention_forward, first, second, third, mask, head_first=True, is_causal=shape.causal
    )
    # PyTorch is called directly; the others run through `attention_forward`, so that only the choices differ.
    variants: dict[str, Callable[[], Any]] = {"sdpa": functools.partial(providers["sdpa"].run, given)}
    for name in names:
        variants.setdefault(name, functools.partial(given_forward, opt_mode="manual", op_type=name))
    modes: tuple[tuple[Mode, str], ...] = (("runtime", "tritium"), ("static", "tritium static"))
    variants |= {name: functools.partial(given_forward, opt_mode=mode) for mode, name in modes}
    return Case(
        name=shape.name,
        variants=variants,
        note=f"{queries} x {keys} tokens, {heads} heads of {shape.width}",
        shapes=shapes_of({"q": q, "k": k, "v": v, "mask": mask}),
        optional=frozenset(names) - {"sdpa"},
    )


STEPS = 4
DENSITIES = (0.5, 0.25)

# Wan at 81 frames of 480 x 832.
LATENT, HEADS, WIDTH, BLOCK = (21, 30, 52), 40, 128, 128
SMALL_LATENT, SMALL_HEADS, SMALL_WIDTH, SMALL_BLOCK = (9, 10, 12), 2, 64, 16


def sparse_case(density: float, device_type: str, dtype: torch.dtype, *, small: bool) -> Case:
    """Compare sparse attention at a density with dense attention, on the shape of Wan's self-attention.

    Every variant is four steps, because a mask may serve for four: `tritium` makes one mask and reorders the tokens in
    every step, `a mask each step` makes four, `permuted once` is given tokens in the order of blocks, `lists given` is the
    kernel alone. The relative L2 is the loss against dense attention on random numbers, which have no structure to keep.
    """
    latent, heads, width, block = (
        (SMALL_LATENT, SMALL_HEADS, SMALL_WIDTH, SMALL_BLOCK) if small else (LATENT, HEADS, WIDTH, BLOCK)
    )
    layout, normal = SparseLayout(latent, 0, block), Normals(device_type, dtype, source=device_type)
    q, k, v = (normal(1, layout.tokens, heads, width) for _ in range(3))
    scale = width**-0.5
    ordered = [layout.permute(tensor) for tensor in (q, k, v)]
    sparsity = sparsity_for(density, ordered[0], ordered[1], layout, scale)
    mask = masks.rainfusion(ordered[0], ordered[1], layout, layout, scale, sparsity)
    lists = lists_of(mask, layout, layout, 1)
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
        return attend(ordered[0], ordered[1], ordered[2], lists, layout, layout, scale)

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


CASES: dict[str, Callable[..., Iterator[Case]]] = {
    "attention": lambda *given, small: (attention_case(shape, *given, small=small) for shape in SHAPES),
    "sparse-attention": lambda *given, small: (sparse_case(density, *given, small=small) for density in DENSITIES),
}
NAMES = tuple(CASES)
