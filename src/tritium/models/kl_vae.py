"""The VAE of Stable Diffusion and FLUX."""

from tritium.models.family import Codec

CODEC = Codec(
    name="kl_vae",
    classes=("AutoencoderKL", "AutoencoderKLFlux2"),
    decoder={"sample": (-2, -1)},
    encoder={"sample": (-2, -1)},
)
