"""Mochi: blocks over a video and the text, of which each sample has its own number of tokens."""

from tritium.models.family import Blocks, Cut, Family, ParallelFacts, TensorFacts

FAMILY = Family(
    name="mochi",
    denoisers=("MochiTransformer3DModel",),
    blocks=("MochiTransformerBlock",),
    tensor=TensorFacts(
        columns={
            r"attn1\.(to_[qkv]|add_[qkv]_proj)": (),
            # A gate and a value.
            r"ff(_context)?\.net\.0\.proj": (1, 1),
        },
        rows={r"attn1\.(to_out\.0|to_add_out)": (), r"ff(_context)?\.net\.2": ()},
        # [S, H, D]: each head rotates by frequencies of its own.
        tables={"image_rotary_emb": -2},
    ),
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
