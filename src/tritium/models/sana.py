"""SANA: linear attention, and convolutions in the feed-forward layers."""

from tritium.models.family import Family, ParallelFacts, TensorFacts

FAMILY = Family(
    name="sana",
    denoisers=("SanaTransformer2DModel",),
    blocks=("SanaTransformerBlock",),
    tensor=TensorFacts(
        columns={r"attn[12]\.to_[qkv]": ()},
        rows={r"attn[12]\.to_out\.0": ()},
        norms=(r"attn[12]\.norm_[qk]",),
    ),
    parallel=ParallelFacts(
        unsplit="its linear attention sums over tokens, and convolutions in its feed-forward layers mix neighbours"
    ),
)
