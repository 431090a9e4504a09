"""The video VAEs of Wan and Qwen-Image: frames go through them one by one."""

from tritium.models.family import Codec

CODEC = Codec(
    name="streaming_vae",
    classes=("AutoencoderKLWan", "AutoencoderKLQwenImage", "AutoencoderKLQwenImage21"),
    left="passes frames through a cache that every call changes, so its first three calls would each compile it again",
)
