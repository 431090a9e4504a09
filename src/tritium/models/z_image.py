"""Z-Image: blocks over the image and the text, after refiners of each."""

from tritium.models.family import Blocks, Cut, Family, ParallelFacts

FAMILY = Family(
    name="z_image",
    denoisers=("ZImageTransformer2DModel",),
    blocks=("ZImageTransformerBlock",),
    parallel=ParallelFacts(
        sections=tuple(
            (
                Blocks(
                    path=path,
                    streams={"x": Cut(("x",))},
                    tables={"freqs_cis": Cut(("x",)), "noise_mask": Cut(("x",))},
                    masks={"attn_mask": Cut(("x",))},
                    outputs=("x",),
                ),
            )
            for path in ("noise_refiner", "layers")
        )
    ),
)
