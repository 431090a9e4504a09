"""Divide the tokens of a stream into the blocks of a sparse mask.

A stream is text and the frames of a latent, row by row. Neighbouring pixels can be far apart in it, so frames are
reordered by tiles, and text is moved to the end: [video, text]. No block contains both video and text, so that the
blocks of a mask are the blocks that a kernel skips, whatever the numbers of tokens are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tritium import compat, device
from tritium.errors import ArgumentError, ArgumentTypeError

# The side of the tiles of a frame: 64 neighbouring tokens each.
TILE = 8


def _kept(create: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return a method that creates its tensor once for each layout and device."""

    @functools.wraps(create)
    def call(self: SparseLayout, where: torch.device | str = "cpu") -> torch.Tensor:
        # Tensors created by a trace, in a dispatch mode or in a capture must not be kept: memory allocated in a capture has
        # valid contents only after a replay.
        if torch.compiler.is_compiling() or compat.dynamo.is_watched() or device.is_capturing():
            return create(self, where)
        return _created(create, self, str(where))

    return call


# Outside of inference mode: autograd cannot use inference tensors.
@functools.lru_cache(maxsize=192)
@torch.inference_mode(mode=False)
def _created(create: Callable[..., torch.Tensor], layout: SparseLayout, where: str) -> torch.Tensor:
    return create(layout, where)


@dataclass(frozen=True)
class SparseLayout:
    """The order of tokens for a latent (frames, height, width) and `txt_len` tokens of text.

    Apply `permute` once per forward to every tensor with a row per token, including rotary tables; `unpermute` is the
    inverse. Layers in between that treat all tokens equally need no change.
    """

    latent_shape: tuple[int, int, int]
    txt_len: int = 0
    block_size: int = 128
    # Tiles of one token leave the frames as they are.
    tile: int = TILE
    # Whether text precedes the latent, as in FLUX, or follows it, as in HunyuanVideo.
    text_first: bool = True

    def __post_init__(self) -> None:
        shape = self.latent_shape
        if not isinstance(shape, (tuple, list)) or len(shape) != 3 or not all(map(_is_size, shape)):
            raise ArgumentTypeError(f"latent_shape must be (frames, height, width), got {shape!r}")
        object.__setattr__(self, "latent_shape", tuple(shape))
        for name, least in (("block_size", 1), ("tile", 1), ("txt_len", 0)):
            if not _is_size(getattr(self, name), least):
                raise ArgumentError(f"{name} must be an integer, {least} or more, got {getattr(self, name)!r}")

    @classmethod
    def plain(cls, tokens: int, block_size: int = 128) -> SparseLayout:
        """Return a layout that keeps the order and cuts every `block_size` tokens."""
        return cls((1, 1, tokens), 0, block_size, tile=1)

    @property
    def video(self) -> int:
        frames, height, width = self.latent_shape
        return frames * height * width

    @property
    def tokens(self) -> int:
        return self.video + self.txt_len

    @property
    def video_blocks(self) -> int:
        return -(-self.video // self.block_size)

    @property
    def text_blocks(self) -> int:
        return -(-self.txt_len // self.block_size)

    @property
    def blocks(self) -> int:
        return self.video_blocks + self.text_blocks

    @property
    def keeps_order(self) -> bool:
        """Whether `permute` returns the stream as it is."""
        return self.tile == 1 and (self.txt_len == 0 or not self.text_first)

    @_kept
    def edges(self, where: torch.device | str) -> torch.Tensor:
        """Return the starts of the blocks in the permuted stream and the end of the last, in int32."""
        # Avoid `min`: Inductor cannot simplify it if there is one block of text.
        video = torch.arange(self.video_blocks, device=where) * self.block_size
        text = torch.arange(self.text_blocks, device=where) * self.block_size + self.video
        end = torch.full((1,), self.tokens, device=where)
        return torch.cat([video, text, end]).to(torch.int32)

    @_kept
    def index(self, where: torch.device | str) -> torch.Tensor:
        """Return the index in the stream for each index of the permuted stream."""
        frames, height, width = self.latent_shape
        first, after = (self.txt_len, 0) if self.text_first else (0, self.video)
        grid = torch.arange(self.video, device=where).view(frames, height, width) + first
        divisible = height % self.tile == 0 and width % self.tile == 0
        # If tiles do not fit, leave the first of several frames as it is: every block sees all of it anyway.
        raw = 0 if divisible or frames == 1 else 1
        video = torch.cat([grid[:raw].flatten(), _tiled(grid[raw:], self.tile).flatten()])
        return torch.cat([video, torch.arange(self.txt_len, device=where) + after])

    @_kept
    def inverse(self, where: torch.device | str) -> torch.Tensor:
        """Return the index in the permuted stream for each index of the stream."""
        return torch.argsort(self.index(where))

    def permute(self, x: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """Reorder a tensor, which has one row per token along `dim`, into the order of blocks."""
        self._check(x, dim)
        return x.index_select(dim, self.index(x.device))

    def unpermute(self, x: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """Undo `permute`."""
        self._check(x, dim)
        return x.index_select(dim, self.inverse(x.device))

    def _check(self, x: torch.Tensor, dim: int) -> None:
        if x.shape[dim] != self.tokens:
            raise ArgumentError(
                f"the layout is of {self.txt_len} + {'x'.join(map(str, self.latent_shape))} = {self.tokens} tokens, "
                f"got {x.shape[dim]} along dim {dim} of {tuple(x.shape)}"
            )


def _is_size(value: Any, least: int = 1) -> bool:
    return isinstance(value, (int, torch.SymInt)) and bool(value >= least)


def _tiled(grid: torch.Tensor, tile: int) -> torch.Tensor:
    """Return frames [F, H, W] as rows [F, H W]: whole tiles, then the strips below and to the right."""
    frames, height, width = grid.shape
    main_height, main_width = height - height % tile, width - width % tile
    strips = [part.flatten(1) for part in (grid[:, main_height:], grid[:, :main_height, main_width:])]
    if main_height == 0 or main_width == 0:
        # No whole tile: reshaping an empty tensor to symbolic sizes is an error.
        return torch.cat(strips, dim=1)
    main = grid[:, :main_height, :main_width].reshape(frames, main_height // tile, tile, main_width // tile, tile)
    return torch.cat([main.transpose(2, 3).flatten(1), *strips], dim=1)
