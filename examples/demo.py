"""Run the example pipeline on four prompts, eagerly and accelerated; write image pairs and a report.

    python examples/demo.py [--steps 8] [--out demo]

No download is needed: the pipeline ships with the package. Most of the minute or two is compilation.
"""

import argparse
from pathlib import Path

import tritium
from tritium import device
from tritium.bench import generation, images, pipelines, quality
from tritium.bench.generation import Job
from tritium.cli.run import panels


def main(out: Path = Path("demo"), steps: int | None = None) -> None:
    out.mkdir(parents=True, exist_ok=True)
    pipe = tritium.load_example(device.default())
    pipe.set_progress_bar_config(disable=True)
    jobs = [Job(prompt=prompt, seed=seed, steps=steps) for seed, prompt in enumerate(tritium.example.PROMPTS)]

    with tritium.optimize(pipe) as handle:
        first = generation.generate(pipe, jobs[0])
        compared = [pipelines.compare(pipe, handle, job) for job in jobs]
        handle.summary()
        report = tritium.explain(handle, call=lambda: generation.generate(pipe, jobs[0]))
    report.to_html(out / "report.html", title="Tritium on its example pipeline")

    images.save_rows([panels(*row) for row in zip(compared, jobs, strict=True)], out / "compare.png")
    print(f"\n{'prompt':72} {'eager':>8} {'Tritium':>8}  difference")
    for job, found in zip(jobs, compared, strict=True):
        between = quality.difference(found.ours.pixels, found.eager.pixels)
        print(f"{job.prompt:72} {found.eager.seconds:6.2f} s {found.ours.seconds:6.2f} s  {between}")
    print(f"\nfirst accelerated picture, with compilation: {first.seconds:.1f} s")
    print(f"pictures: {out / 'compare.png'}\nreport:   {out / 'report.html'}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, help="denoising steps; the pipeline's own number if left out")
    parser.add_argument("--out", type=Path, default=Path("demo"), help="where to write the pictures and the report")
    options = parser.parse_args()
    main(options.out, options.steps)
