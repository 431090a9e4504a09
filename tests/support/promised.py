"""Pipelines under a shape contract."""

import torch

import tritium
from tritium import CompilationConfig, Plan, Shapes, compat

EAGER = CompilationConfig(engine="eager")
SIZES = [(32, 32), (32, 48)]


# For tests of the denoiser: tracing the decoder takes as long again.
DENOISER = {"vae": "eager"}


def optimized(pipe, config=EAGER, components=None, **shapes):
    shapes = Shapes(**{"sizes": SIZES, "text_tokens": [16], **shapes})
    return tritium.optimize(pipe, Plan(config=config, components=components or {}, progress=False, shapes=shapes))


def generate(pipe, height=32, width=32, **call):
    arguments = {"max_sequence_length": 16, "num_inference_steps": 2, "output_type": "pt", **call}
    generator = torch.Generator().manual_seed(0)
    return pipe(
        arguments.pop("prompt", "a red circle"), height=height, width=width, generator=generator, **arguments
    ).images


class Compiles:
    """Graphs that Dynamo compiles inside."""

    def __enter__(self):
        self._before = compat.dynamo.graphs_compiled()
        return self

    def __exit__(self, *_):
        self.count = compat.dynamo.graphs_compiled() - self._before


def lora_weights(pipe, rank=2):
    """A LoRA for the attention of the first block, as diffusers' files have it."""
    width = pipe.transformer.inner_dim
    name = "transformer.transformer_blocks.0.attn.to_q"
    return {
        f"{name}.lora_A.weight": torch.randn(rank, width) * 0.1,
        f"{name}.lora_B.weight": torch.randn(width, rank) * 0.1,
    }
