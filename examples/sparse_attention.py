"""Skip half of the attention blocks of the example pipeline, and measure the change of the image.

    python examples/sparse_attention.py

The transformer sees text and then a latent of 16 x 16 tokens. The first steps stay dense, because they decide the
composition of the image; later ones skip blocks of 16 keys, and a mask is used for two steps.
"""

import torch

import tritium

# The prompt is padded to TEXT tokens, to which all queries attend; the default of 512 would leave little to skip.
PROMPT, SIDE, TEXT = "two red circles above a blue square on a yellow background", 256, 32


def generate(pipe: object, steps: int) -> torch.Tensor:
    size = {"height": SIDE, "width": SIDE, "max_sequence_length": TEXT, "num_inference_steps": steps}
    return pipe(PROMPT, **size, generator=torch.Generator().manual_seed(0), output_type="pt").images[0]


def main(steps: int = 8) -> tuple[float, float]:
    pipe = tritium.load_example()
    dense = generate(pipe, steps)
    side = SIDE // (2 * pipe.vae_scale_factor)
    layout = tritium.SparseLayout((1, side, side), txt_len=TEXT, block_size=16)
    settings = {"sparsity": 0.5, "dense_steps": steps // 4, "reuse_steps": 2}
    with tritium.set_sparse_attention(pipe.transformer, layout, **settings) as handle:
        sparse = generate(pipe, steps)
        density = handle.density()
    psnr = -10 * (sparse - dense).square().mean().log10().item()
    print(f"{layout.tokens} tokens, {layout.blocks} blocks: {density:.0%} of dense attention's work was done")
    print(f"PSNR against dense: {psnr:.1f} dB")
    return density, psnr


if __name__ == "__main__":
    main()
