"""Measure a folder of real weights, and write one file that you can contribute: speed, a tuned recipe, its images.

    python examples/real_weights.py FOLDER results.json --size 1024x1024 --steps 28

FOLDER is a diffusers pipeline: FLUX.1-dev, Qwen-Image, Wan, SDXL, or any other. The options go to all three commands. The
file is written after each of them, so that an interrupted run keeps its figures; it names no path of your machine.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

BUDGET = ("--min-psnr", "32")


def run(*words: object) -> dict[str, object]:
    """Run a command of `tritium`; return the JSON that it prints, or its exit code. Reasons are on stderr."""
    command = [sys.executable, "-m", "tritium", *map(str, words)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    return json.loads(done.stdout) if done.stdout.startswith("{") else {"exit_code": done.returncode}


def main(model: str, out: str = "results.json", *options: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        measured, recipe = Path(folder, "bench.json"), Path(folder, "recipe.json")
        results: dict[str, object] = {"model": Path(model).name, "options": options}
        for command in ("bench", "tune", "verify"):
            chosen = ("--recipe", recipe) if recipe.is_file() else ()
            words = {"bench": ("--warm", "--json", measured), "tune": (*BUDGET, "--json", "-o", recipe)}
            of_model = ("--model", model) if command == "verify" else (model,)
            found = run(command, *of_model, *words.get(command, (*chosen, *BUDGET, "--json")), *options)
            results[command] = json.loads(measured.read_text()) if command == "bench" and measured.is_file() else found
            Path(out).write_text(json.dumps(results, indent=2).replace(model, Path(model).name))


if __name__ == "__main__":
    main(*sys.argv[1:])
