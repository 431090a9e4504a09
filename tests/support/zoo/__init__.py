"""Tiny stock diffusers models, one value each: every test that needs a real model takes it from `ZOO`."""

from support.zoo import codec, others, stock
from support.zoo.model import ZooModel

__all__ = ["ZOO", "ZooModel"]

MODELS = (
    *(*stock.IMAGE_MODELS, *stock.VIDEO_MODELS, *others.VIDEO_MODELS),
    *(stock.UNET, codec.CODECS["kl_decoder"], codec.CODECS["wan_decoder"]),
)
ZOO: dict[str, ZooModel] = {model.name: model for model in MODELS}
