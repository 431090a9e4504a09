"""The names that blocks of code in the documentation use without defining them, as tiny models and inputs."""

from __future__ import annotations

import dataclasses
import functools
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import torch
from torch import nn

import tritium
from support import checkpoints, small_models, small_pipelines, tiny_pipeline
from tritium.pipelines.recipe import Recipe, fingerprint_of
from tritium.techniques import Quantize
from tritium.techniques.quantize.files import writing

TOKENS = 16 + 8 * 8
PROMPT = "a red circle above a blue square"

# Hardware, sizes and real weights that pages name, and what their blocks run with instead.
SUBSTITUTES = (
    ('"cuda"', '"cpu"'),
    # The sequence of the tiny pipeline: 16 tokens of text and 64 of the latent.
    ("(21, 30, 52)", "(1, 8, 8)"),
    ("txt_len=0", "txt_len=16"),
    ("[21, 30, 52]", "[2, 8, 8]"),
    ("height=480, width=832, num_frames=81, num_inference_steps=50", "height=32, width=48, num_frames=1"),
)


def substituted(text: str) -> str:
    for named, used in SUBSTITUTES:
        text = text.replace(named, used)
    return text


class FluxPipeline(diffusers.FluxPipeline):
    """A FLUX pipeline whose default image has 32 x 32 pixels, 4 steps and a text of 16 tokens."""

    @functools.wraps(diffusers.FluxPipeline.__call__)
    def __call__(self, *arguments, num_inference_steps=4, max_sequence_length=16, **settings):
        settings |= {"num_inference_steps": num_inference_steps, "max_sequence_length": max_sequence_length}
        return super().__call__(*arguments, **settings)


def pipeline(*_: Any, **__: Any) -> FluxPipeline:
    """Return a tiny pipeline, whatever weights are named."""
    pipe = FluxPipeline(**small_pipelines.flux(1, 1).components)
    pipe.default_sample_size = 16
    pipe.set_progress_bar_config(disable=True)
    return pipe


