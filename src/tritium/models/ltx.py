"""LTX-Video."""

from tritium.models.family import Blocks, Cut, Family, ParallelFacts, TensorFacts

FAMILY = Family(
    name="ltx",
    denoisers=("LTXVideoTransformer3DModel",),
    blocks=("LTXVideoTransformerBlock",),
    tensor=TensorFacts(
        columns={r"attn[12]\.to_[qkv]": (), r"ff\.net\.0\.proj": ()},
        rows={r"attn[12]\.to_out\.0": (), r"ff\.net\.2": ()},
        norms=(r"attn[12]\.norm_[qk]",),
        tables={"image_rotary_emb": -1},
    ),
    parallel=ParallelFacts(
        sections=(
            (
                Blocks(
                    path="transformer_blocks",
                    streams={"hidden_states": Cut()},
                    tables={"temb": Cut(), "image_rotary_emb": Cut(dim=-2)},
                ),
            ),
        )
    ),
)
