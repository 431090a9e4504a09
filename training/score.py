"""Check whether images match their prompts, and score the example pipeline.

    python training/score.py PIPELINE --prompts 128 --sheet sheet.png

The checker has the palette and the shapes, and no information on how an image was made. `ceiling` scores the VAE's
reconstructions, `floor` scores generated images against the scenes of other prompts.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import grid_sample, max_pool2d

from draw import FIELDS, LIMIT, SMALL, draw, palette, sample_scenes, templates
from tritium.example.grammar import PLACES, Scene, caption

MASK = 24
ATTRIBUTES = ("background", "colour", "halves", "shape", "count", "size")


def prompts_of(scenes: torch.Tensor, seed: int = 0) -> list[str]:
    """Return one caption per scene, always with its background."""
    choose = random.Random(seed)
    return [caption(Scene(*row), choose) for row in scenes.tolist()]


def unseen(count: int, seed: int = 1234) -> tuple[torch.Tensor, list[str]]:
    """Return scenes of held-out combinations and their prompts, the same ones for the same seed."""
    scenes = sample_scenes(count, torch.Generator().manual_seed(seed), unseen=True)
    return scenes, prompts_of(scenes, seed)


def _label(pictures: torch.Tensor) -> torch.Tensor:
    """Return the nearest colour of each pixel, [N, H, W]."""
    colours = palette(pictures.device)
    distance = torch.stack([(pictures - colour[:, None, None]).square().sum(1) for colour in colours])
    return distance.argmin(0)


def _components(mask: torch.Tensor) -> torch.Tensor:
    """Label connected parts of masks [N, H, W]: the highest index in the part plus one, 0 outside."""
    # A border between two colours passes through a third; opening removes areas of at most two pixels in width.
    whole = mask[:, None]
    eroded = -max_pool2d(-whole.float(), 3, 1, 1)
    opened = (max_pool2d(eroded, 3, 1, 1) > 0) & whole
    # float32 counts exactly up to 2**24 pixels
    index = torch.arange(1, mask[0].numel() + 1, device=mask.device, dtype=torch.float32).view_as(whole[0])
    label = index * opened
    # An object is at most half a side wide; longer winding parts may fall apart.
    for _ in range(sum(mask.shape[1:]) // 16):
        before = label
        for _ in range(16):
            label = max_pool2d(label, 3, 1, 1) * opened
        if torch.equal(before, label):
            break
    # The tips of a star are thin too: let the remaining parts grow back a little.
    for _ in range(3):
        label = torch.where(whole & (label == 0), max_pool2d(label, 3, 1, 1), label)
    return label[:, 0].long()


class Parts:
    """The connected parts of a batch of masks above a minimum size, with position and shape."""

    def __init__(self, mask: torch.Tensor) -> None:
        count, height, width = mask.shape
        unit = min(height, width)
        labels = _components(mask)
        # The smallest object, a small star, covers about 1.4 * (0.09 * unit)**2.
        smallest = 0.5 * (SMALL[0] * unit) ** 2
        area = torch.zeros(count, height * width + 1, device=mask.device)
        area.scatter_add_(1, labels.flatten(1), torch.ones_like(labels.flatten(1), dtype=area.dtype))
        area[:, 0] = 0
        self.picture, which = (area >= smallest).nonzero(as_tuple=True)
        self.count = torch.bincount(self.picture, minlength=count)
        own = labels[self.picture] == which[:, None, None]
        rows, columns = own.any(2).int(), own.any(1).int()
        top, left = rows.argmax(1), columns.argmax(1)
        bottom, right = height - rows.flip(1).argmax(1), width - columns.flip(1).argmax(1)
        self.x, self.y = (left + right) / 2 / width, (top + bottom) / 2 / height
        self.extent = torch.maximum(bottom - top, right - left) / 2 / unit
        self.shape = self._shapes(own, top, bottom, left, right)

    @staticmethod
    def _shapes(own: torch.Tensor, *box: torch.Tensor) -> torch.Tensor:
        """Return the template with the largest overlap with each part if both fill the same box."""
        if not len(own):
            return torch.zeros(0, dtype=torch.long, device=own.device)
        height, width = own.shape[1:]
        top, bottom, left, right = (side[:, None].float() for side in box)
        at = ((torch.arange(MASK, device=own.device) + 0.5) / MASK)[None]
        y, x = (top + (bottom - top) * at) / height * 2 - 1, (left + (right - left) * at) / width * 2 - 1
        grid = torch.stack([x[:, None].expand(-1, MASK, -1), y[:, :, None].expand(-1, -1, MASK)], -1)
        seen = grid_sample(own[:, None].float(), grid, mode="nearest", align_corners=False)[:, 0] > 0.5
        known = templates(MASK).to(own.device)
        both = (seen[:, None] & known).flatten(2).sum(2)
        either = (seen[:, None] | known).flatten(2).sum(2)
        return (both / either).argmax(1)

    def every(self, holds: torch.Tensor) -> torch.Tensor:
        """Return for each image whether it has parts and `holds` is True for all of them."""
        broken = torch.bincount(self.picture[~holds], minlength=len(self.count))
        return (self.count > 0) & (broken == 0)


def _in_place(parts: Parts, place: torch.Tensor) -> torch.Tensor:
    """Return for each image whether all parts are at the place with its index."""
    at = place[parts.picture]
    mean_x, mean_y = (
        torch.bincount(parts.picture, weights=value, minlength=len(place)) / parts.count.clamp_min(1)
        for value in (parts.x, parts.y)
    )
    middle = ((mean_x - 0.5).abs() < 0.15) & ((mean_y - 0.5).abs() < 0.15)
    holds = torch.ones_like(at, dtype=torch.bool)
    for index, side in enumerate((parts.x < 0.5, parts.x > 0.5, parts.y < 0.5, parts.y > 0.5), start=1):
        holds &= (at != index) | side
    return parts.every(holds) & ((place != PLACES.index("centre")) | middle)


def check(pictures: torch.Tensor, scenes: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return which attributes each image [N, 3, H, W] in [0, 1] has right, and `all` of them together.

    `colour`: the stated colours and no others are present; `halves`: they are at the place in the prompt.
    """
    pictures, scenes = pictures.float(), scenes.to(pictures.device)
    seen = _label(pictures)
    field = {name: scenes[:, column] for name, column in FIELDS.items()}
    border = torch.cat([seen[:, 0], seen[:, -1], seen[:, :, 0], seen[:, :, -1]], 1)
    pair = field["pair"] == 1
    result = {name: torch.ones_like(pair) for name in ATTRIBUTES}
    result["background"] = border.mode(1).values == field["background"]
    foreign = seen != field["background"][:, None, None]
    place = field["place"]
    for group in "ab":
        absent = ~pair if group == "b" else torch.zeros_like(pair)
        mask = seen == field["colour_" + group][:, None, None]
        foreign &= ~mask | absent[:, None, None]
        parts = Parts(mask)
        size = field["size_" + group][parts.picture]
        sized = (size == 0) | ((parts.extent > LIMIT) == (size == 2))
        result["colour"] &= (parts.count > 0) | absent
        result["halves"] &= _in_place(parts, place) | absent
        result["shape"] &= parts.every(parts.shape == field["shape_" + group][parts.picture]) | absent
        result["count"] &= (parts.count == field["count_" + group]) | absent
        result["size"] &= parts.every(sized) | absent
        # left and right, top and bottom are neighbours in PLACES
        place = torch.where(pair, (place - 1 ^ 1) + 1, place)
    result["colour"] &= Parts(foreign).count == 0
    result["all"] = torch.stack(list(result.values())).all(0)
    return result


