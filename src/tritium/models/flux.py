"""FLUX.1 and models of the same architecture: double blocks, then single blocks."""

from tritium.models.family import Family

FAMILY = Family(
    name="flux",
    denoisers=("FluxTransformer2DModel",),
    blocks=("FluxTransformerBlock", "FluxSingleTransformerBlock"),
)
