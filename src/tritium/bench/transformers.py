"""Stock diffusers transformers with random weights, as workloads.

Full size means the real width and the real number of tokens with fewer blocks, because blocks repeat. On a CPU that
would take minutes a step, so there the same class shrinks, and every result says so.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tritium.bench.workload import SEED, Built, Draw, Regime, drawing
from tritium.errors import MissingExtra
from tritium.example import load_example


@dataclass(frozen=True)
class Size:
    """The size of a workload: the model's configuration, the latent grid, the tokens of the prompt and the batch."""

    config: Mapping[str, Any]
    grid: tuple[int, ...]
    text: int
    note: str
    batch: int = 1


@dataclass(frozen=True)
class Transformer:
    """One stock class in two sizes."""

    name: str
    class_name: str
    full: Size
    small: Size
    inputs: Callable[[Any, Size, Draw], dict[str, Any]]
    regimes: Sequence[Regime] = ("static",)

    def build(self, device: str, dtype: torch.dtype, *, small: bool) -> Built:
        """Build a seeded model and its inputs; keep the global random state."""
        size = self.small if small else self.full
        cls = getattr(diffusers(), self.class_name)
        model = seeded(lambda: cls(**size.config), device)
        cast_as_loading_does(model, dtype)
        inputs = {**self.inputs(model.config, size, drawing(device, dtype)), "return_dict": False}
        return Built(model, inputs, size.note, small)


class ExampleTransformer:
    """The transformer of the example pipeline with its trained weights, at the size of the plain call. It never shrinks."""

    name = "example-transformer"
    regimes: Sequence[Regime] = ("static",)
    size = Size(config={}, grid=(8, 8), text=512, note="2 double + 5 single blocks, width 160, 64 + 512 tokens")

    def build(self, device: str, dtype: torch.dtype, *, small: bool) -> Built:
        del small
        model = load_example(device, dtype).transformer
        inputs = {**flux_inputs(model.config, self.size, drawing(device, dtype)), "return_dict": False}
        return Built(model, inputs, self.size.note, shrunk=False)


def seeded(make: Callable[[], nn.Module], device: str) -> Any:
    """Make a module with the seed of all workloads, on the device, in evaluation mode."""
    with torch.random.fork_rng(devices=range(torch.cuda.device_count()) if device == "cuda" else ()):
        torch.manual_seed(SEED)
        with torch.device(device):
            model = make().eval()
        roughen(model)
    return model


def diffusers() -> Any:
    try:
        return importlib.import_module("diffusers")
    except ImportError as error:
        raise MissingExtra("diffusers", "diffusers", "a benchmark workload") from error


def roughen(model: nn.Module) -> None:
    # Norm weights start as ones: a kernel that ignored them would still look right.
    for name, parameter in model.named_parameters():
        if "norm" in name and name.endswith("weight") and parameter.ndim == 1:
            nn.init.normal_(parameter, mean=1.0, std=0.1)


def cast_as_loading_does(model: Any, dtype: torch.dtype) -> None:
    """Change dtypes the way `from_pretrained(torch_dtype=...)` does.

    `model.to(dtype)` would also round the tables of rotary embeddings and the modules a class keeps in float32, and
    then another graph would be measured than pipelines run.
    """
    kept = set(model._keep_in_fp32_modules or ())
    persistent = set(model.state_dict())
    for path, module in model.named_modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                full_name = f"{path}.{name}" if path else name
                if tensor is None or full_name not in persistent or not tensor.is_floating_point():
                    continue
                if not kept.intersection(full_name.split(".")):
                    # A separate tensor, as after loading: SD3's table of positions is built as a view, and torch
                    # 2.11 cannot trace a view whose base has another dtype.
                    fresh = tensor.detach().to(dtype).clone()
                    tensors[name] = nn.Parameter(fresh) if isinstance(tensor, nn.Parameter) else fresh


def flux_inputs(config: Any, size: Size, draw: Draw) -> dict[str, Any]:
    height, width = size.grid
    hidden = draw(size.batch, height * width, config.in_channels)
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    ids = torch.stack([torch.zeros_like(rows), rows, columns], dim=-1).reshape(-1, 3)
    return {
        "hidden_states": hidden,
        "encoder_hidden_states": draw(size.batch, size.text, config.joint_attention_dim),
        "pooled_projections": draw(size.batch, config.pooled_projection_dim),
        "timestep": torch.full_like(hidden[:, 0, 0], 0.5),
        "img_ids": ids.to(hidden),
        "txt_ids": torch.zeros(size.text, 3).to(hidden),
        **({"guidance": torch.full((size.batch,), 3.5, device=hidden.device)} if config.guidance_embeds else {}),
    }


def qwen_image_inputs(config: Any, size: Size, draw: Draw) -> dict[str, Any]:
    height, width = size.grid
    hidden = draw(size.batch, height * width, config.in_channels)
    # The pipeline drops the prompt's mask when it masks nothing, so at batch 1 there is none.
    return {
        "hidden_states": hidden,
        "encoder_hidden_states": draw(size.batch, size.text, config.joint_attention_dim),
        "timestep": torch.full_like(hidden[:, 0, 0], 0.5),
        "img_shapes": [[(1, height, width)]] * size.batch,
    }