def means(result: dict[str, torch.Tensor]) -> dict[str, float]:
    return {name: round(float(value.float().mean()), 4) for name, value in result.items()}


@torch.inference_mode()
def pictures(
    pipeline: Any, prompts: Sequence[str], height: int, width: int, steps: int, *, length: int = 512, cfg: float = 1.0
) -> torch.Tensor:
    """Generate images for the prompts, [N, 3, height, width] in [0, 1]."""
    guidance = {"negative_prompt": [""] * len(prompts), "true_cfg_scale": cfg} if cfg > 1 else {}
    pipeline.set_progress_bar_config(disable=True)
    return pipeline(
        list(prompts),
        height=height,
        width=width,
        num_inference_steps=steps,
        max_sequence_length=length,
        generator=torch.Generator().manual_seed(0),
        output_type="pt",
        **guidance,
    ).images


@torch.inference_mode()
def ceiling(vae: Any, count: int, height: int = 128, width: int = 128) -> dict[str, float]:
    """Score rendered images after the VAE's round trip: an upper bound for every denoiser."""
    scenes, _ = unseen(count)
    truth = draw(scenes, height, width, torch.Generator().manual_seed(7)).to(vae.device)
    again = vae.decode(vae.encode(truth * 2 - 1).latent_dist.mean).sample
    return means(check((again / 2 + 0.5).clamp(0, 1), scenes))


