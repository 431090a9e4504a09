"""The reference and samples of `qk_norm_rope`."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from tritium.ops import rope as rotation
from tritium.ops.op import Sample

HEAD, ROW, NONE = NORMS = ("head", "row", "none")
ROPES = (rotation.INTERLEAVED, rotation.HALF, rotation.COMPLEX, NONE)


def reference(
    q: list[torch.Tensor],
    k: list[torch.Tensor],
    q_weights: list[torch.Tensor | None],
    k_weights: list[torch.Tensor | None],
    tables: list[torch.Tensor | None],
    sines: list[torch.Tensor | None],
    eps: float,
    norm: str,
    rope: str,
    heads_first: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    if norm not in NORMS or rope not in ROPES:
        raise ValueError(f"norm {norm!r} is none of {', '.join(NORMS)}, or rope {rope!r} none of {', '.join(ROPES)}")
    given = [t for t in (*q, *k, *q_weights, *k_weights, *tables, *sines) if t is not None]
    wide = functools.reduce(torch.promote_types, (t.real.dtype for t in given), torch.float32)
    lengths = [part.shape[1] for part in q]
    rotations = list(zip(_each_part(tables, lengths), _each_part(sines, lengths), strict=True))

    def joined(parts: list[torch.Tensor], weights: list[torch.Tensor | None]) -> torch.Tensor:
        done = []
        for x, weight, (table, sine) in zip(parts, weights, rotations, strict=True):
            value = _normed(x.to(wide), weight, eps, norm)
            if table is not None and rope != NONE:
                over_heads = None if sine is None else sine.unsqueeze(2)
                value = rotation.reference(value, table.unsqueeze(2), over_heads, rope, False, None)
            done.append(value.to(parts[0].dtype))
        out = torch.cat(done, dim=1)
        return out.transpose(1, 2) if heads_first else out

    return joined(q, q_weights), joined(k, k_weights)


def _each_part(tables: list[torch.Tensor | None], lengths: list[int]) -> list[torch.Tensor | None]:
    if len(tables) == len(lengths):
        return tables
    [whole] = tables
    return [None] * len(lengths) if whole is None else [*whole.split(lengths, dim=1)]


def _normed(x: torch.Tensor, weight: torch.Tensor | None, eps: float, norm: str) -> torch.Tensor:
    if norm != NONE:
        x = x * torch.rsqrt(x.square().mean((-2, -1) if norm == ROW else -1, keepdim=True) + eps)
    if weight is None:
        return x
    return x * (weight.view(x.shape[-2:]) if norm == ROW else weight)


def samples(dtype: torch.dtype, device_type: str) -> Iterator[Sample]:
    generator = torch.Generator(device_type).manual_seed(41)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device_type, dtype=torch.float32)

    def arguments(
        tokens: Sequence[int],
        heads: int,
        width: int,
        norm: str,
        rope: str,
        *,
        batch: int = 1,
        k_heads: int | None = None,
        table_batch: int = 1,
        table_width: int | None = None,
        tables: torch.dtype = torch.float32,
        weighted: bool = True,
        rotated: Sequence[bool] = (True, True),
        heads_first: bool = False,
    ) -> dict[str, Any]:
        def weights(heads: int) -> list[torch.Tensor | None]:
            size = heads * width if norm == ROW else width
            return [random(size).to(dtype) if weighted else None for _ in tokens]

        def table(length: int) -> torch.Tensor:
            if rope == rotation.COMPLEX:
                return torch.view_as_complex(random(table_batch, length, width // 2, 2))
            return random(table_batch, length, table_width or width).to(tables)

        turned = [rope != NONE and turns for turns in rotated[: len(tokens)]]
        return {
            "q": [random(batch, length, heads, width).to(dtype) for length in tokens],
            "k": [random(batch, length, k_heads or heads, width).to(dtype) for length in tokens],
            "q_weights": weights(heads),
            "k_weights": weights(k_heads or heads),
            "tables": [table(n) if turns else None for n, turns in zip(tokens, turned, strict=True)],
            "sines": [
                table(n) if turns and rope != rotation.COMPLEX else None
                for n, turns in zip(tokens, turned, strict=True)
            ],
            "eps": 1e-6,
            "norm": norm,
            "rope": rope,
            "heads_first": heads_first,
        }

    for rope in (rotation.INTERLEAVED, rotation.HALF):
        for width in (2, 60, 72, 100, 126, 128):
            yield Sample(f"{rope}, heads of {width}", arguments((2,), 3, width, HEAD, rope))
        yield Sample(f"{rope}, one number a pair", arguments((1, 3), 3, 60, HEAD, rope, table_width=30))
        yield Sample(f"{rope}, odd pairs", arguments((2,), 5, 126, ROW, rope, table_width=63, heads_first=True))
        yield Sample(f"{rope}, narrow tables", arguments((2,), 3, 64, HEAD, rope, tables=dtype))
        yield Sample(f"{rope}, no norm", arguments((2, 1), 3, 64, NONE, rope, weighted=False))
        yield Sample(f"{rope}, one part rotated", arguments((2, 1), 3, 64, HEAD, rope, rotated=(True, False)))
    yield Sample("wide heads", arguments((1, 7), 1, 256, HEAD, rotation.INTERLEAVED))
    yield Sample("tables a sample", arguments((2, 1), 3, 64, HEAD, rotation.INTERLEAVED, batch=2, table_batch=2))
    yield Sample("no weights", arguments((2,), 3, 64, HEAD, rotation.INTERLEAVED, batch=2, weighted=False))
    yield Sample("fewer k heads", arguments((2,), 12, 64, HEAD, rotation.COMPLEX, k_heads=3, heads_first=True))
    yield Sample("fewer k heads, rows", arguments((2,), 12, 64, ROW, rotation.HALF, k_heads=3))
    yield Sample("three parts", arguments((1, 2, 1), 3, 64, HEAD, rotation.HALF, rotated=(True, False, True)))
    yield Sample("FLUX", arguments((1, 2), 24, 128, HEAD, rotation.INTERLEAVED))
    yield Sample("FLUX.2: heads first", arguments((1, 2), 48, 128, HEAD, rotation.INTERLEAVED, heads_first=True))
    yield Sample(
        "HunyuanVideo: only the image", arguments((2, 1), 24, 128, HEAD, rotation.COMPLEX, rotated=(True, False))
    )
    yield Sample("SD3: no rotation", arguments((2, 1), 38, 64, HEAD, NONE, heads_first=True))
    yield Sample("Wan", arguments((2,), 40, 128, ROW, rotation.INTERLEAVED))
    yield Sample("Wan: rows of 3072", arguments((2,), 24, 128, ROW, rotation.COMPLEX))
    yield Sample("Wan: across attention", arguments((2,), 40, 128, ROW, NONE))
    qwen = arguments((1, 2), 24, 128, HEAD, rotation.COMPLEX)
    yield Sample("Qwen-Image", qwen)
    pairs = [None if t is None else torch.view_as_real(t) for t in qwen["tables"]]
    yield Sample("Qwen-Image: real pairs", {**qwen, "tables": pairs})
    yield Sample("one table for both parts", {**qwen, "tables": [torch.cat(qwen["tables"], 1)], "sines": [None]})
    yield Sample("conjugated", {**qwen, "tables": [t.conj() for t in qwen["tables"]]})
    strided = arguments((7, 2), 3, 60, HEAD, rotation.INTERLEAVED, batch=2)
    strided["q"] = [random(2, 3, 7, 60).to(dtype).transpose(1, 2), random(2, 2, 9, 60).to(dtype)[:, :, 3:6]]
    strided["k"][0] = random(2, 7, 60, 3).to(dtype).transpose(2, 3)
    strided["sines"][1] = random(1, 60, 2).transpose(1, 2)
    yield Sample("transposed", strided)
    yield Sample("no text", arguments((0, 2), 3, 64, HEAD, rotation.INTERLEAVED))
    yield Sample("nothing", arguments((0,), 3, 64, HEAD, rotation.INTERLEAVED, batch=2))
