"""The video VAEs of Wan and Qwen-Image, which process frames in chunks with a cache of frames."""

from tritium.models.family import Codec

# The cache is filled in place: first None, then a string or one frame, then two frames. Each state is a separate graph.
_DIMS = {"x": (-2, -1), "feat_cache.*": (-2, -1)}

CODEC = Codec(
    name="streaming_vae",
    classes=("AutoencoderKLWan", "AutoencoderKLQwenImage", "AutoencoderKLQwenImage21"),
    decoder=_DIMS,
    encoder=_DIMS,
    cache=("feat_cache", "feat_idx"),
)
