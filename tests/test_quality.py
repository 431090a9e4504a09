"""Measures of difference, against their definitions."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tritium import quality
from tritium.bench import images
from tritium.errors import ConfigError, ShapeError


def noise(*shape, seed=0):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


def test_equal_images():
    image = noise(1, 3, 32, 40)
    found = quality.difference(image, image.clone())
    assert math.isinf(found.psnr)
    assert found.ssim == pytest.approx(1.0, abs=1e-12)
    assert found.largest == 0
    assert found.to_dict()["psnr"] is None


@given(st.floats(1e-4, 0.5))
@settings(max_examples=25)
def test_psnr_of_a_constant_offset_is_its_logarithm(offset):
    base = torch.zeros(1, 3, 8, 8, dtype=torch.float64)
    assert quality.psnr(base, base + offset) == pytest.approx(-20 * math.log10(offset), abs=1e-6)


@given(st.integers(1, 40), st.integers(1, 40))
@settings(max_examples=25)
def test_ssim_takes_any_size_and_stays_in_its_range(height, width):
    a, b = noise(1, 3, height, width), noise(1, 3, height, width, seed=1)
    assert -1 <= quality.ssim(a, b) <= 1 + 1e-9
    assert quality.ssim(a, b) == pytest.approx(quality.ssim(b, a))


def test_ssim_falls_with_noise():
    image = noise(1, 3, 64, 64).round()
    little, much = (quality.ssim(image, image + s * torch.randn(image.shape)) for s in (0.01, 0.3))
    assert 1 > little > much


def test_the_worst_of_several():
    base = noise(1, 3, 16, 16)
    found = [quality.difference((base + offset).clamp(0, 1), base) for offset in (0.001, 0.1)]
    worst = quality.worst(found)
    assert worst.psnr == found[1].psnr
    assert worst.largest == found[1].largest


def test_images_of_two_sizes_cannot_be_compared():
    with pytest.raises(ShapeError, match="cannot be compared"):
        quality.difference(noise(1, 3, 8, 8), noise(1, 3, 8, 16))


class TestImages:
    def test_a_difference_is_amplified_on_grey(self):
        base = torch.full((3, 4, 4), 0.5)
        assert torch.equal(images.amplified(base, base), base)
        moved = images.amplified(base + 0.01, base)
        assert torch.allclose(moved, torch.full_like(moved, 0.5 + images.AMPLIFIED * 0.005))

    def test_rows_are_written_with_their_words(self, tmp_path):
        from PIL import Image

        panel = images.Panel(noise(3, 32, 64), ("one", "a line that is much longer than its image is wide " * 3))
        images.save_sheet([panel, panel], tmp_path / "sheet.png")
        with Image.open(tmp_path / "sheet.png") as sheet:
            assert sheet.mode == "RGB"
            assert sheet.width > 2 * 256

    @pytest.mark.parametrize("name", ["image", "image.txt", "image.safetensors"])
    def test_an_ending_says_what_to_write(self, tmp_path, name):
        with pytest.raises(ConfigError, match="has no ending that says what image to write"):
            images.check_writable(tmp_path / name)

    def test_a_folder_is_no_file(self, tmp_path):
        (tmp_path / "c.png").mkdir()
        with pytest.raises(ConfigError, match="cannot be written"):
            images.check_writable(tmp_path / "c.png")
