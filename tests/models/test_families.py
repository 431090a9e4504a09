"""The facts about model families are facts: the classes exist, and the blocks are where they are said to be."""

import inspect

import diffusers
import pytest
import torch
from torch import nn

from support import small_vaes, zoo
from tritium import models
from tritium.errors import PipelineError
from tritium.pipelines import parts

FAMILIES = models.families()


@pytest.mark.parametrize("family", FAMILIES.values(), ids=list(FAMILIES))
def test_classes_exist_in_diffusers(family):
    for name in family.denoisers:
        assert issubclass(getattr(diffusers, name), nn.Module)


@pytest.mark.parametrize("codec", models.codecs().values(), ids=list(models.codecs()))
def test_codec_classes_exist_in_diffusers(codec):
    for name in codec.classes:
        assert hasattr(getattr(diffusers, name), "decode")


@pytest.mark.parametrize("name", small_vaes.SMALL_VAES)
def test_varying_arguments_of_a_codec_exist(name):
    vae = small_vaes.SMALL_VAES[name].build()
    codec = models.codec_of(type(vae).__name__)
    for half in ("decoder", "encoder"):
        arguments = inspect.signature(getattr(vae, half).forward).parameters
        assert {path.partition(".")[0] for path in getattr(codec, half)} <= set(arguments)
        if half == "decoder":
            assert set(codec.cache) <= set(arguments)


@pytest.mark.parametrize("name", sorted(set(FAMILIES) & set(zoo.ZOO)))
def test_a_family_covers_its_model(name):
    """Every parameter is in a compiled module, or in a single layer beside them."""
    module = zoo.ZOO[name].build()
    part = parts.denoiser("transformer", module)
    blocks = [block for block in part.blocks if type(block.module).__name__ in FAMILIES[name].blocks]
    assert blocks
    compiled = {id(p) for block in part.blocks for p in block.module.parameters()}
    alone = {id(p) for layer in module.modules() if parts.is_single(layer) for p in layer.parameters()}
    rest = [path for path, p in module.named_parameters() if id(p) not in compiled | alone]
    # Wan keeps one modulation table in the model itself.
    assert all("." not in path for path in rest), rest


@pytest.mark.parametrize("name", sorted(zoo.ZOO))
def test_every_model_of_the_zoo_has_targets_known_or_guessed(name):
    module = zoo.ZOO[name].build()
    part = parts.denoiser("transformer", module)
    seen = [id(inner) for block in part.blocks for inner in block.module.modules()]
    assert len(seen) == len(set(seen)), "a module is in two targets"
    assert part.what


class Stack(nn.Module):
    """A DiT nobody knows."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 16)
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16)) for _ in range(depth))
        self.out = nn.Linear(16, 8)

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = x + layer(x)
        return self.out(x)


class TestGuess:
    def test_a_stack_of_equal_modules_is_found(self):
        part = parts.denoiser("transformer", Stack())
        assert [block.path for block in part.blocks] == ["layers.0", "layers.1", "layers.2"]
        assert part.what == "3 Sequential"

    def test_a_model_without_one_is_one_target(self):
        plain = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
        part = parts.denoiser("transformer", plain)
        assert part.whole
        assert [block.module for block in part.blocks] == [plain]

    def test_named_blocks_are_used(self):
        part = parts.denoiser("transformer", Stack(), ("Sequential",))
        assert len(part.blocks) == 3

    def test_a_misspelt_block_gets_the_nearest(self):
        with pytest.raises(PipelineError, match="did you mean 'Sequential'"):
            parts.denoiser("transformer", Stack(), ("Sequentia",))


def test_a_whole_model_is_one_target():
    unet = diffusers.UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(8, 8),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=8,
        attention_head_dim=4,
        norm_num_groups=4,
    )
    part = parts.denoiser("unet", unet)
    assert [block.module for block in part.blocks] == [unet]
    assert torch.is_tensor(next(unet.parameters()))