SETTINGS = {
    "128 length 512 steps 28": (128, 128, 28, 512, 1.0),
    "128 length 512 steps 8": (128, 128, 8, 512, 1.0),
    "128 length 32 steps 28": (128, 128, 28, 32, 1.0),
    "128 length 32 steps 8": (128, 128, 8, 32, 1.0),
    "128 length 32 steps 8 cfg 2": (128, 128, 8, 32, 2.0),
    "256 length 512 steps 28": (256, 256, 28, 512, 1.0),
    "192x128 length 512 steps 8": (192, 128, 8, 512, 1.0),
    "96x160 length 512 steps 8": (96, 160, 8, 512, 1.0),
}


def score(pipeline: Any, count: int, settings: Sequence[str] = tuple(SETTINGS)) -> dict[str, dict[str, float]]:
    """Return the share of correct images for held-out prompts by attribute, for each setting.

    `floor` and `ceiling` are included.
    """
    scenes, prompts = unseen(count)
    scores = {}
    for name in settings:
        height, width, steps, length, cfg = SETTINGS[name]
        drawn = pictures(pipeline, prompts, height, width, steps, length=length, cfg=cfg)
        scores[name] = means(check(drawn, scenes))
        if "floor" not in scores:
            scores["floor"] = means(check(drawn, scenes.roll(1, 0)))
    scores["ceiling"] = ceiling(pipeline.vae, count)
    return scores


def sheet(images: torch.Tensor, columns: int, path: Path, gap: int = 4) -> None:
    """Write images [N, 3, H, W] as one PNG grid."""
    from PIL import Image

    framed = torch.nn.functional.pad(images.float().cpu(), (gap, 0, gap, 0), value=1.0)
    missing = -len(framed) % columns
    framed = torch.cat([framed, torch.ones(missing, *framed.shape[1:])])
    count, _, height, width = framed.shape
    rows = framed.view(count // columns, columns, 3, height, width)
    whole = rows.permute(0, 3, 1, 4, 2).reshape(count // columns * height, columns * width, 3)
    Image.fromarray((whole * 255).round().clamp(0, 255).byte().numpy()).save(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pipeline", type=Path)
    parser.add_argument("--prompts", type=int, default=128)
    parser.add_argument("--settings", nargs="*", default=list(SETTINGS), choices=list(SETTINGS))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--shift", type=float, help="the scheduler's shift, in place of the saved one")
    parser.add_argument("--sheet", type=Path, help="also write a grid of 24 held-out pictures")
    options = parser.parse_args()

    from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline

    pipeline = FluxPipeline.from_pretrained(options.pipeline, local_files_only=True).to(options.device)
    if options.shift:
        pipeline.scheduler = FlowMatchEulerDiscreteScheduler.from_config(pipeline.scheduler.config, shift=options.shift)
    started = time.monotonic()
    scores = score(pipeline, options.prompts, options.settings)
    for name, values in scores.items():
        print(f"{name:30}", *(f"{key} {value:.3f}" for key, value in values.items()))
    print(json.dumps({"prompts": options.prompts, "seconds": round(time.monotonic() - started, 1), "scores": scores}))
    if options.sheet:
        _, prompts = unseen(24)
        sheet(pictures(pipeline, prompts, 128, 128, 28), 8, options.sheet)
        print(*prompts, sep="\n")


if __name__ == "__main__":
    main()
