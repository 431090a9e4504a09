"""Cosmos: video models with a timestep for each frame."""

from tritium.models.family import Blocks, Cut, Family, ParallelFacts

FAMILY = Family(
    name="cosmos",
    denoisers=("CosmosTransformer3DModel",),
    blocks=("CosmosTransformerBlock",),
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
