"""Tiny stock diffusers models, one value each: every test that needs a real model takes it from `ZOO`."""

from support.zoo import codec, image, video
from support.zoo.model import ZooModel

__all__ = ["ZOO", "ZooModel"]

ZOO: dict[str, ZooModel] = {model.name: model for model in (*image.MODELS, *video.MODELS, *codec.MODELS)}
