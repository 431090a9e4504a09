"""Tiny decoders of stock autoencoders beside those of the zoo: what a change of layout is tried on."""

import torch

from support import small_vaes
from support.zoo.codec import MODELS
from support.zoo.model import SEED, Source, ZooModel, builder


def wan() -> torch.nn.Module:
    """A whole autoencoder, whose `decode` calls its decoder frame by frame."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        return small_vaes.wan().eval()


def _video(name: str, channels: int):
    def inputs(dtype=torch.float32, size=8):
        return {name: Source(dtype).normal(2, channels, 2, size, 8)}

    return inputs


def _image(name: str, channels: int):
    def inputs(dtype=torch.float32, size=8):
        return {name: Source(dtype).normal(2, channels, size, 8)}

    return inputs


CODECS: dict[str, ZooModel] = {
    model.name: model
    for model in (
        *MODELS,
        ZooModel(
            "ltx_decoder",
            builder(lambda: small_vaes.ltx_video().decoder),
            _video("hidden_states", 8),
            (8, 12),
            False,
            {"hidden_states": (3,)},
        ),
        ZooModel(
            "hunyuan_decoder",
            builder(lambda: small_vaes.hunyuan_video().decoder),
            _video("hidden_states", 4),
            (8, 12),
            False,
            {"hidden_states": (3,)},
        ),
        ZooModel(
            "dc_decoder",
            builder(lambda: small_vaes.dc().decoder),
            _image("hidden_states", 4),
            (8, 12),
            False,
            {"hidden_states": (2,)},
        ),
        ZooModel(
            "qwen_image_decoder",
            builder(lambda: small_vaes.qwen_image().decoder),
            _video("x", 4),
            (8, 12),
            False,
            {"x": (3,)},
        ),
        ZooModel(
            "kl_encoder",
            builder(lambda: small_vaes.kl().encoder),
            _image("sample", 3),
            (8, 12),
            False,
            {"sample": (2,)},
        ),
    )
}
