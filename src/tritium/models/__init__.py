"""FACTS: one file per model family, read by `tritium.pipelines`, which guesses for unknown classes."""

from __future__ import annotations

import functools
import sys

from tritium import catalog
from tritium.models.family import Codec, Family, ParallelFacts, TensorFacts


@functools.cache
def families() -> dict[str, Family]:
    """Return every model family by name."""
    found = catalog.unique(catalog.walk(sys.modules[__name__], "FAMILY", Family), "family")
    return {name: entry.value for name, entry in found.items()}


@functools.cache
def codecs() -> dict[str, Codec]:
    """Return every VAE with facts beyond its decode and encode methods, by name."""
    found = catalog.unique(catalog.walk(sys.modules[__name__], "CODEC", Codec), "codec")
    return {name: entry.value for name, entry in found.items()}


def family_of(class_name: str) -> Family | None:
    return next((family for family in families().values() if class_name in family.denoisers), None)


def parallel_of(class_name: str) -> ParallelFacts:
    """Return how a denoiser is split over ranks; a guess for unknown classes."""
    family = family_of(class_name)
    return family.parallel if family is not None else ParallelFacts()


def tensor_of(class_name: str) -> TensorFacts | None:
    """Return how the weights of a denoiser are split over ranks, or None for unknown classes."""
    family = family_of(class_name)
    return family.tensor if family is not None else None


def branches_of(class_name: str) -> int:
    """Return the branches of guidance in a step of a denoiser; 1 for unknown classes."""
    family = family_of(class_name)
    return family.branches if family is not None else 1


def codec_of(class_name: str) -> Codec | None:
    return next((codec for codec in codecs().values() if class_name in codec.classes), None)
