"""Z-Image: blocks over the image and the text, after refiners of each."""

from tritium.models.family import Blocks, Cut, Family, ParallelFacts, TensorFacts

FAMILY = Family(
    name="z_image",
    denoisers=("ZImageTransformer2DModel",),
    blocks=("ZImageTransformerBlock",),
    tensor=TensorFacts(
        columns={r"attention\.to_[qkv]": (), r"feed_forward\.w[13]": ()},
        rows={r"attention\.to_out\.0": (), r"feed_forward\.w2": ()},
    ),
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
