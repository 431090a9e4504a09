"""Stable Diffusion 1, 2 and XL, and their ControlNets: a U-Net, whose blocks are alike in class and differ in width."""

from tritium.models.family import Family

# One class stands for a dozen widths there: compiled block by block, each width would compile its class again, until
# Dynamo's limit of eight leaves the rest to eager. As a whole it is one graph.
FAMILY = Family(
    name="unet",
    denoisers=("UNet2DConditionModel", "ControlNetModel", "ControlNetUnionModel", "SparseControlNetModel"),
    blocks=(),
)
