"""Kandinsky 5: encoder blocks over the text, decoder blocks over a video."""

from tritium.models.family import Blocks, Cut, Family, ParallelFacts, TensorFacts

FAMILY = Family(
    name="kandinsky5",
    denoisers=("Kandinsky5Transformer3DModel",),
    blocks=(
        "Kandinsky5TransformerEncoderBlock",
        "Kandinsky5TransformerDecoderBlock",
    ),
    tensor=TensorFacts(
        columns={r"(self|cross)_attention\.to_(query|key|value)": (), r"feed_forward\.in_layer": ()},
        rows={r"((self|cross)_attention|feed_forward)\.out_layer": ()},
        counts=("num_heads",),
    ),
    parallel=ParallelFacts(
        sections=(
            (
                Blocks(
                    path="visual_transformer_blocks",
                    streams={"visual_embed": Cut(("visual_embed",))},
                    tables={"rope": Cut(("visual_embed",))},
                    outputs=("visual_embed",),
                ),
            ),
        )
    ),
)
