"""FLUX.1 and models of the same architecture: double blocks, then single blocks."""

from tritium.models.family import Blocks, Cut, Family, ParallelFacts, TensorFacts

FAMILY = Family(
    name="flux",
    denoisers=("FluxTransformer2DModel",),
    blocks=("FluxTransformerBlock", "FluxSingleTransformerBlock"),
    branches=1,
    tensor=TensorFacts(
        columns={r"attn\.(to_[qkv]|add_[qkv]_proj)": (), r"ff(_context)?\.net\.0\.proj": (), "proj_mlp": ()},
        rows={
            r"attn\.(to_out\.0|to_add_out)": (),
            r"ff(_context)?\.net\.2": (),
            "proj_out": ("attn.inner_dim", "proj_mlp.out_features"),
        },
    ),
    parallel=ParallelFacts(
        sections=(
            tuple(
                Blocks(
                    path=path,
                    streams={"hidden_states": Cut(), "encoder_hidden_states": Cut(("encoder_hidden_states",))},
                    tables={"image_rotary_emb": Cut(("encoder_hidden_states", "hidden_states"), dim=0)},
                    outputs=("encoder_hidden_states", "hidden_states"),
                )
                for path in ("transformer_blocks", "single_transformer_blocks")
            ),
        ),
        arguments={"controlnet_block_samples": Cut(), "controlnet_single_block_samples": Cut()},
    ),
)
