"""HunyuanVideo: double and single blocks, and a refiner for the prompt's tokens."""

from tritium.models.family import Family, TensorFacts

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
    tensor=TensorFacts(
        columns={r"attn\.(to_[qkv]|add_[qkv]_proj)": (), r"ff(_context)?\.net\.0\.proj": (), "proj_mlp": ()},
        rows={
            r"attn\.(to_out\.0|to_add_out)": (),
            r"ff(_context)?\.net\.2": (),
            "proj_out": ("attn.inner_dim", "proj_mlp.out_features"),
        },
    ),
)
