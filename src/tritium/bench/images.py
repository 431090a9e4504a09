"""Images as files: one, or several side by side with captions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tritium import disk
from tritium.errors import ConfigError

# The factor for differences; at 40 dB they are about one step of 256 grey levels.
AMPLIFIED = 20

FORMATS = (".jpeg", ".jpg", ".png", ".webp")

# The least width of an image in a sheet; smaller ones are enlarged by an integer factor.
_SHOWN = 256
_MARGIN = 12
_LINE = 18


@dataclass(frozen=True)
class Panel:
    """One image of a sheet, [C, H, W] in 0..1, and the lines of its caption."""

    pixels: Tensor
    lines: tuple[str, ...]


def amplified(image: Tensor, reference: Tensor) -> Tensor:
    """Show the difference of two images on middle grey, `AMPLIFIED` times as large."""
    return (0.5 + AMPLIFIED * (image - reference) / 2).clamp(0, 1)


def check_writable(path: Path) -> None:
    """Raise if a file cannot be written, before an image is generated."""
    if path.suffix.lower() not in FORMATS:
        raise ConfigError(f"{path} has no ending that says what image to write; use one of {', '.join(FORMATS)}")
    disk.check_writable(path, make_folder=True)


def save(pixels: Tensor, path: Path) -> None:
    """Write one image, [C, H, W]."""
    _image(pixels).save(path)


def save_sheet(panels: Sequence[Panel], path: Path) -> None:
    """Write images of one size side by side, with their captions below."""
    from PIL import Image, ImageDraw, ImageFont

    font = ImageFont.load_default(size=13)
    images = [_enlarged(_image(panel.pixels)) for panel in panels]
    width, height = images[0].size
    lines = max(len(panel.lines) for panel in panels)
    sheet = Image.new("RGB", (len(images) * (width + _MARGIN) + _MARGIN, height + lines * _LINE + 2 * _MARGIN), "white")
    pen = ImageDraw.Draw(sheet)
    for index, (panel, image) in enumerate(zip(panels, images, strict=True)):
        left = _MARGIN + index * (width + _MARGIN)
        sheet.paste(image, (left, _MARGIN))
        for place, line in enumerate(panel.lines):
            pen.text((left, _MARGIN + height + 4 + place * _LINE), _fitting(line, width, font), "black", font=font)
    sheet.save(path)


def _fitting(line: str, width: int, font: Any) -> str:
    """Cut a line to the width of its image."""
    if font.getlength(line) <= width:
        return line
    while line and font.getlength(line + "…") > width:
        line = line[:-1]
    return line.rstrip() + "…"


def _enlarged(image: Any) -> Any:
    from PIL import Image

    times = max(1, round(_SHOWN / image.width))
    return image.resize((image.width * times, image.height * times), Image.Resampling.NEAREST)


def _image(pixels: Tensor) -> Any:
    from PIL import Image

    levels = (pixels.detach().float().cpu().clamp(0, 1) * 255).round().to(torch.uint8)
    return Image.fromarray(levels.permute(1, 2, 0).contiguous().numpy(), "RGB")
