"""HunyuanVideo: double and single blocks, and a refiner for the prompt's tokens."""

from tritium.models.family import Blocks, Cut, Family, ParallelFacts, TensorFacts

FAMILY = Family(
    name="hunyuan_video",
    denoisers=("HunyuanVideoTransformer3DModel",),
    blocks=(
        "HunyuanVideoTransformerBlock",
        "HunyuanVideoSingleTransformerBlock",
        # The image-to-video variant, which replaces the first frame's tokens.
        "HunyuanVideoTokenReplaceTransformerBlock",
        "HunyuanVideoTokenReplaceSingleTransformerBlock",
    ),
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
            (
                Blocks(
                    path="transformer_blocks",
                    streams={"hidden_states": Cut(), "encoder_hidden_states": Cut(("encoder_hidden_states",))},
                    tables={"freqs_cis": Cut(dim=0)},
                    masks={"attention_mask": Cut(("hidden_states", "encoder_hidden_states"), dim=-1)},
                    outputs=("hidden_states", "encoder_hidden_states"),
                ),
                Blocks(
                    path="single_transformer_blocks",
                    streams={"hidden_states": Cut(), "encoder_hidden_states": Cut(("encoder_hidden_states",))},
                    tables={"image_rotary_emb": Cut(dim=0)},
                    masks={"attention_mask": Cut(("hidden_states", "encoder_hidden_states"), dim=-1)},
                    outputs=("hidden_states", "encoder_hidden_states"),
                ),
            ),
        ),
        whole={
            "HunyuanVideoTokenReplaceTransformerBlock": "the first frame's tokens are changed apart from the others"
        },
    ),
)
