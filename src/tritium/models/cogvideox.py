"""CogVideoX: blocks over the text and a video."""

from tritium.models.family import Blocks, Cut, Family, ParallelFacts

FAMILY = Family(
    name="cogvideox",
    denoisers=("CogVideoXTransformer3DModel",),
    blocks=("CogVideoXBlock",),
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
