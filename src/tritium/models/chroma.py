"""Chroma: FLUX blocks without a guidance embedding, modulated by an approximator network."""

from tritium.models.family import Blocks, Cut, Family, ParallelFacts, TensorFacts

FAMILY = Family(
    name="chroma",
    denoisers=("ChromaTransformer2DModel",),
    blocks=("ChromaTransformerBlock", "ChromaSingleTransformerBlock"),
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
            (
                Blocks(
                    path="transformer_blocks",
                    streams={"hidden_states": Cut(), "encoder_hidden_states": Cut(("encoder_hidden_states",))},
                    tables={"image_rotary_emb": Cut(("encoder_hidden_states", "hidden_states"), dim=0)},
                    masks={"attention_mask": Cut(("encoder_hidden_states", "hidden_states"))},
                    outputs=("encoder_hidden_states", "hidden_states"),
                ),
                Blocks(
                    path="single_transformer_blocks",
                    streams={"hidden_states": Cut(("encoder_hidden_states", "hidden_states"))},
                    tables={"image_rotary_emb": Cut(("encoder_hidden_states", "hidden_states"), dim=0)},
                    masks={"attention_mask": Cut(("encoder_hidden_states", "hidden_states"))},
                ),
                # The image's tokens are cut out by the number of a rank's text tokens.
                Blocks(path="norm_out", streams={"x": Cut()}, outputs=("x",)),
            ),
        ),
        arguments={"controlnet_block_samples": Cut(), "controlnet_single_block_samples": Cut()},
    ),
)
