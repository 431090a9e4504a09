"""CogView4."""

from tritium.models.family import Blocks, Cut, Family, ParallelFacts, TensorFacts

FAMILY = Family(
    name="cogview4",
    denoisers=("CogView4Transformer2DModel",),
    blocks=("CogView4TransformerBlock",),
    tensor=TensorFacts(
        columns={r"attn1\.to_[qkv]": (), r"ff\.net\.0\.proj": ()},
        rows={r"attn1\.to_out\.0": (), r"ff\.net\.2": ()},
    ),
    parallel=ParallelFacts(
        sections=(
            (
                Blocks(
                    path="transformer_blocks",
                    streams={"hidden_states": Cut(), "encoder_hidden_states": Cut(("encoder_hidden_states",))},
                    tables={"image_rotary_emb": Cut(dim=0)},
                    outputs=("hidden_states", "encoder_hidden_states"),
                ),
            ),
        )
    ),
)
