"""Compare two images: PSNR, SSIM, the largest difference, and LPIPS where its weights are on the machine.

Images are tensors of floats in 0..1, [B, C, H, W]; a video is a batch of frames.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tritium import measure
from tritium.errors import PipelineError, ShapeError

# The window of SSIM's definition (Wang et al. 2004): Gaussian, 11 pixels, sigma 1.5.
_WINDOW = 11
_SIGMA = 1.5


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The difference between an image and its reference. Equal images have an infinite PSNR."""

    psnr: float
    ssim: float
    largest: float
    # Of the latents before decoding; None without latents.
    latent_l2: float | None = None
    lpips: float | None = None
    # NaNs and infinities in the image and its latents: past every threshold.
    not_numbers: int = 0

    def to_dict(self) -> dict[str, float | None]:
        # JSON has no infinity and no NaN.
        return {name: value if value is None or math.isfinite(value) else None for name, value in self.__dict__.items()}

    def __str__(self) -> str:
        parts = [f"PSNR {self.psnr:.1f} dB", f"SSIM {self.ssim:.4f}", f"largest difference {self.largest:.2e}"]
        if self.latent_l2 is not None:
            parts.append(f"latent relative L2 {self.latent_l2:.1e}")
        if self.lpips is not None:
            parts.append(f"LPIPS {self.lpips:.4f}")
        if self.not_numbers:
            parts.append(f"{self.not_numbers} values are no numbers")
        return ", ".join(parts)


def difference(
    image: Tensor, reference: Tensor, latents: tuple[Tensor, Tensor] | None = None, *, perceptual: bool = False
) -> Difference:
    """Compare an image with its reference; `latents` is the same pair before decoding."""
    if image.shape != reference.shape:
        raise ShapeError(f"images of {tuple(image.shape)} and {tuple(reference.shape)} cannot be compared")
    a, b = image.detach().double().cpu(), reference.detach().double().cpu()
    if not b.isfinite().all():
        raise PipelineError("the image to compare with holds values that are no numbers")
    not_numbers = sum(int((~found.isfinite()).sum()) for found in (a, *(latents or ())[:1]))
    # The largest difference that a pixel can have.
    a = torch.where(a.isfinite(), a, 1 - b.round())
    return Difference(
        psnr=psnr(a, b),
        ssim=ssim(a, b),
        largest=float((a - b).abs().max()),
        latent_l2=None if latents is None else measure.relative_l2(*latents),
        lpips=_lpips(a, b) if perceptual else None,
        not_numbers=not_numbers,
    )


def worst(differences: Sequence[Difference]) -> Difference:
    """Return the worst of each figure over several images, for comparison with thresholds."""
    latent = [found.latent_l2 for found in differences if found.latent_l2 is not None]
    perceptual = [found.lpips for found in differences if found.lpips is not None]
    return Difference(
        psnr=min(found.psnr for found in differences),
        ssim=min(found.ssim for found in differences),
        largest=max(found.largest for found in differences),
        latent_l2=max(latent) if latent else None,
        lpips=max(perceptual) if perceptual else None,
        not_numbers=sum(found.not_numbers for found in differences),
    )


def psnr(a: Tensor, b: Tensor) -> float:
    """Return the PSNR in decibels of images in 0..1; infinite for equal ones.

    >>> round(psnr(torch.zeros(1, 3, 8, 8), torch.full((1, 3, 8, 8), 0.1)), 6)
    20.0
    """
    error = float(functional.mse_loss(a.double(), b.double()))
    return math.inf if error == 0 else -10 * math.log10(error)


def ssim(a: Tensor, b: Tensor) -> float:
    """Return the structural similarity of images in 0..1 by its original definition: 1 for equal ones.

    >>> ssim(torch.ones(1, 3, 16, 16), torch.ones(1, 3, 16, 16))
    1.0
    """
    a, b = a.double(), b.double()
    # A window cannot be larger than the image.
    size = min(_WINDOW, *a.shape[-2:])
    kernel = _gaussian(size, a.shape[1])

    def blur(x: Tensor) -> Tensor:
        return functional.conv2d(x, kernel, groups=x.shape[1])

    mean_a, mean_b = blur(a), blur(b)
    var_a, var_b = blur(a * a) - mean_a**2, blur(b * b) - mean_b**2
    covariance = blur(a * b) - mean_a * mean_b
    c1, c2 = 0.01**2, 0.03**2
    similarity = (2 * mean_a * mean_b + c1) * (2 * covariance + c2)
    return float((similarity / ((mean_a**2 + mean_b**2 + c1) * (var_a + var_b + c2))).mean())


def _gaussian(size: int, channels: int) -> Tensor:
    places = torch.arange(size, dtype=torch.float64) - (size - 1) / 2
    line = torch.exp(-(places**2) / (2 * _SIGMA**2))
    line /= line.sum()
    return torch.outer(line, line).expand(channels, 1, size, size).contiguous()


def _lpips(a: Tensor, b: Tensor) -> float | None:
    """Return LPIPS by its package if package and weights are installed; download nothing."""
    if decline_lpips() is not None:
        return None
    package: Any = importlib.import_module("lpips")
    with warnings.catch_warnings(), contextlib.redirect_stdout(None):
        warnings.simplefilter("ignore")
        model: Any = package.LPIPS(net="alex", verbose=False)
    with torch.inference_mode():
        return float(model(a.float() * 2 - 1, b.float() * 2 - 1).mean())


def decline_lpips() -> str | None:
    """Say what LPIPS lacks on this machine and how to install it, or None."""
    if importlib.util.find_spec("lpips") is None:
        return "its package is not installed; pip install lpips"
    folder = Path(torch.hub.get_dir()) / "checkpoints"
    if not list(folder.glob("alexnet-*.pth")):
        return (
            f"the weights of its AlexNet are not in {folder}, and nothing is downloaded by itself; "
            "`python -c 'import lpips; lpips.LPIPS(net=\"alex\")'` puts them there"
        )
    return None
