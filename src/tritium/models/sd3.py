"""Stable Diffusion 3 and 3.5."""

from tritium.models.family import Family

FAMILY = Family(name="sd3", denoisers=("SD3Transformer2DModel",), blocks=("JointTransformerBlock",))
