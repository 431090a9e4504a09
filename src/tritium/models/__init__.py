"""FACTS: one file a model family. `tritium.pipelines` asks; an unknown class is guessed there, not here."""

from __future__ import annotations

import functools
import sys

from tritium import catalog
from tritium.models.family import Codec, Family


@functools.cache
def families() -> dict[str, Family]:
    """Every family by name."""
    found = catalog.unique(catalog.walk(sys.modules[__name__], "FAMILY", Family), "family")
    return {name: entry.value for name, entry in found.items()}


@functools.cache
def codecs() -> dict[str, Codec]:
    """Every VAE that needs more to be said about it than that it decodes and encodes."""
    found = catalog.unique(catalog.walk(sys.modules[__name__], "CODEC", Codec), "codec")
    return {name: entry.value for name, entry in found.items()}


def family_of(class_name: str) -> Family | None:
    return next((family for family in families().values() if class_name in family.denoisers), None)


def codec_of(class_name: str) -> Codec | None:
    return next((codec for codec in codecs().values() if class_name in codec.classes), None)
