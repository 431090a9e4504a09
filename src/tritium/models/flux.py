"""FLUX.1 and models of the same architecture: double blocks, then single blocks."""

from tritium.models.family import Family, TensorFacts

FAMILY = Family(
    name="flux",
    denoisers=("FluxTransformer2DModel",),
    blocks=("FluxTransformerBlock", "FluxSingleTransformerBlock"),
    tensor=TensorFacts(
        columns={r"attn\.(to_[qkv]|add_[qkv]_proj)": (), r"ff(_context)?\.net\.0\.proj": (), "proj_mlp": ()},
        rows={
            r"attn\.(to_out\.0|to_add_out)": (),
            r"ff(_context)?\.net\.2": (),
            "proj_out": ("attn.inner_dim", "proj_mlp.out_features"),
        },
    ),
)
