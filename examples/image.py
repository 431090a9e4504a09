"""Generate one image with an optimized pipeline.

    python examples/image.py

The first call compiles, which takes a minute on a CPU. Later calls, and later processes with the same cache, do not.
"""

from pathlib import Path

import torch

import tritium

PROMPT = "two red circles above a blue square on a yellow background"


def main(path: Path = Path("image.png")) -> None:
    # Any other pipeline: diffusers.DiffusionPipeline.from_pretrained(...).to("cuda")
    pipe = tritium.load_example("cuda" if torch.cuda.is_available() else "cpu")
    handle = tritium.optimize(pipe)
    image = pipe(PROMPT, num_inference_steps=8, generator=torch.Generator().manual_seed(0)).images[0]
    image.save(path)

    handle.summary()  # by part: time of a call, share, what was done
    handle.remove()  # the pipeline as it was, bit for bit


if __name__ == "__main__":
    main()
