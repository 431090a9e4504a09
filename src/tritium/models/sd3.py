"""Stable Diffusion 3 and 3.5."""

from tritium.models.family import Family, TensorFacts

FAMILY = Family(
    name="sd3",
    denoisers=("SD3Transformer2DModel",),
    blocks=("JointTransformerBlock",),
    tensor=TensorFacts(
        columns={r"attn2?\.(to_[qkv]|add_[qkv]_proj)": (), r"ff(_context)?\.net\.0\.proj": ()},
        rows={r"attn2?\.(to_out\.0|to_add_out)": (), r"ff(_context)?\.net\.2": ()},
    ),
)
