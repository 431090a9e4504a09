"""FLUX.2: double and single blocks whose modulation is shared by all blocks of a kind."""

from tritium.models.family import Family

FAMILY = Family(
    name="flux2",
    denoisers=("Flux2Transformer2DModel",),
    blocks=("Flux2TransformerBlock", "Flux2SingleTransformerBlock"),
)
