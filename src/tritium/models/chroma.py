"""Chroma: FLUX blocks without a guidance embedding, modulated by an approximator network."""

from tritium.models.family import Family

FAMILY = Family(
    name="chroma",
    denoisers=("ChromaTransformer2DModel",),
    blocks=("ChromaTransformerBlock", "ChromaSingleTransformerBlock"),
)
