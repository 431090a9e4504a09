"""Cosmos: video models with a timestep for each frame."""

from tritium.models.family import Blocks, Cut, Family, ParallelFacts, TensorFacts

FAMILY = Family(
    name="cosmos",
    denoisers=("CosmosTransformer3DModel",),
    blocks=("CosmosTransformerBlock",),
    tensor=TensorFacts(
        columns={r"attn[12]\.to_[qkv]": (), r"ff\.net\.0\.proj": ()},
        rows={r"attn[12]\.to_out\.0": (), r"ff\.net\.2": ()},
    ),
    parallel=ParallelFacts(
        sections=(
            (
                Blocks(
                    path="transformer_blocks",
                    streams={"hidden_states": Cut()},
                    tables={
                        **dict.fromkeys(("embedded_timestep", "temb"), Cut(rank=3)),
                        "image_rotary_emb": Cut(dim=0),
                        "extra_pos_emb": Cut(),
                        "controlnet_residual": Cut(),
                    },
                ),
            ),
        )
    ),
)
