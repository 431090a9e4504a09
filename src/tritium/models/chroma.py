"""Chroma: FLUX blocks without a guidance embedding, modulated by an approximator network."""

from tritium.models.family import Family, TensorFacts

FAMILY = Family(
    name="chroma",
    denoisers=("ChromaTransformer2DModel",),
    blocks=("ChromaTransformerBlock", "ChromaSingleTransformerBlock"),
    tensor=TensorFacts(
        columns={r"attn\.(to_[qkv]|add_[qkv]_proj)": (), r"ff(_context)?\.net\.0\.proj": (), "proj_mlp": ()},
        rows={
            r"attn\.(to_out\.0|to_add_out)": (),
            r"ff(_context)?\.net\.2": (),
            "proj_out": ("attn.inner_dim", "proj_mlp.out_features"),
        },
    ),
)
