"""Declare the shapes that `handle.warmup()` compiles."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from tritium.config import keywords_only
from tritium.errors import ConfigError, nearest

OnViolation = Literal["compile", "eager", "error"]
WAYS: tuple[OnViolation, ...] = get_args(OnViolation)


@dataclass(frozen=True)
class Bucket:
    height: int
    width: int
    batch: int
    text_tokens: int | None = None

    def __str__(self) -> str:
        text = f", {self.text_tokens} text tokens" if self.text_tokens is not None else ""
        return f"{self.height} x {self.width}, batch {self.batch}{text}"


@keywords_only
@dataclass(frozen=True, kw_only=True)
class Shapes:
    """Image sizes, batch sizes and prompt lengths that `handle.warmup()` compiles.

    Args:
        sizes: Pairs of height and width, one pair, or one integer for a square image. For a `range`, every pair of its
            values.
        batch: `num_images_per_prompt`: an integer or several.
        text_tokens: `max_sequence_length`: an integer or several; empty for the pipeline's default.
        on_violation: The reaction to a call with other shapes, or to one that would compile: compile, run eagerly, or
            raise an error. The report lists it in any case.

    >>> [str(bucket) for bucket in Shapes(sizes=range(64, 129, 64)).buckets]
    ['128 x 128, batch 1', '64 x 128, batch 1', '128 x 64, batch 1', '64 x 64, batch 1']
    >>> [str(bucket) for bucket in Shapes(sizes=(512, 768), batch=2, text_tokens=512).buckets]
    ['512 x 768, batch 2, 512 text tokens']
    """

    sizes: Iterable[tuple[int, int]] | tuple[int, int] | range | int
    batch: Iterable[int] | int = (1,)
    text_tokens: Iterable[int] | int = ()
    on_violation: OnViolation = "compile"

    def __post_init__(self) -> None:
        if self.on_violation not in WAYS:
            raise ConfigError(f"on_violation cannot be {self.on_violation!r}; {nearest(str(self.on_violation), WAYS)}")
        object.__setattr__(self, "sizes", _sizes(self.sizes))
        object.__setattr__(self, "batch", _counts("batch", self.batch))
        if not self.batch:
            raise ConfigError(
                "Shapes.batch is empty: no call would be inside the contract; leave it out for a batch of 1"
            )
        object.__setattr__(self, "text_tokens", _counts("text_tokens", self.text_tokens))

    @property
    def buckets(self) -> list[Bucket]:
        """Return every combination, largest images first: smaller ones can then reuse the memory."""
        found = []
        sizes: Any = self.sizes
        batches: Any = self.batch
        texts: Any = self.text_tokens or (None,)
        for (height, width), batch, text in itertools.product(sizes, batches, texts):
            found.append(Bucket(height, width, batch, text))
        return sorted(found, key=lambda bucket: -bucket.height * bucket.width * bucket.batch)


# No larger image can be allocated, and torch's size arithmetic would overflow.
_LARGEST = 2**31 - 1


def _sizes(value: Any) -> tuple[tuple[int, int], ...]:
    """Return the sizes as a tuple of pairs, or raise a `ConfigError`."""
    if isinstance(value, tuple) and _is_pair(value):
        return (value,)
    if _is_size(value):
        return ((value, value),)
    advice = "Shapes.sizes takes pairs of height and width, one such pair, an integer for a square image, or a range"
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise ConfigError(f"{advice}; got {value!r}")
    items = list(itertools.product(value, repeat=2)) if isinstance(value, range) else list(value)
    if not items:
        raise ConfigError(f"{advice}; got none, so no call would be inside the contract")
    for item in items:
        if not _is_pair(item):
            raise ConfigError(f"{advice}; got {item!r} among them")
    return tuple(dict.fromkeys((height, width) for height, width in items))


def _counts(name: str, value: Any) -> tuple[int, ...]:
    """Return one or several integers above 0 as a tuple, or raise a `ConfigError`."""
    if _is_size(value):
        return (value,)
    items = list(value) if isinstance(value, Iterable) and not isinstance(value, str) else [value]
    for item in items:
        if not _is_size(item):
            raise ConfigError(f"Shapes.{name} takes an integer above 0, or several; got {item!r}")
    return tuple(dict.fromkeys(items))


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= _LARGEST


def _is_pair(value: object) -> bool:
    return isinstance(value, Sequence) and len(value) == 2 and all(_is_size(part) for part in value)
