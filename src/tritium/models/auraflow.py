"""AuraFlow: double blocks, then single blocks over text and image."""

from tritium.models.family import Blocks, Cut, Family, ParallelFacts

FAMILY = Family(
    name="auraflow",
    denoisers=("AuraFlowTransformer2DModel",),
    blocks=("AuraFlowJointTransformerBlock",),
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
