"""Stable Diffusion 3 and 3.5."""

from tritium.models.family import Blocks, Cut, Family, ParallelFacts, TensorFacts

FAMILY = Family(
    name="sd3",
    denoisers=("SD3Transformer2DModel",),
    blocks=("JointTransformerBlock",),
    tensor=TensorFacts(
        columns={r"attn2?\.(to_[qkv]|add_[qkv]_proj)": (), r"ff(_context)?\.net\.0\.proj": ()},
        rows={r"attn2?\.(to_out\.0|to_add_out)": (), r"ff(_context)?\.net\.2": ()},
    ),
    parallel=ParallelFacts(
        sections=(
            (
                Blocks(
                    path="transformer_blocks",
                    streams={"hidden_states": Cut(), "encoder_hidden_states": Cut(("encoder_hidden_states",))},
                    outputs=("encoder_hidden_states", "hidden_states"),
                ),
            ),
        ),
        arguments={"block_controlnet_hidden_states": Cut()},
    ),
)
