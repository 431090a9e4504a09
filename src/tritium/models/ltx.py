"""LTX-Video."""

from tritium.models.family import Family, TensorFacts

FAMILY = Family(
    name="ltx",
    denoisers=("LTXVideoTransformer3DModel",),
    blocks=("LTXVideoTransformerBlock",),
    tensor=TensorFacts(
        columns={r"attn[12]\.to_[qkv]": (), r"ff\.net\.0\.proj": ()},
        rows={r"attn[12]\.to_out\.0": (), r"ff\.net\.2": ()},
        norms=(r"attn[12]\.norm_[qk]",),
        tables=("image_rotary_emb",),
    ),
)
