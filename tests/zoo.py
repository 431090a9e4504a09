"""Tiny stock diffusers models, one value each: every test that needs a real model takes it from `ZOO`."""

import zoo_codec
import zoo_image
import zoo_video
from zoo_model import ZooModel

__all__ = ["ZOO", "ZooModel"]

ZOO: dict[str, ZooModel] = {model.name: model for model in (*zoo_image.MODELS, *zoo_video.MODELS, *zoo_codec.MODELS)}
