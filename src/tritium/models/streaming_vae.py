"""The video VAEs of Wan and Qwen-Image: frames go through them in chunks, and a cache of frames goes with them."""

from tritium.models.family import Codec

# The cache is filled in place: nothing, then a word or a frame, then two frames. Each state is a graph of its own.
_DIMS = {"x": (-2, -1), "feat_cache.*": (-2, -1)}

CODEC = Codec(
    name="streaming_vae",
    classes=("AutoencoderKLWan", "AutoencoderKLQwenImage", "AutoencoderKLQwenImage21"),
    decoder=_DIMS,
    encoder=_DIMS,
    cache=("feat_cache", "feat_idx"),
)
