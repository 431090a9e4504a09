"""Decoders of six families of VAEs: right at every size, through the graphs of the first."""

from types import SimpleNamespace

import diffusers
import pytest
import torch
from torch import nn

import tritium
from support import small_vaes, zoo
from support.small_vaes import SMALL_VAES, decode
from tritium import CompilationConfig, Plan, compat
from tritium.pipelines import arguments

EAGER = CompilationConfig(engine="eager")
PLAN = Plan(config=EAGER, progress=False, components={"transformer": "eager"})

# A square first, sizes that equal numbers of channels (4, 8, 16), and one past 20,480 elements, where torch's routines change.
FIRST = [(8, 8), (8, 16)]
TEN = [(16, 8), (9, 7), (16, 10), (5, 6), (13, 13), (7, 20), (11, 9), (6, 14), (24, 28), (15, 5)]

# Graphs of one size: an empty cache of frames, one that is begun, and a full one.
GRAPHS = dict.fromkeys(SMALL_VAES, 1) | {"wan": 3, "wan_residual": 3}


def mostly(always, names):
    """Parametrised by all names; the others than one where time does not matter."""
    cells = [pytest.param(name, marks=() if name == always else (pytest.mark.thorough,)) for name in names]
    return pytest.mark.parametrize("name", cells)


class Graphs:
    """Counts the graphs that Dynamo has compiled since it was made, or asked."""

    def __init__(self):
        self.before = compat.dynamo.graphs_compiled()

    def new(self) -> int:
        before, self.before = self.before, compat.dynamo.graphs_compiled()
        return self.before - before


def pipeline(vae) -> SimpleNamespace:
    """As much of a pipeline as `optimize` looks at."""
    blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4)) for _ in range(2))
    return SimpleNamespace(components={"transformer": nn.ModuleDict({"blocks": blocks}), "vae": vae})


@pytest.mark.parametrize(
    # One whose frames come one by one is in compiler/test_compile.py.
    "name",
    [pytest.param(name, marks=[pytest.mark.thorough] * (name not in ("kl", "dc"))) for name in SMALL_VAES],
)
def test_torch_compile_compiles_a_decoder_for_one_size(name):
    small = SMALL_VAES[name]
    vae = small.build()
    latents = [small.latent(*size) for size in FIRST + TEN]
    expected = [decode(vae, latent) for latent in latents]
    vae.decoder = torch.compile(vae.decoder, backend=tritium.Backend(EAGER), dynamic=True)
    graphs = Graphs()
    for place, (latent, image) in enumerate(zip(latents, expected, strict=True)):
        torch.testing.assert_close(decode(vae, latent), image)
        assert graphs.new() == (GRAPHS[name] if place == 0 else 0), tuple(latent.shape)
    if GRAPHS[name] > 1:
        # Frames come one by one: a longer video needs no other graph.
        torch.testing.assert_close(
            decode(vae, small.latent(6, 8, frames=5)), _eagerly(vae, small.latent(6, 8, frames=5))
        )
        assert graphs.new() == 0
    small_vaes.tile(vae)
    torch.testing.assert_close(decode(vae, small.latent(15, 14)), _eagerly(vae, small.latent(15, 14)))
    # Slices of the latent have other strides than the whole, and torch.compile has nobody who could pack them.
    assert graphs.new() <= GRAPHS[name]


def _eagerly(vae, latent: torch.Tensor) -> torch.Tensor:
    compiled, vae.decoder = vae.decoder, vae.decoder._orig_mod
    image = decode(vae, latent)
    vae.decoder = compiled
    return image


