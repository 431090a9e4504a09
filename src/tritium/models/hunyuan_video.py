"""HunyuanVideo: double and single blocks, and a refiner for the prompt's tokens."""

from tritium.models.family import Family

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
)