class WanPipeline(diffusers.WanPipeline):
    """A Wan pipeline with tiny random weights, whose prompts are noise."""

    @functools.wraps(diffusers.WanPipeline.__call__)
    def __call__(self, *arguments, num_inference_steps=12, **settings):
        return super().__call__(*arguments, num_inference_steps=num_inference_steps, **settings)

    def encode_prompt(self, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(1, 8, 16), torch.randn(1, 8, 16)


def video_pipeline(*_: Any, **__: Any) -> WanPipeline:
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
    pipe = WanPipeline(None, None, small_models.wan_vae(), scheduler, small_models.wan())
    pipe.set_progress_bar_config(disable=True)
    return pipe


# Pipelines that pages load from real weights.
LOADED = {"FluxPipeline": pipeline, "WanPipeline": video_pipeline}


class Prompted(tiny_pipeline.Pipeline):
    """A pipeline that compiles in seconds."""

    def __call__(self, prompt, **settings):
        return super().__call__(height=16, width=16, **settings)


# Calls and settings that concern generated code.
NEED_CODE = ("handle.save(", "force_tiling=")


def with_generated_code(block: str, names: dict[str, Any]) -> None:
    """Switch to Inductor, and to a pipeline that compiles quickly."""
    os.environ["TRITIUM_ENGINE"] = "inductor"
    names["pipe"] = Prompted()
    write_recipe(Path("flux.json"), names["pipe"])
    if "optimize(pipe)" not in block:
        names["handle"] = tritium.optimize(names["pipe"])
        names["pipe"](PROMPT)


def values() -> dict[str, Any]:
    """Return the package and its public names."""
    return {name: getattr(tritium, name) for name in tritium.__all__} | {"tritium": tritium}


def general() -> dict[str, Any]:
    """Return the names that any page may use."""
    return values() | {
        "torch": torch,
        "nn": nn,
        "Tensor": torch.Tensor,
        "dataclasses": dataclasses,
        "pipe": pipeline(),
        "prompt": PROMPT,
        "prompts": [PROMPT],
        "config": tritium.CompilationConfig(),
    }


def of_models(folder: Path) -> dict[str, Any]:
    """A compiled model of a few layers after its first call."""
    del folder
    model = torch.compile(nn.Sequential(nn.RMSNorm(8), nn.Linear(8, 8), nn.GELU()).eval(), backend="tritium")
    inputs = {"input": torch.randn(2, 8)}
    with torch.inference_mode():
        model(**inputs)
    return {"model": model, "inputs": inputs}


def of_stock_models(folder: Path) -> dict[str, Any]:
    del folder
    return {"model": small_models.flux()}


def of_plugins(folder: Path) -> dict[str, Any]:
    """Functions that a plug-in would define above the block."""
    del folder
    return {
        "MY_PASS": tritium.plugins.Pass("nothing", lambda graph, context: None),
        "MY_FUSION": tritium.plugins.Fusion(name="double", families=("mul_add",), spellings=(lambda x: x + x,)),
        "accept": lambda match: True,
        "decline": lambda match: None,
        "run": lambda given: given.x,
        "my_kernel": lambda q, k, v, scale: q * scale,
        "backward": lambda context, gradient: (gradient, None, None, None),
        "setup": lambda context, inputs, output: None,
    }


def of_layers(folder: Path) -> dict[str, Any]:
    del folder
    query, key, value = torch.randn(3, 1, 8, 8, 8)
    q, k, v = torch.randn(3, 1, TOKENS, 1, 8)
    mask = torch.ones(1, 1, 8, 8, dtype=torch.bool)
    x, cos, sin = torch.randn(1, TOKENS, 8), torch.randn(TOKENS, 8), torch.randn(TOKENS, 8)
    names = {"query": query, "key": key, "value": value, "mask": mask, "q": q, "k": k, "v": v}
    return names | {"x": x, "cos": cos, "sin": sin}


def of_optimize(folder: Path) -> dict[str, Any]:
    of_recipes(folder)
    inputs = small_models.flux_inputs()
    model = small_models.flux()
    model.register_forward_pre_hook(lambda module, args, kwargs: (args, inputs | kwargs), with_kwargs=True)
    return {"model": model, "latents": inputs["hidden_states"], "t": inputs["timestep"]}


def of_quantization(folder: Path) -> dict[str, Any]:
    """Files that the page names: the tiny pipeline in float8, and a linear with scales by step."""
    pipeline().save_pretrained(folder / "pipeline")
    writing.write_pipeline(folder / "pipeline", folder / "float8", Quantize("fp8"))
    (written,) = (folder / "float8" / "transformer").glob("*.safetensors")
    shutil.copy(written, folder / "flux-fp8.safetensors")
    stepped = checkpoints.static(steps=28)[0] | checkpoints.dynamic()[0]
    checkpoints.write(folder, "W8A8_TIMESTEP", stepped)
    return {
        "model": nn.ModuleDict({"a": nn.Linear(checkpoints.K, checkpoints.N)}),
        "other": pipeline(),
        "folder": folder / "pipeline",
        "FluxTransformer2DModel": diffusers.FluxTransformer2DModel,
        "linear": nn.Linear(32, 16),
        "x": torch.randn(4, 32),
        "step": 3,
    }


def of_vaes(folder: Path) -> dict[str, Any]:
    del folder
    return {"vae": small_pipelines.autoencoder()}


def of_recipes(folder: Path) -> dict[str, Any]:
    write_recipe(folder / "recipe.json", pipeline())
    write_recipe(folder / "flux.json", pipeline())
    return {}


def write_recipe(path: Path, pipe: Any) -> None:
    """Write a recipe for a pipeline, with a table of steps and no figures."""
    choice = tritium.Choice(how="tritium", skip=tritium.Skip("RRR1(R1)"))
    Recipe(choices={"transformer": choice}, figures={}, fingerprint=fingerprint_of(pipe)).save(path)


SCENES: dict[str, Callable[[Path], dict[str, Any]]] = {
    "docs/explain.md": of_models,
    "docs/report.md": of_models,
    "docs/extending.md": of_plugins,
    "docs/guards.md": of_stock_models,
    "docs/index.md": of_stock_models,
    "docs/layers.md": of_layers,
    "docs/optimize.md": of_optimize,
    "docs/quantization.md": of_quantization,
    "docs/skipping.md": of_recipes,
    "docs/tiling.md": of_models,
    "docs/tutorials/flux.md": of_recipes,
    "docs/vae.md": of_vaes,
}