@mostly("kl", SMALL_VAES)
def test_optimized_whole_sliced_and_tiled(name):
    small = SMALL_VAES[name]
    vae = small.build()
    latents = [small.latent(*size) for size in FIRST + TEN]
    batch, large = small.latent(9, 12, batch=2), small.latent(15, 14)
    with tritium.optimize(pipeline(vae), PLAN) as handle:
        installed = handle.part("vae.decode")
        graphs = Graphs()
        images = [decode(vae, latent) for latent in latents]
        assert graphs.new() == GRAPHS[name]
        vae.enable_slicing()
        sliced = decode(vae, batch)
        vae.disable_slicing()
        small_vaes.tile(vae)
        calls = installed.times.calls
        # Tiles of six at a distance of four, the last ones three high or two wide.
        tiled = decode(vae, large)
        assert installed.times.calls - calls == 16 * (small.frames if GRAPHS[name] == 3 else 1)
        vae.disable_tiling()
        # AutoencoderDC attends in another way to no more pixels than a head is wide: four here, 32 in stock configurations.
        assert graphs.new() == 0
        assert not installed.notes
    for latent, image in zip(latents, images, strict=True):
        torch.testing.assert_close(image, decode(vae, latent))
    torch.testing.assert_close(sliced, torch.cat([decode(vae, one) for one in batch.split(1)]))
    small_vaes.tile(vae)
    torch.testing.assert_close(tiled, decode(vae, large))


@mostly("kl", ["kl", "wan", "dc"])
def test_tiles_of_one_pixel_run_eagerly_and_the_summary_says_so(name):
    small = SMALL_VAES[name]
    vae = small.build()
    small_vaes.tile(vae)
    latent = small.latent(9, 13)
    expected = decode(vae, latent)
    with tritium.optimize(pipeline(vae), PLAN) as handle:
        decode(vae, small.latent(8, 8))
        graphs = Graphs()
        torch.testing.assert_close(decode(vae, latent), expected)
        assert graphs.new() == 0
        slivers = 6 * (small.frames or 1)
        what = next(row.what for row in handle.components if row.name == "vae.decode")
        assert f"({slivers} calls of one row or column ran eagerly)" in what


@mostly("kl", ["kl", "wan", "hunyuan_video"])
def test_encoders_too(name):
    small = SMALL_VAES[name]
    vae = small.build()
    images = [small.image(*size) for size in ((16, 16), (16, 24), (24, 16), (32, 24))]
    with torch.no_grad():
        expected = [vae.encode(image).latent_dist.mean for image in images]
        with tritium.optimize(pipeline(vae), PLAN):
            graphs = Graphs()
            for place, (image, latent) in enumerate(zip(images, expected, strict=True)):
                torch.testing.assert_close(vae.encode(image).latent_dist.mean, latent)
                new = graphs.new()
                assert (new > 0) == (place == 0), place


# HunyuanVideo has the first frame apart: one and two latent frames are graphs of their own.
@pytest.mark.thorough
@pytest.mark.parametrize(("name", "lengths"), [("wan", (3, 5)), ("hunyuan_video", (3, 4, 6)), ("ltx_video", (3, 4, 6))])
def test_videos_of_other_lengths(name, lengths):
    """Frames come one by one through Wan's decoder, and all at once through the others."""
    small = SMALL_VAES[name]
    vae = small.build()
    # Frames are tiles in time, if there are many.
    vae.use_framewise_decoding = False
    expected = {length: decode(vae, small.latent(6, 8, frames=length)) for length in lengths}
    with tritium.optimize(pipeline(vae), PLAN):
        graphs = Graphs()
        for length, image in expected.items():
            torch.testing.assert_close(decode(vae, small.latent(6, 8, frames=length)), image)
            assert graphs.new() == (GRAPHS[name] if length == lengths[0] else 0), length


def test_static_sizes_are_compiled_each_if_the_plan_says_so():
    small = SMALL_VAES["kl"]
    vae = small.build()
    with tritium.optimize(pipeline(vae), PLAN.with_(dynamic=False)):
        graphs = Graphs()
        for size in FIRST:
            decode(vae, small.latent(*size))
            assert graphs.new() == 1


