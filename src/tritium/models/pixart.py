"""PixArt-alpha and PixArt-sigma."""

from tritium.models.family import Blocks, Cut, Family, ParallelFacts

FAMILY = Family(
    name="pixart",
    denoisers=("PixArtTransformer2DModel",),
    blocks=("BasicTransformerBlock",),
    parallel=ParallelFacts(sections=((Blocks(path="transformer_blocks", streams={"hidden_states": Cut()}),),)),
)
