"""Render images of scenes in whole batches from signed distances, on any device.

A batch of scenes is an integer tensor with one row per scene; its columns are the fields of `Scene`. Sizes and margins
are in units of the image's shorter side. Objects never overlap, because each has a separate cell.
"""

from __future__ import annotations

import functools
import math

import torch

from tritium.example.grammar import COLOURS, MOST, PLACES, SHAPES, Scene

# Half extents of small and large objects; LIMIT divides them for the checker. The largest extent that fits three times
# into a row of 96 pixels is 0.146.
SMALL, LARGE, LIMIT = (0.09, 0.105), (0.14, 0.2), 0.122
MARGIN = 0.02
STAR_WAIST = 0.45
RING_HOLE = 0.5
# One combination in HELD_OUT is excluded from training, for all sizes and backgrounds.
HELD_OUT = 16

FIELDS = {name: column for column, name in enumerate(Scene._fields)}


@functools.cache
def palette(device: torch.device | str = "cpu") -> torch.Tensor:
    """Return the colours as values in [0, 1], [colours, 3]."""
    return torch.tensor(list(COLOURS.values()), device=device) / 255.0


def held_out(scenes: torch.Tensor) -> torch.Tensor:
    """Return True for scenes whose combination of shapes, colours, counts and places is held out."""
    key = torch.zeros_like(scenes[:, 0])
    for name in ("pair", "place", "shape_a", "colour_a", "count_a", "shape_b", "colour_b", "count_b"):
        key = key * 11 + scenes[:, FIELDS[name]]
    # A multiplicative hash: use the high bits, as the low bits of a product are weak.
    return ((key * 2654435761) % 2**32 // 2**16) % HELD_OUT == 0


def _sample(count: int, generator: torch.Generator) -> torch.Tensor:
    """Return random scenes of all combinations; half of them have two groups."""

    def upto(high: int) -> torch.Tensor:
        return torch.randint(high, (count,), generator=generator)

    pair = upto(2)
    # A third of the scenes with one group have any place; two groups always have a side.
    place = torch.where(pair == 1, 1 + upto(4), (upto(9) - 3).clamp_min(0) % len(PLACES))
    # Three different colours: each is chosen among those that are left.
    background = upto(len(COLOURS))
    colour_a = (background + 1 + upto(len(COLOURS) - 1)) % len(COLOURS)
    low, high = torch.minimum(background, colour_a), torch.maximum(background, colour_a)
    colour_b = upto(len(COLOURS) - 2)
    colour_b = colour_b + (colour_b >= low)
    colour_b = colour_b + (colour_b >= high)
    first = [upto(len(SHAPES)), colour_a, 1 + upto(MOST), (upto(4) - 1).clamp_min(0)]
    second = [upto(len(SHAPES)), colour_b, 1 + upto(MOST), (upto(4) - 1).clamp_min(0)]
    return torch.stack([pair, place, background, *first, *(value * pair for value in second)], 1)


def sample_scenes(count: int, generator: torch.Generator, *, unseen: bool = False) -> torch.Tensor:
    """Return `count` scenes for training, or held-out ones with `unseen`, as [count, fields]."""
    kept: list[torch.Tensor] = []
    while sum(map(len, kept)) < count:
        scenes = _sample(2 * count + 64, generator)
        kept.append(scenes[held_out(scenes) == unseen])
    return torch.cat(kept)[:count]


def _distance(shape: torch.Tensor, x: torch.Tensor, y: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
    """Return the signed distance to each image's shape with half extent r, centred at 0. y points down."""
    length = torch.hypot(x, y)
    circle = length - r
    square = torch.maximum(x.abs(), y.abs()) - 0.9 * r
    # Equal sides of 2 r: one half plane below, and two slanted ones that meet at the tip.
    height = math.sqrt(3) * r
    slant = (math.sqrt(3) * x.abs() - (y + height / 2)) / 2
    triangle = torch.maximum(y - height / 2, slant)
    # Fold all points of a star onto half of one arm: a straight edge from the tip to the waist.
    tip, fold = 1.05 * r, math.pi / 5
    angle = (torch.atan2(x, -y).abs() % (2 * fold) - fold).abs()
    angle = fold - angle
    along, across = length * torch.cos(angle), length * torch.sin(angle)
    waist_x, waist_y = STAR_WAIST * math.cos(fold), STAR_WAIST * math.sin(fold)
    norm = math.hypot(waist_y, 1 - waist_x)
    star = ((along - tip) * waist_y + across * (1 - waist_x)) / norm
    middle, half = r * (1 + RING_HOLE) / 2, r * (1 - RING_HOLE) / 2
    ring = (length - middle).abs() - half
    every = torch.stack([circle, square, triangle, star, ring])
    return every.gather(0, shape.expand(every.shape[1:])[None])[0]


def templates(size: int = 24) -> torch.Tensor:
    """Return each shape as a mask that fills its box, for the checker, as [shapes, size, size]."""
    fine = 8 * size
    at = (torch.arange(fine) + 0.5) / fine * 2.4 - 1.2
    y, x = at[:, None].expand(fine, fine), at[None, :].expand(fine, fine)
    masks = []
    for shape in range(len(SHAPES)):
        inside = _distance(torch.tensor([[shape]]), x, y, torch.ones(1, 1)) < 0
        rows, columns = inside.any(1).nonzero()[:, 0], inside.any(0).nonzero()[:, 0]
        box = inside[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1].float()
        masks.append(torch.nn.functional.interpolate(box[None, None], size=(size, size), mode="area")[0, 0] > 0.5)
    return torch.stack(masks)


def _uniform(like: torch.Tensor, low: float, high: float, generator: torch.Generator) -> torch.Tensor:
    return low + (high - low) * torch.rand(like.shape, generator=generator, device=like.device)


def _place(
    scenes: torch.Tensor, group: str, height: int, width: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return centres and half extents of a group's objects in pixels: x, y [B, MOST] and r [B, 1]."""
    unit = min(height, width)
    count = scenes[:, FIELDS["count_" + group], None].clamp_min(1)
    size = scenes[:, FIELDS["size_" + group], None]
    place = scenes[:, FIELDS["place"], None]
    if group == "b":
        # left and right, top and bottom are neighbours in PLACES
        place = torch.where(place == 0, place, (place - 1 ^ 1) + 1)
    left, right, top, bottom, centre = (place == index for index in range(1, 6))
    x0, x1 = width * 0.5 * right, width * (1 - 0.5 * left.float())
    y0, y1 = height * 0.5 * bottom, height * (1 - 0.5 * top.float())

    coin = _uniform(x0, 0, 1, generator) < 0.5
    across = (x1 - x0 > y1 - y0) | ((x1 - x0 == y1 - y0) & coin)
    cell_x = torch.where(across, (x1 - x0) / count, x1 - x0)
    cell_y = torch.where(across, y1 - y0, (y1 - y0) / count)

    stated_large = torch.where(size == 0, _uniform(x0, 0, 1, generator) < 0.5, size == 2)
    r = unit * torch.where(stated_large, _uniform(x0, *LARGE, generator), _uniform(x0, *SMALL, generator))
    r = torch.minimum(r, torch.minimum(cell_x, cell_y) / 2 - MARGIN * unit)

    index = torch.arange(MOST, device=scenes.device)[None]
    start_x = x0 + torch.where(across, cell_x * index, torch.zeros_like(cell_x))
    start_y = y0 + torch.where(across, torch.zeros_like(cell_y), cell_y * index)
    room_x, room_y = cell_x / 2 - MARGIN * unit - r, cell_y / 2 - MARGIN * unit - r
    near = 0.03 * unit
    room_x = torch.where(centre, room_x.clamp_max(near), room_x).expand_as(start_x)
    room_y = torch.where(centre, room_y.clamp_max(near), room_y).expand_as(start_y)
    x = start_x + cell_x / 2 + room_x * _uniform(room_x, -1, 1, generator)
    y = start_y + cell_y / 2 + room_y * _uniform(room_y, -1, 1, generator)
    return x, y, r


def draw(scenes: torch.Tensor, height: int, width: int, generator: torch.Generator) -> torch.Tensor:
    """Return images of the scenes in [0, 1], [B, 3, height, width], on the device of scenes and generator."""
    colours = palette(scenes.device)
    picture = colours[scenes[:, FIELDS["background"]]][:, :, None, None].expand(-1, -1, height, width)
    grid_y = (torch.arange(height, device=scenes.device) + 0.5)[None, :, None]
    grid_x = (torch.arange(width, device=scenes.device) + 0.5)[None, None, :]
    for group in "ab":
        x, y, r = _place(scenes, group, height, width, generator)
        shape = scenes[:, FIELDS["shape_" + group], None, None]
        colour = colours[scenes[:, FIELDS["colour_" + group]]][:, :, None, None]
        count = scenes[:, FIELDS["count_" + group]]
        nearest = torch.full((), math.inf, device=scenes.device)
        for index in range(MOST):
            dx, dy = torch.broadcast_tensors(grid_x - x[:, index, None, None], grid_y - y[:, index, None, None])
            distance = _distance(shape, dx, dy, r[:, :, None])
            absent = (count <= index)[:, None, None]
            nearest = torch.minimum(nearest, distance.masked_fill(absent, math.inf))
        cover = (0.5 - nearest).clamp(0, 1)[:, None]
        picture = torch.lerp(picture, colour.expand_as(picture), cover)
    return picture