def test_measuring_a_decoder_leaves_its_frame_cache(monkeypatch):
    from tritium.pipelines import trial

    monkeypatch.setattr(trial.decide, "__defaults__", (0.0,))
    monkeypatch.setattr(trial, "ways", lambda installed: [tritium.Choice(how="eager"), tritium.Choice()])
    small = SMALL_VAES["wan"]
    vae = small.build()
    expected = decode(vae, small.latent(4, 6))
    with tritium.optimize(pipeline(vae), PLAN.with_(measure=True)) as handle:
        torch.testing.assert_close(decode(vae, small.latent(4, 6)), expected)
        assert set(handle.part("vae.decode").measured) == {"eager", "tritium"}


def test_a_stock_wan_pipeline():
    transformer = zoo.ZOO["wan"].build()
    channels = transformer.config.in_channels
    vae = small_vaes.wan(z_dim=channels, latents_mean=[0.0] * channels, latents_std=[1.0] * channels).eval()
    pipe = diffusers.WanPipeline(
        tokenizer=None,
        text_encoder=None,
        vae=vae,
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        transformer=transformer,
    )
    pipe.set_progress_bar_config(disable=True)

    def draw(height: int, width: int) -> torch.Tensor:
        words = torch.randn(1, 6, transformer.config.text_dim, generator=torch.Generator().manual_seed(0))
        return pipe(
            prompt_embeds=words,
            height=height,
            width=width,
            num_frames=5,
            num_inference_steps=1,
            guidance_scale=1.0,
            output_type="pt",
            generator=torch.Generator().manual_seed(0),
        ).frames

    images = ((32, 32), (32, 48), (48, 32))
    expected = [draw(*size) for size in images]
    with tritium.optimize(pipe, PLAN) as handle:
        for size, image in zip(images, expected, strict=True):
            torch.testing.assert_close(draw(*size), image)
        assert handle.choices["vae.decode"].how == "tritium"
        decoded = [record for record in handle.report.records if record.function == "WanDecoder3d.forward"]
        assert len(decoded) == 2, "an empty cache, and one that is begun: there are two latent frames"


class TestPacked:
    @pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
    def test_what_is_dense_is_passed_on(self, layout):
        image = torch.rand(2, 3, 4, 5).contiguous(memory_format=layout)
        assert arguments.packed(image) is image

    @pytest.mark.parametrize(
        "slice_of",
        [
            lambda whole: whole[:, :, 1:2],
            lambda whole: whole[..., 1:3, 2:4],
            # Contiguous to PyTorch, with a stride of the whole in a dim of one.
            lambda whole: whole[:1, :1, :1],
        ],
    )
    def test_slices_get_the_strides_of_their_sizes(self, slice_of):
        image = slice_of(torch.rand(2, 3, 4, 5, 6))
        packed = arguments.packed(image)
        assert torch.equal(packed, image)
        assert packed.stride() == torch.empty(image.shape).stride() != image.stride()


@pytest.mark.codegen
@mostly("kl", ["kl", "wan"])
def test_generated_code_decodes_every_size(name):
    small = SMALL_VAES[name]
    # Half as many kernels, each of which takes a second of the C++ compiler.
    one_block = {"down_block_types": ("DownEncoderBlock2D",), "up_block_types": ("UpDecoderBlock2D",)}
    vae = (
        small_vaes.kl(**one_block, block_out_channels=(8,)).eval().requires_grad_(requires_grad=False)
        if name == "kl"
        else small.build()
    )
    latents = [small.latent(*size) for size in ((8, 8), (8, 12), (5, 7))]
    expected = [decode(vae, latent) for latent in latents]
    with tritium.optimize(pipeline(vae), PLAN.with_(config=CompilationConfig())):
        graphs = Graphs()
        for place, (latent, image) in enumerate(zip(latents, expected, strict=True)):
            torch.testing.assert_close(decode(vae, latent), image, rtol=1e-4, atol=1e-5)
            assert graphs.new() == (GRAPHS[name] if place == 0 else 0)
