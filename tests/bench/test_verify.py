"""The same seeds, eagerly and accelerated, against thresholds."""

from __future__ import annotations

import importlib
import json
import math

import pytest
import torch

from support.bench import is_a_share, job
from support.changed import wrong_provider
from tritium import CompilationConfig, FusionPatterns, quality
from tritium.bench.verify import Thresholds, verify
from tritium.errors import ConfigError, PipelineError
from tritium.pipelines.plan import Plan

pytest.importorskip("diffusers")
small_pipelines = importlib.import_module("support.small_pipelines")

EAGER = Plan(config=CompilationConfig(engine="eager"))
WRONG = Plan(
    config=CompilationConfig(
        engine="eager",
        fusion_patterns=FusionPatterns(enable_qk_norm_rope=False),
        force_provider={"rms_norm": "triton"},
    )
)


@pytest.fixture(scope="module")
def pipe():
    return small_pipelines.flux(double=1, single=1)


def test_a_right_pipeline_passes_and_is_given_back(pipe):
    told = []
    found = verify(pipe, [job(0), job(1)], Thresholds(), lambda what, share: told.append(what), EAGER)
    assert found.passed
    assert [row.job.seed for row in found.rows] == [0, 1]
    assert (found.rows[0].width, found.rows[0].height) == (32, 32)
    assert found.choices["transformer"] == "tritium"
    assert found.choices["text_encoder"] == "eager"
    assert found.worst.latent_l2 is not None
    assert all(module._compiled_call_impl is None for module in pipe.transformer.modules())
    assert told[0] == "eager: 'a red circle', seed 0"
    assert "compiling FluxTransformer2DModel.forward" in told
    # Everything, as JSON that any parser reads.
    read = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert read["passed"]
    assert read["thresholds"] == {"min_psnr": 40.0}
    assert read["rows"][1]["job"]["seed"] == 1
    assert read["located"] is None


def test_images_are_compared_seed_by_seed(pipe):
    # Were an image compared with another seed's, it would not be equal.
    found = verify(pipe, [job(0), job(1)], Thresholds(min_psnr=math.inf, max_difference=0.0), is_a_share, EAGER)
    assert found.passed
    assert found.to_dict()["thresholds"] == {"min_psnr": "inf", "max_difference": 0.0}


def test_a_image_without_numbers_never_passes(pipe):
    with wrong_provider("rms_norm", lambda result, *_: result * torch.nan):
        found = verify(pipe, [job(0)], Thresholds(min_psnr=None), is_a_share, WRONG)
    assert not found.passed
    assert "no numbers" in found.broken[0]
    json.dumps(found.to_dict(), allow_nan=False)


class TestThresholds:
    def test_each_is_held_against_its_figure(self):
        found = quality.Difference(psnr=30.0, ssim=0.9, largest=0.2, latent_l2=0.1, lpips=None)
        asked = {"min_psnr": 31, "min_ssim": 0.95, "max_difference": 0.1, "max_latent_l2": 0.05}
        for name, limit in asked.items():
            assert len(Thresholds(**{"min_psnr": None, name: limit}).broken_by(found)) == 1
        assert not Thresholds(min_psnr=30, min_ssim=0.9, max_difference=0.2, max_latent_l2=0.1).broken_by(found)

    def test_a_figure_that_was_not_measured_is_no_pass(self):
        found = quality.Difference(psnr=30.0, ssim=0.9, largest=0.2)
        assert Thresholds(min_psnr=None, max_latent_l2=0.1).broken_by(found) == [
            "latent_l2 was not measured, and its limit is 0.1"
        ]

    @pytest.mark.parametrize(
        ("given", "message"),
        [
            ({"min_ssim": 1.5}, "equal images have 1"),
            ({"max_difference": -1}, "equal images have 0"),
            ({"min_psnr": math.nan}, "must be a number"),
        ],
    )
    def test_what_cannot_be_reached_is_an_error(self, given, message):
        with pytest.raises(ConfigError, match=message):
            Thresholds(**given)

    def test_lpips_without_its_package_says_how_to_get_it(self, monkeypatch):
        monkeypatch.setattr(quality.importlib.util, "find_spec", lambda name: None)
        with pytest.raises(ConfigError, match="pip install lpips"):
            Thresholds(max_lpips=0.1)

    def test_lpips_without_its_weights_says_where_they_belong(self, monkeypatch, tmp_path):
        monkeypatch.setattr(quality.importlib.util, "find_spec", lambda name: object())
        monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
        with pytest.raises(ConfigError, match="nothing is downloaded by itself"):
            Thresholds(max_lpips=0.1)
        (tmp_path / "checkpoints").mkdir()
        (tmp_path / "checkpoints" / "alexnet-owt-7be5be79.pth").touch()
        assert Thresholds(max_lpips=0.1).max_lpips == 0.1


class TestNoNumbers:
    image = torch.rand(1, 3, 16, 16, generator=torch.Generator().manual_seed(0))

    def test_a_pixel_without_a_number_is_as_far_away_as_can_be(self):
        broken = self.image.clone()
        broken[0, 0, :4, :4] = torch.nan
        found = quality.difference(broken, self.image)
        assert found.not_numbers == 16
        assert found.largest >= 0.5
        assert math.isfinite(found.psnr)
        assert Thresholds(min_psnr=None).broken_by(found) == ["16 values are no numbers"]
        assert quality.worst([quality.difference(self.image, self.image), found]).not_numbers == 16

    def test_latents_count_too(self):
        latents = torch.tensor([1.0, torch.nan]), torch.tensor([1.0, 2.0])
        found = quality.difference(self.image, self.image, latents)
        assert found.not_numbers == 1
        assert Thresholds(min_psnr=None, max_latent_l2=1e9).broken_by(found)[1].startswith("latent_l2 nan")
        assert found.to_dict()["latent_l2"] is None

    def test_nothing_is_compared_with_an_eager_image_that_is_broken(self):
        with pytest.raises(PipelineError, match="no numbers"):
            quality.difference(self.image, self.image * torch.nan)


def test_no_job_is_an_error_before_any_image(pipe):
    with pytest.raises(ConfigError, match="nothing to verify"):
        verify(pipe, [], Thresholds(), pytest.fail, EAGER)
