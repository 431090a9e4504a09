"""PixArt-alpha and PixArt-sigma."""

from tritium.models.family import Blocks, Cut, Family, ParallelFacts, TensorFacts

FAMILY = Family(
    name="pixart",
    denoisers=("PixArtTransformer2DModel",),
    blocks=("BasicTransformerBlock",),
    tensor=TensorFacts(
        columns={r"attn[12]\.to_[qkv]": (), r"ff\.net\.0\.proj": ()},
        rows={r"attn[12]\.to_out\.0": (), r"ff\.net\.2": ()},
    ),
    parallel=ParallelFacts(sections=((Blocks(path="transformer_blocks", streams={"hidden_states": Cut()}),),)),
)
