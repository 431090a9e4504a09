"""Wan 2.1 and 2.2: blocks of one class over the tokens of a video."""

from tritium.models.family import Family

FAMILY = Family(
    name="wan",
    denoisers=("WanTransformer3DModel", "WanVACETransformer3DModel"),
    blocks=("WanTransformerBlock", "WanVACETransformerBlock"),
)
