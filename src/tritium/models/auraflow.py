"""AuraFlow: double blocks, then single blocks over text and image."""

from tritium.models.family import Blocks, Cut, Family, ParallelFacts, TensorFacts

FAMILY = Family(
    name="auraflow",
    denoisers=("AuraFlowTransformer2DModel",),
    blocks=("AuraFlowJointTransformerBlock",),
    tensor=TensorFacts(
        columns={r"attn\.(to_[qkv]|add_[qkv]_proj)": (), r"ff(_context)?\.linear_[12]": ()},
        rows={r"attn\.(to_out\.0|to_add_out)": (), r"ff(_context)?\.out_projection": ()},
    ),
    parallel=ParallelFacts(
        sections=(
            (
                Blocks(
                    path="joint_transformer_blocks",
                    streams={"hidden_states": Cut(), "encoder_hidden_states": Cut(("encoder_hidden_states",))},
                    outputs=("encoder_hidden_states", "hidden_states"),
                ),
                Blocks(
                    path="single_transformer_blocks",
                    streams={"hidden_states": Cut(("encoder_hidden_states", "hidden_states"))},
                ),
                # The image's tokens are cut out by the number of a rank's text tokens.
                Blocks(path="norm_out", streams={"x": Cut()}, outputs=("x",)),
            ),
        )
    ),
)
