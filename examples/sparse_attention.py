"""Run sparse attention on the example pipeline: skip half of the blocks, measure the change.

    python examples/sparse_attention.py [folder]

The pipeline's transformer sees text and then a latent of 16 x 16 tokens. The first steps stay dense, because they
decide the composition of the image; later ones skip blocks of 16 keys, and a mask is used for two steps.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from PIL import Image

import tritium
from tritium.bench import quality

PROMPT = "two red circles above a blue square on a yellow background"
# The prompt is padded to TEXT tokens, to which all queries attend; the default of 512 would leave little to skip.
SIDE, TEXT, STEPS = 256, 32, 8


def draw(pipe: object, steps: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    drawn = pipe(  # type: ignore[operator]
        PROMPT,
        height=SIDE,
        width=SIDE,
        max_sequence_length=TEXT,
        num_inference_steps=steps,
        generator=generator,
        output_type="pt",
    )
    return drawn.images[0]


def main(folder: Path | None = None, steps: int = STEPS) -> dict[str, float]:
    pipe = tritium.load_example()
    pipe.set_progress_bar_config(disable=True)
    dense = draw(pipe, steps)
    side = SIDE // (2 * pipe.vae_scale_factor)
    layout = tritium.SparseLayout((1, side, side), txt_len=TEXT, block_size=16)
    with tritium.set_sparse_attention(
        pipe.transformer, layout, sparsity=0.5, dense_steps=steps // 4, reuse_steps=2
    ) as handle:
        sparse = draw(pipe, steps)
        density = handle.density()
    found = {"density": density, "psnr": quality.psnr(sparse, dense)}
    print(f"{layout.tokens} tokens, {layout.blocks} blocks: {density:.0%} of dense attention's work was done")
    print(f"PSNR against dense: {found['psnr']:.1f} dB")
    if folder is not None:
        sheet = torch.cat([dense, sparse], dim=2).mul(255).round().byte().permute(1, 2, 0).numpy()
        Image.fromarray(sheet).save(folder / "dense-and-sparse.png")
    return found


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
