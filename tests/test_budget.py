"""The loss that a user accepts: limits, and the share of jobs that must keep them."""

import math

import pytest

from tritium.budget import Budget
from tritium.errors import ConfigError
from tritium.quality import Difference


def image(psnr, ssim=1.0, **others):
    return Difference(psnr=psnr, ssim=ssim, largest=0.0, **others)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"min_psnr": math.nan}, "min_psnr is a number"),
        ({"min_psnr": True}, "min_psnr is a number"),
        ({"max_lpips": "small"}, "max_lpips is a number"),
        ({"max_lpips": -0.1}, "0 or more"),
        ({"min_ssim": 1.5}, "at most 1"),
        ({"quantile": 0}, "a share above 0"),
        ({"quantile": 1.5}, "a share above 0"),
    ],
)
def test_bad_limits_raise(values, message):
    with pytest.raises(ConfigError, match=message):
        Budget(**values)


def test_one_of_eight_jobs_may_miss_it():
    budget = Budget(min_psnr=30)
    assert budget.allows([image(31)] * 7 + [image(5)])
    assert not budget.allows([image(31)] * 6 + [image(5)] * 2)
    assert not Budget(min_psnr=30, quantile=1).allows([image(31)] * 7 + [image(29)])


def test_every_limit_counts():
    budget = Budget(min_psnr=30, min_ssim=0.9, max_latent_l2=0.1)
    assert budget.allows([image(31, 0.95, latent_l2=0.05)])
    assert not budget.allows([image(31, 0.85, latent_l2=0.05)])
    assert not budget.allows([image(31, 0.95, latent_l2=0.2)])


def test_slack_is_the_nearest_limit_as_a_share():
    budget = Budget(min_psnr=30, min_ssim=0.9)
    assert budget.slack(image(33, 0.99)) == pytest.approx(0.1)
    assert budget.slack(image(27, 0.99)) == pytest.approx(-0.1)
    assert budget.slack(image(math.inf)) == pytest.approx(0.1 / 0.9)


def test_equal_images_keep_any_psnr():
    assert Budget(min_psnr=1000).allows([image(math.inf)])


def test_values_that_are_no_numbers_are_outside():
    assert not Budget().allows([image(99, not_numbers=1)])
    assert Budget().allows([image(1)])


def test_a_limit_without_its_measurement_is_an_error():
    with pytest.raises(ConfigError, match="max_lpips cannot be checked"):
        Budget(max_lpips=0.1).allows([image(30)])


def test_it_is_shown_in_words():
    assert str(Budget(min_psnr=33, max_lpips=0.1)) == "PSNR >= 33 dB, LPIPS <= 0.1"
    assert str(Budget()) == "no limit"
