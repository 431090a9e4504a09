"""What shapes a pipeline will be asked for: the promise that `handle.warmup()` makes good."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from tritium.errors import ConfigError, nearest

OnViolation = Literal["compile", "eager", "error"]
WAYS: tuple[OnViolation, ...] = get_args(OnViolation)


@dataclass(frozen=True)
class Bucket:
    """One combination of sizes."""

    height: int
    width: int
    batch: int
    text_tokens: int | None = None

    def __str__(self) -> str:
        text = f", {self.text_tokens} text tokens" if self.text_tokens is not None else ""
        return f"{self.height} x {self.width}, batch {self.batch}{text}"


@dataclass(frozen=True, kw_only=True)
class Shapes:
    """The sizes of pictures, pictures at once, and text tokens that a pipeline will be asked for.

    Args:
        sizes: Heights and widths; or a `range`, each value of which is a height and a width.
        batch: `num_images_per_prompt`.
        text_tokens: `max_sequence_length`; empty for the pipeline's own.
        on_violation: What happens to a call outside of this, or one that would compile: it compiles, runs eagerly, or is
            an error. It is in the report in any case.

    >>> [str(bucket) for bucket in Shapes(sizes=range(64, 129, 64)).buckets]
    ['128 x 128, batch 1', '64 x 128, batch 1', '128 x 64, batch 1', '64 x 64, batch 1']
    """

    sizes: Sequence[tuple[int, int]] | range
    batch: Sequence[int] = (1,)
    text_tokens: Sequence[int] = ()
    on_violation: OnViolation = "compile"

    def __post_init__(self) -> None:
        if self.on_violation not in WAYS:
            raise ConfigError(f"on_violation cannot be {self.on_violation!r}; {nearest(str(self.on_violation), WAYS)}")
        if isinstance(self.sizes, range):
            object.__setattr__(self, "sizes", tuple(itertools.product(self.sizes, repeat=2)))
        if not self.sizes or not all(_is_pair(size) for size in self.sizes):
            raise ConfigError(f"Shapes.sizes takes pairs of height and width, or a range, got {self.sizes!r}")
        object.__setattr__(self, "sizes", tuple(dict.fromkeys(map(tuple, self.sizes))))  # type: ignore[arg-type]
        for name in ("batch", "text_tokens"):
            values = tuple(dict.fromkeys(getattr(self, name)))
            if not all(_is_size(value) for value in values) or (name == "batch" and not values):
                raise ConfigError(f"Shapes.{name} takes whole numbers above 0, got {getattr(self, name)!r}")
            object.__setattr__(self, name, values)

    @property
    def buckets(self) -> list[Bucket]:
        """Every combination, the largest pictures first: what they need of memory is then there for all."""
        found = []
        for size, batch, text in itertools.product(self.sizes, self.batch, self.text_tokens or (None,)):
            assert isinstance(size, tuple)
            height, width = size
            found.append(Bucket(height, width, batch, text))
        return sorted(found, key=lambda bucket: -bucket.height * bucket.width * bucket.batch)


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_pair(value: object) -> bool:
    return isinstance(value, (tuple, list)) and len(value) == 2 and all(_is_size(part) for part in value)
