"""Generate images eagerly, with Tritium, and with its recipe for skipped steps; show times and 10 times the errors."""

import time
from pathlib import Path

import torch
from PIL import Image, ImageDraw

import tritium

PROMPTS = ["two red circles above a blue square on a yellow background", "three yellow stars on a blue background"]


def main(out: Path = Path("demo"), **settings: int) -> None:
    def generate() -> tuple[torch.Tensor, float]:
        begin = time.perf_counter()
        images = pipe(PROMPTS, **settings, generator=torch.Generator().manual_seed(0), output_type="pt").images.cpu()
        return images, time.perf_counter() - begin

    out.mkdir(parents=True, exist_ok=True)
    pipe = tritium.load_example("cuda" if torch.cuda.is_available() else "cpu")
    pipe.set_progress_bar_config(disable=True)
    ways = {"eager": [generate() for _ in range(2)][-1]}
    for way, plan in (("Tritium", None), ("Tritium with recipe", "example")):
        with tritium.optimize(pipe, plan) as handle:
            ways[way] = [generate() for _ in range(2)][-1]
            print(handle)
            if plan is None:
                tritium.explain(handle, call=generate).to_html(out / "report.html")
    eager, slow = ways["eager"]
    columns = [torch.cat([images, 10 * (images - eager).abs()], 3) for images, _ in ways.values()]
    sheet = Image.fromarray(torch.cat(columns, 3).clamp(0, 1).permute(0, 2, 3, 1).flatten(0, 1).mul(255).byte().numpy())
    for place, (way, (ours, t)) in enumerate(ways.items()):
        print(text := f"{way}: {t:.2f} s, {slow / t:.2f}x, PSNR {-10 * (ours - eager).square().mean().log10():.1f} dB")
        ImageDraw.Draw(sheet).text((place * 256 + 2, 1), text, "black", stroke_width=1, stroke_fill="white")
    sheet.save(out / "compare.png")


if __name__ == "__main__":
    main()
