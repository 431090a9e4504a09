"""Lumina 2: blocks over the text and the image, after refiners of each."""

from tritium.models.family import Blocks, Cut, Family, ParallelFacts

FAMILY = Family(
    name="lumina2",
    denoisers=("Lumina2Transformer2DModel",),
    blocks=("Lumina2TransformerBlock",),
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
