"""DiT, the transformer over classes of images."""

from tritium.models.family import Blocks, Cut, Family, ParallelFacts, TensorFacts

FAMILY = Family(
    name="dit",
    denoisers=("DiTTransformer2DModel",),
    blocks=("BasicTransformerBlock",),
    tensor=TensorFacts(
        columns={r"attn1\.to_[qkv]": (), r"ff\.net\.0\.proj": ()},
        rows={r"attn1\.to_out\.0": (), r"ff\.net\.2": ()},
    ),
    parallel=ParallelFacts(sections=((Blocks(path="transformer_blocks", streams={"hidden_states": Cut()}),),)),
)