def wan_inputs(config: Any, size: Size, draw: Draw) -> dict[str, Any]:
    hidden = draw(size.batch, config.in_channels, *size.grid)
    return {
        "hidden_states": hidden,
        "timestep": torch.full((size.batch,), 500.0, device=hidden.device),
        "encoder_hidden_states": draw(size.batch, size.text, config.text_dim),
    }


def sd3_inputs(config: Any, size: Size, draw: Draw) -> dict[str, Any]:
    hidden = draw(size.batch, config.in_channels, *size.grid)
    return {
        "hidden_states": hidden,
        "encoder_hidden_states": draw(size.batch, size.text, config.joint_attention_dim),
        "pooled_projections": draw(size.batch, config.pooled_projection_dim),
        "timestep": torch.full_like(hidden[:, 0, 0, 0], 500.0),
    }


def pixart_inputs(config: Any, size: Size, draw: Draw) -> dict[str, Any]:
    hidden = draw(size.batch, config.in_channels, *size.grid)
    return {
        "hidden_states": hidden,
        "encoder_hidden_states": draw(size.batch, size.text, config.caption_channels),
        "timestep": torch.full((size.batch,), 500, device=hidden.device),
        "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
    }


FLUX = Transformer(
    name="flux",
    class_name="FluxTransformer2DModel",
    # FLUX.1-dev at 1024 x 1024; it has 19 double and 38 single blocks.
    full=Size(
        config={"num_layers": 4, "num_single_layers": 8, "guidance_embeds": True},
        grid=(64, 64),
        text=512,
        note="4 double + 8 single blocks, width 3072, 4096 + 512 tokens",
    ),
    small=Size(
        config={
            "num_layers": 2,
            "num_single_layers": 2,
            "num_attention_heads": 3,
            "joint_attention_dim": 256,
            "pooled_projection_dim": 128,
            "guidance_embeds": True,
        },
        grid=(16, 16),
        text=64,
        note="2 double + 2 single blocks, width 384, 256 + 64 tokens",
    ),
    inputs=flux_inputs,
)

QWEN_IMAGE = Transformer(
    name="qwen-image",
    class_name="QwenImageTransformer2DModel",
    # 1024 x 1024; it has 60 blocks.
    full=Size(config={"num_layers": 4}, grid=(64, 64), text=256, note="4 blocks, width 3072, 4096 + 256 tokens"),
    small=Size(
        config={"num_layers": 2, "num_attention_heads": 3, "joint_attention_dim": 256},
        grid=(16, 16),
        text=64,
        note="2 blocks, width 384, 256 + 64 tokens",
    ),
    inputs=qwen_image_inputs,
)

WAN = Transformer(
    name="wan",
    class_name="WanTransformer3DModel",
    # The 14B model at 81 frames of 480 x 832; it has 40 blocks.
    full=Size(config={"num_layers": 2}, grid=(21, 60, 104), text=512, note="2 blocks, width 5120, 32760 + 512 tokens"),
    small=Size(
        config={"num_layers": 2, "num_attention_heads": 3, "ffn_dim": 1024, "text_dim": 256},
        grid=(3, 16, 20),
        text=64,
        note="2 blocks, width 384, 240 + 64 tokens",
    ),
    inputs=wan_inputs,
)

SD3 = Transformer(
    name="sd3",
    class_name="SD3Transformer2DModel",
    # Stable Diffusion 3.5 large at 1024 x 1024, whose prompt is 77 CLIP and 256 T5 tokens; it has 38 blocks.
    full=Size(
        config={
            "num_layers": 4,
            "num_attention_heads": 38,
            "caption_projection_dim": 2432,
            "pos_embed_max_size": 192,
            "qk_norm": "rms_norm",
        },
        grid=(128, 128),
        text=333,
        note="4 blocks, width 2432, 4096 + 333 tokens",
    ),
    small=Size(
        config={
            "sample_size": 32,
            "num_layers": 2,
            "num_attention_heads": 6,
            "caption_projection_dim": 384,
            "joint_attention_dim": 256,
            "pooled_projection_dim": 128,
            "pos_embed_max_size": 32,
            "qk_norm": "rms_norm",
        },
        grid=(32, 32),
        text=77,
        note="2 blocks, width 384, 256 + 77 tokens",
    ),
    inputs=sd3_inputs,
)

PIXART = Transformer(
    name="pixart",
    class_name="PixArtTransformer2DModel",
    # PixArt-Sigma at 512 x 512: short kernels, so a GPU waits for its launches. It has 28 blocks.
    full=Size(
        config={"num_layers": 8, "sample_size": 64, "caption_channels": 4096, "use_additional_conditions": False},
        grid=(64, 64),
        text=300,
        note="8 blocks, width 1152, 1024 + 300 tokens",
    ),
    small=Size(
        config={
            "num_layers": 2,
            "num_attention_heads": 4,
            "attention_head_dim": 32,
            "cross_attention_dim": 128,
            "caption_channels": 64,
            "sample_size": 16,
            "use_additional_conditions": False,
        },
        grid=(16, 16),
        text=32,
        note="2 blocks, width 128, 64 + 32 tokens",
    ),
    inputs=pixart_inputs,
)

TRANSFORMERS = (FLUX, QWEN_IMAGE, WAN, SD3, PIXART)
EXAMPLE = ExampleTransformer()
