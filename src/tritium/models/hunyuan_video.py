"""HunyuanVideo: double and single blocks, and a refiner of the prompt's tokens."""

from tritium.models.family import Family

FAMILY = Family(
    name="hunyuan_video",
    denoisers=("HunyuanVideoTransformer3DModel",),
    blocks=(
        "HunyuanVideoTransformerBlock",
        "HunyuanVideoSingleTransformerBlock",
        # The image-to-video form, which replaces the first frame's tokens.
        "HunyuanVideoTokenReplaceTransformerBlock",
        "HunyuanVideoTokenReplaceSingleTransformerBlock",
    ),
)
