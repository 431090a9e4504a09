"""Qwen-Image: blocks of one class over image and text tokens."""

from tritium.models.family import Family

FAMILY = Family(
    name="qwen_image",
    denoisers=("QwenImageTransformer2DModel",),
    blocks=("QwenImageTransformerBlock",),
    left={"pos_embed": "keeps its complex tables in a cache of its own: nothing is computed a second time"},
    # SGLang and vLLM-Omni leave it in bfloat16 beside float8 (vllm-omni#2728); int8 needed no exception (vllm-omni#1470).
    precise=(r"img_mlp\.net\.2$",),
)
