"""Images as files: one, or several side by side with captions."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tritium import disk
from tritium.errors import ConfigError, MissingExtra

# The factor for differences; at 40 dB they are about one step of 256 grey levels.
AMPLIFIED = 20

# The least width of an image in a sheet; smaller ones are enlarged by an integer factor.
_SHOWN = 256
_MARGIN = 12
_LINE = 18


@dataclass(frozen=True)
class Panel:
    """One image of a row, [C, H, W] in 0..1, and the lines of its caption."""

    pixels: Tensor
    lines: tuple[str, ...]


def amplified(image: Tensor, reference: Tensor) -> Tensor:
    """Show the difference of two images on middle grey, `AMPLIFIED` times as large."""
    return (0.5 + AMPLIFIED * (image - reference) / 2).clamp(0, 1)


def check_writable(path: Path) -> Path:
    """Raise if a file cannot be written, before an image is generated."""
    formats = {".png", ".jpg", ".jpeg", ".webp"}
    if path.suffix.lower() not in formats:
        raise ConfigError(
            f"{path} has no ending that says what image to write; use one of {', '.join(sorted(formats))}"
        )
    disk.check_writable(path, make_folder=True)
    return path


def save(pixels: Tensor, path: Path) -> None:
    """Write one image, [C, H, W]."""
    _image(pixels).save(path)


def save_rows(rows: Sequence[Sequence[Panel]], path: Path) -> None:
    """Write rows of images with their captions."""
    pil: Any = _pil("Image")
    images = [_row(row) for row in rows]
    width, height = max(image.width for image in images), sum(image.height for image in images)
    sheet = pil.new("RGB", (width, height), "white")
    top = 0
    for image in images:
        sheet.paste(image, (0, top))
        top += image.height
    sheet.save(path)


def _row(row: Sequence[Panel]) -> Any:
    pil, pen_of, fonts = _pil("Image"), _pil("ImageDraw"), _pil("ImageFont")
    font = fonts.load_default(size=13)
    images = [_enlarged(_image(panel.pixels)) for panel in row]
    high = max(image.height for image in images)
    lines = max(len(panel.lines) for panel in row)
    width = sum(image.width + _MARGIN for image in images) + _MARGIN
    sheet = pil.new("RGB", (width, high + lines * _LINE + 2 * _MARGIN), "white")
    pen = pen_of.Draw(sheet)
    left = _MARGIN
    for panel, image in zip(row, images, strict=True):
        sheet.paste(image, (left, _MARGIN))
        for place, line in enumerate(panel.lines):
            pen.text((left, _MARGIN + high + 4 + place * _LINE), _fitting(line, image.width, font), "black", font=font)
        left += image.width + _MARGIN
    return sheet


def _fitting(line: str, width: int, font: Any) -> str:
    """Cut a line to the width of its image."""
    if font.getlength(line) <= width:
        return line
    while line and font.getlength(line + "…") > width:
        line = line[:-1]
    return line.rstrip() + "…"


def _enlarged(image: Any) -> Any:
    times = max(1, round(_SHOWN / image.width))
    return image.resize((image.width * times, image.height * times), _pil("Image").NEAREST)


def _image(pixels: Tensor) -> Any:
    levels = (pixels.detach().float().cpu().clamp(0, 1) * 255).round().to(torch.uint8)
    return _pil("Image").fromarray(levels.permute(1, 2, 0).contiguous().numpy(), "RGB")


def _pil(name: str) -> Any:
    try:
        return importlib.import_module(f"PIL.{name}")
    except ModuleNotFoundError as error:
        raise MissingExtra("pillow", "diffusers", "writing images") from error
