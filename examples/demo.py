"""Generate images eagerly and optimized; write them beside their difference, and a report. Takes a minute or two."""

import time
from pathlib import Path

import torch
from PIL import Image

import tritium

PROMPTS = [
    "two red circles above a blue square on a yellow background",
    "three yellow stars on a blue background",
    "a large orange ring left of two purple triangles on a black background",
]


def main(out: Path = Path("demo"), **settings: int) -> None:
    out.mkdir(parents=True, exist_ok=True)
    pipe = tritium.load_example("cuda" if torch.cuda.is_available() else "cpu")
    pipe.set_progress_bar_config(disable=True)

    def generate(what: str) -> torch.Tensor:
        begin = time.perf_counter()
        images = pipe(PROMPTS, **settings, generator=torch.Generator().manual_seed(0), output_type="pt").images.cpu()
        print(f"{what}: {time.perf_counter() - begin:.2f} s")
        return images

    eager = [generate(what) for what in ("first eager images", "eager images")][-1]
    with tritium.optimize(pipe) as handle:
        ours = [generate(what) for what in ("first optimized images, with compilation", "optimized images")][-1]
        handle.summary()
        tritium.explain(handle, call=lambda: generate("images under the profiler")).to_html(out / "report.html")
    print(f"PSNR {-10 * (ours - eager).square().mean().log10().item():.1f} dB; the sheet shows 100 times the error")
    sheet = torch.cat([eager, ours, 100 * (ours - eager).abs()], dim=3).clamp(0, 1).permute(0, 2, 3, 1).flatten(0, 1)
    Image.fromarray(sheet.mul(255).byte().numpy()).save(out / "compare.png")


if __name__ == "__main__":
    main()
