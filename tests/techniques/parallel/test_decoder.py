"""Tiles of VAEs on several ranks, and rows by DistVAE: equal images, fewer calls."""

import sys
from unittest import mock

import diffusers
import pytest
import torch

import tritium
from support import states
from support.fidelity import assert_no_worse
from support.small_vaes import SMALL_VAES, SmallVae, decode, tile
from tritium import CompilationConfig, Parallel, Plan, fidelity
from tritium.errors import PipelineError
from tritium.techniques.parallel import mesh

ENGINE = CompilationConfig(engine="eager")


class Pipeline(diffusers.DiffusionPipeline):
    """A pipeline of a VAE and a denoiser that is not called."""

    def __init__(self, vae, transformer):
        super().__init__()
        self.register_modules(vae=vae, transformer=transformer)


def optimized(vae, ranks, how="eager"):
    components = {"vae.decode": how, "transformer": "eager"} | (
        {"vae.encode": "eager"} if hasattr(vae, "encoder") else {}
    )
    settings = Plan(parallel=Parallel(cfg=mesh.dist.get_world_size(), vae=ranks), config=ENGINE, progress=False)
    return tritium.optimize(Pipeline(vae, torch.nn.Linear(1, 1)), settings.with_(components=components))


def encode(vae, image):
    with torch.no_grad():
        return vae.encode(image).latent_dist.parameters


def counted(module):
    calls = []
    module.register_forward_hook(lambda *_: calls.append(1))
    return calls


def tiles(name, ranks):
    """Decode images of two sizes twice; return the calls of each, and those of one rank."""
    vae, latents = SMALL_VAES[name].build(), [SMALL_VAES[name].latent(13, 11), SMALL_VAES[name].latent(9, 16)]
    tile(vae)
    calls = counted(vae.decoder)
    expected = [decode(vae, latent) for latent in latents]
    alone, before, counts = len(calls), states.installed(vae), []
    with optimized(vae, ranks) as handle:
        for _ in range(2):
            for latent, image in zip(latents, expected, strict=True):
                calls.clear()
                found = decode(vae, latent)
                assert torch.equal(found, image)
                assert found.stride() == image.stride()
                counts.append(len(calls))
        assert "calls of tiles and left" in handle.part("vae.decode").technique_notes["parallel"].text
    assert states.installed(vae) == before
    calls.clear()
    assert torch.equal(decode(vae, latents[0]), expected[0])
    assert len(calls) + counts[-1] <= alone
    return counts, alone


@pytest.mark.parametrize("name", ["kl", "wan", "qwen_image", "hunyuan_video", "ltx_video", "dc"])
def test_tiles_are_shared(ranks, name):
    results = ranks(2)(tiles, name, 2)
    for counts, alone in results:
        # From the second image on, every tile is computed on one rank.
        assert sum(counts[2:]) < 0.6 * alone
    assert sum(sum(counts[2:]) for counts, _ in results) == results[0][1]


def compiled_tiles():
    vae, latent = SMALL_VAES["kl"].build(), SMALL_VAES["kl"].latent(13, 11)
    tile(vae)
    with torch.no_grad():
        exact = fidelity.in_float64(vae, (latent,), {"return_dict": False}, lambda wide: wide.decode)[0]
    eager = decode(vae, latent)
    with optimized(vae, 2, "tritium"):
        for _ in range(2):
            # A rank that has seen other sizes has compiled for them, so results are not bit-equal.
            assert_no_worse(decode(vae, latent), eager, exact)


@pytest.mark.thorough
def test_compiled_tiles_are_shared(ranks):
    ranks(2)(compiled_tiles)


@pytest.mark.thorough
@pytest.mark.parametrize("size", [3, 4])
@pytest.mark.parametrize("name", ["kl", "wan", "wan_residual", "qwen_image", "hunyuan_video"])
def test_tiles_on_more_ranks(ranks, name, size):
    ranks(size)(tiles, name, size)


def pairs_of_ranks():
    """Two ranks share the VAE, in a world of four."""
    return tiles("kl", 2)


@pytest.mark.thorough
def test_fewer_ranks_than_the_world(ranks):
    assert len(ranks(4)(pairs_of_ranks)) == 4


def encoded(name):
    vae = SMALL_VAES[name].build()
    tile(vae)
    image = SMALL_VAES[name].image(52, 44)
    calls = counted(vae.encoder)
    expected = encode(vae, image)
    alone = len(calls)
    counts = []
    with optimized(vae, "auto"):
        for _ in range(2):
            calls.clear()
            assert torch.equal(encode(vae, image), expected)
            counts.append(len(calls))
    return counts, alone


@pytest.mark.parametrize("name", ["kl", "wan"])
def test_encoders_share_their_tiles(ranks, name):
    for (_, second), alone in ranks(2)(encoded, name):
        assert second < alone


