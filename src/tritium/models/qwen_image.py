"""Qwen-Image: one kind of block over image and text."""

from tritium.models.family import Family

FAMILY = Family(
    name="qwen_image",
    denoisers=("QwenImageTransformer2DModel",),
    blocks=("QwenImageTransformerBlock",),
    left={"pos_embed": "keeps its complex tables in a cache of its own: nothing is computed a second time"},
)
