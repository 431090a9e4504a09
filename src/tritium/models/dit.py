"""DiT, the transformer over classes of images."""

from tritium.models.family import Blocks, Cut, Family, ParallelFacts

FAMILY = Family(
    name="dit",
    denoisers=("DiTTransformer2DModel",),
    blocks=("BasicTransformerBlock",),
    parallel=ParallelFacts(sections=((Blocks(path="transformer_blocks", streams={"hidden_states": Cut()}),),)),
)
