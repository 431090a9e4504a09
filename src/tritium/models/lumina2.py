"""Lumina 2: blocks over the text and the image, after refiners of each."""

from tritium.models.family import Blocks, Cut, Family, ParallelFacts, TensorFacts

FAMILY = Family(
    name="lumina2",
    denoisers=("Lumina2Transformer2DModel",),
    blocks=("Lumina2TransformerBlock",),
    tensor=TensorFacts(
        columns={r"attn\.to_[qkv]": (), r"feed_forward\.linear_[13]": ()},
        rows={r"attn\.to_out\.0": (), r"feed_forward\.linear_2": ()},
    ),
    parallel=ParallelFacts(
        sections=tuple(
            (
                Blocks(
                    path=path,
                    streams={"hidden_states": Cut()},
                    tables={"image_rotary_emb": Cut()},
                    masks={"attention_mask": Cut()},
                ),
            )
            for path in ("noise_refiner", "layers")
        )
    ),
)
