"""The deep-compression autoencoder of SANA."""

from tritium.models.family import Codec

CODEC = Codec(
    name="dc_vae",
    classes=("AutoencoderDC",),
    decoder={"hidden_states": (-2, -1)},
    encoder={"hidden_states": (-2, -1)},
)
