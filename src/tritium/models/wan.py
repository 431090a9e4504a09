"""Wan 2.1 and 2.2: blocks of one class over the tokens of a video."""

from tritium.models.family import Blocks, Cut, Family, ParallelFacts, TensorFacts

FAMILY = Family(
    name="wan",
    denoisers=("WanTransformer3DModel", "WanVACETransformer3DModel"),
    blocks=("WanTransformerBlock", "WanVACETransformerBlock"),
    tensor=TensorFacts(
        columns={r"attn[12]\.(to_[qkv]|add_[kv]_proj)": (), r"ffn\.net\.0\.proj": ()},
        rows={r"attn[12]\.to_out\.0": (), r"ffn\.net\.2": ()},
        norms=(r"attn[12]\.norm_(q|k|added_k)",),
    ),
    parallel=ParallelFacts(
        sections=(
            (
                Blocks(
                    path="blocks",
                    streams={"hidden_states": Cut()},
                    # A timestep may be for each token.
                    tables={"rotary_emb": Cut(), "temb": Cut(rank=4)},
                ),
            ),
        ),
        whole={
            "WanVACETransformerBlock": "blocks over the conditions get whole tokens, whose results are added between others"
        },
    ),
)