# --- decoders that keep frames of earlier calls in tuples or in their modules ---


def cogvideox():
    return diffusers.AutoencoderKLCogVideoX(
        down_block_types=("CogVideoXDownBlock3D",) * 2,
        up_block_types=("CogVideoXUpBlock3D",) * 2,
        block_out_channels=(8, 8),
        latent_channels=4,
        layers_per_block=1,
        norm_num_groups=4,
        temporal_compression_ratio=4,
        sample_height=48,
        sample_width=48,
    )


def magvit():
    return diffusers.AutoencoderKLMagvit(
        in_channels=3,
        latent_channels=4,
        block_out_channels=(8, 8, 8, 8),
        down_block_types=("SpatialDownBlock3D",) + ("SpatialTemporalDownBlock3D",) * 2 + ("SpatialDownBlock3D",),
        up_block_types=("SpatialUpBlock3D",) + ("SpatialTemporalUpBlock3D",) * 2 + ("SpatialUpBlock3D",),
        layers_per_block=1,
        norm_num_groups=4,
    )


KEEPING = {"cogvideox": cogvideox, "magvit": magvit}


def keeping(name):
    vae = SmallVae(KEEPING[name], 4, 5).build()
    latent = SmallVae(KEEPING[name], 4, 5).latent(13, 11)
    vae.enable_tiling()
    if name == "cogvideox":
        vae.tile_latent_min_height = vae.tile_latent_min_width = 6
        vae.tile_sample_min_height = vae.tile_sample_min_width = 12
    else:
        sizes = {
            f"tile_sample_{kind}_{side}": n for kind, n in (("min", 48), ("stride", 32)) for side in ("height", "width")
        }
        for field, value in sizes.items():
            setattr(vae, field, value)
    calls = counted(vae.decoder)
    expected = decode(vae, latent)
    alone, counts = len(calls), []
    with optimized(vae, 2):
        for _ in range(2):
            calls.clear()
            assert torch.equal(decode(vae, latent), expected)
            counts.append(len(calls))
    return alone, counts


@pytest.mark.parametrize("name", list(KEEPING))
def test_calls_of_one_tile_stay_on_one_rank(ranks, name):
    (alone, first), (_, second) = ranks(2)(keeping, name)
    assert first[1] + second[1] == alone
    assert max(first[1], second[1]) < 0.7 * alone


# --- rows by DistVAE ---


def rows(name, how):
    small = SMALL_VAES[name]
    vae, latent = small.build(), small.latent(24, 16)
    with torch.no_grad():
        exact = fidelity.in_float64(vae, (latent,), {"return_dict": False}, lambda wide: wide.decode)[0]
    eager = decode(vae, latent)
    state = {key: (id(tensor), tensor.clone()) for key, tensor in vae.state_dict(keep_vars=True).items()}
    with optimized(vae, "auto", how) as handle:
        for _ in range(2):
            assert_no_worse(decode(vae, latent), eager, exact, name)
        small_latent = small.latent(1, 8)
        decode(vae, small_latent)
        note = handle.part("vae.decode").technique_notes["parallel"].text
    assert torch.equal(decode(vae, latent), eager)
    after = vae.state_dict(keep_vars=True)
    assert all(id(after[key]) == one and torch.equal(after[key], value) for key, (one, value) in state.items())
    return note


@pytest.mark.parametrize("name", ["kl", "wan", "qwen_image", "hunyuan_video"])
def test_rows_are_shared_without_tiling(ranks, name):
    for note in ranks(2)(rows, name, "eager"):
        assert "DistVAE split" in note
        assert "Cannot split 1 rows" in note


def without_distvae():
    vae, latent = SMALL_VAES["kl"].build(), SMALL_VAES["kl"].latent(24, 16)
    eager = decode(vae, latent)
    with mock.patch.dict(sys.modules, {"distvae": None}), optimized(vae, "auto") as handle:
        assert torch.equal(decode(vae, latent), eager)
        note = handle.part("vae.decode").technique_notes["parallel"].text
    assert "vae.enable_tiling() shares the tiles" in note
    whole = Whole()
    with mock.patch.dict(sys.modules, {"distvae": None}):
        with optimized(whole, "auto") as handle:
            assert "parallel" not in handle.part("vae.decode").technique_notes
        with pytest.raises(PipelineError, match="Whole cannot decode in tiles"):
            optimized(whole, 2)


class Whole(torch.nn.Module):
    """A VAE that has no tiles."""

    def __init__(self):
        super().__init__()
        self.decoder = torch.nn.Sequential(torch.nn.Conv2d(4, 3, 3))

    def decode(self, latent):
        return self.decoder(latent)


def test_without_distvae_and_tiles_every_rank_decodes(ranks):
    ranks(2)(without_distvae)
