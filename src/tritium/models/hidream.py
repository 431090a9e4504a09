"""HiDream: routed experts in double and single blocks, and other text tokens in each block."""

from tritium.models.family import REST, Blocks, Cut, Family, ParallelFacts, TensorFacts

# Every block adds other text tokens behind the image's: each rank computes all of them.
_AND_TEXT = Cut(("hidden_states", REST))

FAMILY = Family(
    name="hidream",
    denoisers=("HiDreamImageTransformer2DModel",),
    blocks=("HiDreamBlock",),
    tensor=TensorFacts(
        columns={r"block\.attn1\.to_[qkv](_t)?": (), r"block\.ff_t\.w[13]": ()},
        rows={r"block\.attn1\.to_out(_t)?": (), r"block\.ff_t\.w2": ()},
        norms=(r"block\.attn1\.[qk]_rms_norm(_t)?",),
    ),
    parallel=ParallelFacts(
        sections=(
            (
                Blocks(
                    path="double_stream_blocks",
                    streams={"hidden_states": Cut()},
                    tables={"hidden_states_masks": Cut(), "image_rotary_emb": _AND_TEXT},
                    outputs=("hidden_states", None),
                    opaque=("block.ff_i",),
                ),
                Blocks(
                    path="single_stream_blocks",
                    streams={"hidden_states": _AND_TEXT},
                    tables={"hidden_states_masks": _AND_TEXT, "image_rotary_emb": _AND_TEXT},
                    opaque=("block.ff_i",),
                ),
                # The image's tokens are cut out by the number of a rank's tokens.
                Blocks(path="final_layer", streams={"hidden_states": Cut()}),
            ),
        )
    ),
)
