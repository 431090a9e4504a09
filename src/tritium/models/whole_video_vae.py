"""The video VAEs of HunyuanVideo and LTX-Video, which process all frames of a video or tile at once."""

from tritium.models.family import Codec

CODEC = Codec(
    name="whole_video_vae",
    classes=("AutoencoderKLHunyuanVideo", "AutoencoderKLLTXVideo"),
    decoder={"hidden_states": (-3, -2, -1)},
    encoder={"hidden_states": (-3, -2, -1)},
)
