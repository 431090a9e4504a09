"""The properties of an attention call without tensor values, the key of choices and measurements."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tritium.layers import checks
from tritium.ops.op import present

# Memory layouts. BSH, with merged heads, has the same bytes as BSND.
LAYOUTS = ("BNSD", "BSND", "BSH")


@dataclass(frozen=True)
class Request:
    """One attention call; symbolic sizes are replaced by their values in the call that is being compiled."""

    device: str
    dtype: torch.dtype
    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    width: int
    value_width: int
    # None, or the mask's shape as [B or 1, N or 1, Sq or 1, Sk].
    mask: tuple[int, int, int, int] | None
    # Whether the mask is added to the scores; otherwise True keeps a score.
    additive: bool
    # Whether the mask's dtype differs from the query's (float32 with half precision): rounding would change the mask.
    wide_mask: bool
    causal: bool
    # The layout in memory: BNSD or BSND.
    memory: str
    # Whether the elements of a head are contiguous.
    packed: bool
    grad: bool
    # Whether a size is symbolic: no loop can run over it.
    symbolic: bool

    @classmethod
    def of(cls, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, causal: bool) -> Request:
        """Return the request for heads-first tensors, real or fake; `mask` has rank 4 and broadcasts."""
        batch, heads, queries, width = map(present, q.shape)
        tensors = [tensor for tensor in (q, k, v, mask) if tensor is not None]
        return cls(
            device=q.device.type,
            dtype=q.dtype,
            batch=batch,
            heads=heads,
            kv_heads=present(k.shape[1]),
            queries=queries,
            keys=present(k.shape[2]),
            width=width,
            value_width=present(v.shape[3]),
            mask=None if mask is None else tuple(map(present, mask.shape)),  # type: ignore[arg-type]
            additive=mask is not None and mask.dtype != torch.bool,
            wide_mask=mask is not None and mask.dtype not in (torch.bool, q.dtype),
            causal=causal,
            memory="BSND" if present(q.stride(1)) < present(q.stride(2)) else "BNSD",
            packed=all(present(tensor.stride(3)) == 1 or present(tensor.shape[3]) == 1 for tensor in (q, k, v)),
            grad=checks.needs_gradients(*tensors),
            symbolic=any(not isinstance(size, int) for tensor in tensors for size in tensor.shape),
        )

    @property
    def grouped(self) -> bool:
        return self.heads != self.kv_heads

    @property
    def is_empty(self) -> bool:
        return 0 in (self.batch, self.heads, self.queries, self.keys, self.width, self.value_width)

    @property
    def square(self) -> bool:
        return self.queries == self.keys

    @property
    def score_bytes(self) -> int:
        """The bytes of all scores in float32."""
        return 4 * self.batch * self.heads * self.queries * self.keys

    def words(self) -> str:
        """Return a description for error messages and reports."""
        parts = [f"{self.dtype} on {self.device}", f"{self.queries} queries, {self.keys} keys"]
        parts.append(f"{self.heads} heads of {self.width}")
        if self.grouped:
            parts.append(f"{self.kv_heads} heads of keys")
        if self.mask is not None:
            parts.append(f"{'an additive' if self.additive else 'a boolean'} mask {self.mask}")
        if self.causal:
            parts.append("causal")
        return ", ".join(parts)

    def key(self) -> str:
        """Return the key of a measurement: token counts rounded to classes, everything else exact."""
        return " ".join(f"{name}={value}" for name, value in self._classes().items())

    def _classes(self) -> Mapping[str, Any]:
        mask = "none"
        if self.mask is not None:
            dims = "".join(name if size > 1 else "1" for name, size in zip("BNQK", self.mask, strict=True))
            mask = f"{'add' if self.additive else 'keep'}{'32' if self.wide_mask else ''}-{dims}"
        return {
            "dtype": str(self.dtype).removeprefix("torch."),
            "batch": self.batch,
            "heads": self.heads,
            "kv_heads": self.kv_heads,
            "queries": size_class(self.queries),
            "keys": size_class(self.keys),
            "square": int(self.square),
            "width": self.width,
            "value_width": self.value_width,
            "mask": mask,
            "causal": int(self.causal),
            "memory": self.memory if self.packed else f"{self.memory}-apart",
            "grad": int(self.grad),
        }


def size_class(tokens: int) -> int:
    """Round to the nearest of 1, 1.4, 2, 2.8, 4 ...: sizes of a class share one measurement.

    >>> [size_class(tokens) for tokens in (1, 77, 512, 4096, 4608, 32760)]
    [1, 91, 512, 4096, 4096, 32768]
    """
    return round(2 ** (round(2 * math.log2(max(1, tokens))) / 2))


def draw(
    request: Request, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return random heads-first tensors and a mask that match a request."""
    generator = torch.Generator(device).manual_seed(3)

    def random(heads: int, tokens: int, width: int) -> torch.Tensor:
        step = 1 if request.packed else 2
        shape = (request.batch, heads, tokens, step * width)
        if request.memory == "BSND":
            shape = (request.batch, tokens, heads, step * width)
        made = torch.randn(shape, generator=generator, device=device, dtype=torch.float32).to(request.dtype)
        made = made[..., ::step]
        return made.transpose(1, 2) if request.memory == "BSND" else made

    q = random(request.heads, request.queries, request.width)
    k = random(request.kv_heads, request.keys, request.width)
    v = random(request.kv_heads, request.keys, request.value_width)
    if request.mask is None:
        return q, k, v, None
    kept = torch.rand(request.mask, generator=generator, device=device) < 0.75
    # Leave every row a key: candidates differ in the result of a row without one.
    kept[..., 0] = True
    if not request.additive:
        return q, k, v, kept
    dtype = torch.float32 if request.wide_mask else request.dtype
    return q, k, v, torch.zeros(request.mask, device=device, dtype=dtype).masked_fill_(~kept, -math.inf)
