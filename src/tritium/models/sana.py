"""SANA: linear attention, and convolutions in the feed-forward layers."""

from tritium.models.family import Family, ParallelFacts

FAMILY = Family(
    name="sana",
    denoisers=("SanaTransformer2DModel",),
    blocks=("SanaTransformerBlock",),
    parallel=ParallelFacts(
        unsplit="its linear attention sums over tokens, and convolutions in its feed-forward layers mix neighbours"
    ),
)
