"""Qwen-Image: blocks of one class over image and text tokens."""

from tritium.models.family import Blocks, Cut, Family, ParallelFacts, TensorFacts

FAMILY = Family(
    name="qwen_image",
    denoisers=("QwenImageTransformer2DModel",),
    blocks=("QwenImageTransformerBlock",),
    left={"pos_embed": "keeps its complex tables in a cache of its own: nothing is computed a second time"},
    # SGLang and vLLM-Omni leave it in bfloat16 beside float8 (vllm-omni#2728); int8 needed no exception (vllm-omni#1470).
    precise=(r"img_mlp\.net\.2$",),
    tensor=TensorFacts(
        columns={r"attn\.(to_[qkv]|add_[qkv]_proj)": (), r"(img|txt)_mlp\.net\.0\.proj": ()},
        rows={r"attn\.(to_out\.0|to_add_out)": (), r"(img|txt)_mlp\.net\.2": ()},
    ),
    parallel=ParallelFacts(
        sections=(
            (
                Blocks(
                    path="transformer_blocks",
                    streams={"hidden_states": Cut(), "encoder_hidden_states": Cut(("encoder_hidden_states",))},
                    tables={
                        "image_rotary_emb": (Cut(dim=0), Cut(("encoder_hidden_states",), dim=0)),
                        "modulate_index": Cut(),
                        # Each attention joins it with as many ones as a rank has tokens of the image.
                        "encoder_hidden_states_mask": Cut(("encoder_hidden_states",)),
                    },
                    outputs=("encoder_hidden_states", "hidden_states"),
                ),
            ),
        ),
        arguments={"controlnet_block_samples": Cut()},
    ),
)
