"""FLUX.2: double and single blocks whose modulation is shared by all blocks of a kind."""

from tritium.models.family import Blocks, Cut, Family, ParallelFacts, TensorFacts

FAMILY = Family(
    name="flux2",
    denoisers=("Flux2Transformer2DModel",),
    blocks=("Flux2TransformerBlock", "Flux2SingleTransformerBlock"),
    branches=1,
    tensor=TensorFacts(
        columns={
            r"attn\.(to_[qkv]|add_[qkv]_proj)": (),
            # A gate and a value.
            r"ff(_context)?\.linear_in": (1, 1),
            # Queries, keys, values, and a gate and a value of the feed-forward.
            r"attn\.to_qkv_mlp_proj": ("inner_dim", "inner_dim", "inner_dim", "mlp_hidden_dim", "mlp_hidden_dim"),
        },
        rows={
            r"attn\.(to_out\.0|to_add_out)": (),
            r"ff(_context)?\.linear_out": (),
            r"attn\.to_out": ("inner_dim", "mlp_hidden_dim"),
        },
        counts=("heads", "inner_dim", "mlp_hidden_dim"),
    ),
    parallel=ParallelFacts(
        sections=(
            (
                Blocks(
                    path="transformer_blocks",
                    streams={"hidden_states": Cut(), "encoder_hidden_states": Cut(("encoder_hidden_states",))},
                    tables={"image_rotary_emb": Cut(("encoder_hidden_states", "hidden_states"), dim=0)},
                    outputs=("encoder_hidden_states", "hidden_states"),
                ),
                # After the text.
                Blocks(
                    path="single_transformer_blocks",
                    streams={"hidden_states": Cut(("encoder_hidden_states", "hidden_states"))},
                    tables={"image_rotary_emb": Cut(("encoder_hidden_states", "hidden_states"), dim=0)},
                ),
            ),
        )
    ),
)
