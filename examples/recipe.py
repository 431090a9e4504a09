"""Measure the fastest way to run each part of a pipeline once, and use the result in later processes.

    python examples/recipe.py [FOLDER]

FOLDER is a diffusers pipeline; the example that ships with the package if left out.
"""

import subprocess
import sys
from pathlib import Path

import torch
from diffusers import DiffusionPipeline

import tritium


def main(model: str = "example", recipe: Path = Path("recipe.json"), size: str = "128x128", steps: int = 4) -> None:
    # Once for a machine. Images may differ from eager ones by at most 40 dB of PSNR.
    tune = ["tune", model, "--quick", "--min-psnr", "40", "--size", size, "--steps", str(steps), "-o", str(recipe)]
    subprocess.run([sys.executable, "-m", "tritium", *tune], check=True)

    # In every later process. A recipe from another machine, version or model is refused.
    pipe = tritium.load_example() if model == "example" else DiffusionPipeline.from_pretrained(model)
    pipe.to("cuda" if torch.cuda.is_available() else "cpu")
    with tritium.optimize(pipe, recipe) as handle:
        for part, choice in handle.choices.items():
            print(f"{part}: {choice}")


if __name__ == "__main__":
    main(*sys.argv[1:2])
