"""Mochi: blocks over a video and the text, of which each sample has its own number of tokens."""

from tritium.models.family import Blocks, Cut, Family, ParallelFacts

FAMILY = Family(
    name="mochi",
    denoisers=("MochiTransformer3DModel",),
    blocks=("MochiTransformerBlock",),
    parallel=ParallelFacts(
        sections=(
            (
                # The text's tokens are picked by the mask of each sample: each rank computes all of them.
                Blocks(
                    path="transformer_blocks",
                    streams={"hidden_states": Cut()},
                    tables={"image_rotary_emb": Cut(dim=0)},
                    outputs=("hidden_states", None),
                    eager="its attention reads the lengths of prompts",
                ),
            ),
        )
    ),
)
