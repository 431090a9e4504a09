"""Stable Diffusion 1, 2 and XL, and their ControlNets: U-Nets, whose block classes vary in width."""

from tritium.models.family import Family, ParallelFacts

# Compiled as a whole, because a block class occurs in a dozen widths: block by block, each width would recompile it
# until Dynamo's limit of eight, and the remaining ones would run eagerly.
FAMILY = Family(
    name="unet",
    denoisers=("UNet2DConditionModel", "ControlNetModel", "ControlNetUnionModel", "SparseControlNetModel"),
    blocks=(),
    parallel=ParallelFacts(unsplit="its convolutions and its sampling between resolutions need whole images"),
)
