"""Run the example pipeline on four prompts, eagerly and optimized; write the images and a report.

    python examples/demo.py [--steps 8] [--out demo]

No download is needed: the pipeline ships with the package. Most of the minute or two is compilation.
"""

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageDraw

import tritium

PROMPTS = (
    "two red circles above a blue square on a yellow background",
    "a small green triangle on the left on a white background",
    "three yellow stars on a blue background",
    "a large orange ring left of two purple triangles on a black background",
)
SIDE, GAP = 256, 8


def generate(pipe: Any, prompt: str, steps: int | None) -> tuple[torch.Tensor, float]:
    """Return an image [3, H, W] on the CPU, and the seconds that it took."""
    begin = time.perf_counter()
    settings = {} if steps is None else {"num_inference_steps": steps}
    image = pipe(prompt, **settings, generator=torch.Generator().manual_seed(0), output_type="pt").images[0].cpu()
    return image, time.perf_counter() - begin


def main(out: Path = Path("demo"), steps: int | None = None) -> None:
    out.mkdir(parents=True, exist_ok=True)
    pipe = tritium.load_example("cuda" if torch.cuda.is_available() else "cpu")
    pipe.set_progress_bar_config(disable=True)
    generate(pipe, PROMPTS[0], steps)
    eager = [generate(pipe, prompt, steps) for prompt in PROMPTS]

    with tritium.optimize(pipe) as handle:
        _, first = generate(pipe, PROMPTS[0], steps)
        ours = [generate(pipe, prompt, steps) for prompt in PROMPTS]
        handle.summary()
        report = tritium.explain(handle, call=lambda: generate(pipe, PROMPTS[0], steps))
    report.to_html(out / "report.html", title="Tritium on its example pipeline")

    sheet = Image.new("RGB", (3 * SIDE + 4 * GAP, len(PROMPTS) * (SIDE + 4 * GAP)), "white")
    print(f"\n{'prompt':72} {'eager':>8} {'Tritium':>8}  difference")
    for row, (prompt, (reference, before), (image, after)) in enumerate(zip(PROMPTS, eager, ours, strict=True)):
        psnr = f"PSNR {-10 * (image - reference).square().mean().log10().item():.1f} dB"
        print(f"{prompt:72} {before:6.2f} s {after:6.2f} s  {psnr}")
        panels = {
            f"eager, {before:.2f} s": reference,
            f"Tritium, {after:.2f} s": image,
            f"difference, 100 times; {psnr}": (100 * (image - reference).abs()).clamp(0, 1),
        }
        for column, (title, pixels) in enumerate(panels.items()):
            at = (GAP + column * (SIDE + GAP), row * (SIDE + 4 * GAP))
            ImageDraw.Draw(sheet).text((at[0], at[1] + GAP), title, fill="black")
            panel = Image.fromarray(pixels.mul(255).round().byte().permute(1, 2, 0).numpy())
            sheet.paste(panel.resize((SIDE, SIDE), Image.Resampling.NEAREST), (at[0], at[1] + 3 * GAP))
    sheet.save(out / "compare.png")
    print(f"\nfirst optimized image, with compilation: {first:.1f} s")
    print(f"images: {out / 'compare.png'}\nreport: {out / 'report.html'}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, help="denoising steps; the pipeline's default if left out")
    parser.add_argument("--out", type=Path, default=Path("demo"), help="the folder for the images and the report")
    options = parser.parse_args()
    main(options.out, options.steps)
