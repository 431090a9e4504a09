"""Stock denoisers with many equal blocks, and Inductor's code generation without its compilers."""

from __future__ import annotations

import ast
import contextlib
import functools
import re
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import diffusers
import torch
from torch._inductor.graph import GraphLowering

from support.zoo.model import builder, normals
from tritium import compat
from tritium.bench.models import MODELS

# The numbers of blocks in a configuration, by name.
_DEPTHS = ("num_layers", "num_single_layers", "num_mmdit_layers", "num_single_dit_layers", "n_layers")

# These take square latents only.
_SQUARE = ("dit", "hidream")

FAMILIES = tuple(name for name in MODELS if name not in ("wan_per_token", "sd15"))


@dataclass(frozen=True)
class Call:
    """The size of a call, relative to the tiny one: more rows and columns, another batch, more text."""

    rows: int = 0
    columns: int = 0
    batch: int = 1
    text: int = 0


@dataclass(frozen=True)
class Family:
    """A tiny stock denoiser with `depth` blocks of each kind."""

    build: Callable[..., torch.nn.Module]
    inputs: Callable[[Call], dict[str, Any]]


def deep(name: str, depth: int = 6) -> Family:
    model = MODELS[name]
    config = {key: depth if key in _DEPTHS else value for key, value in model.tiny.config.items()}
    if name == "hidream":
        config["llama_layers"] = list(range(2 * depth))
    if name == "sdxl":
        # Blocks of a U-Net differ; those of one of its transformers are equal.
        config |= {
            "block_out_channels": [8, 16],
            "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D"],
            "up_block_types": ["CrossAttnUpBlock2D", "UpBlock2D"],
            "attention_head_dim": [1, 2],
            "transformer_layers_per_block": [1, depth],
        }
    make = functools.partial(getattr(diffusers, model.class_name), **config)
    with torch.device("meta"):
        full = make().config
    *frames, height, width = model.tiny.grid

    def inputs(call: Call) -> dict[str, Any]:
        grid = (height + call.rows, (height + call.rows) if name in _SQUARE else width + call.columns)
        size = replace(model.tiny, batch=call.batch, grid=(*frames, *grid), text=model.tiny.text + call.text)
        return model.arguments(full, size, normals(torch.float32))

    return Family(builder(make), inputs)


@contextlib.contextmanager
def code_generation() -> Iterator[list[str]]:
    """Let Inductor generate its code, and run the graphs instead of it; yields the generated texts."""
    texts: list[str] = []
    own = GraphLowering.__init__

    def start(self: Any, gm: torch.fx.GraphModule, *args: Any, **kwargs: Any) -> None:
        own(self, gm, *args, **kwargs)
        self.lowered = gm

    def keep(self: Any) -> Any:
        code, *_ = self.codegen()
        texts.append(getattr(code, "value", str(code)))
        graph = torch.fx.Interpreter(self.lowered)

        def call(arguments: list[Any]) -> list[Any]:
            taken = list(arguments)
            arguments.clear()
            return list(graph.run(*taken, enable_io_processing=False))

        return types.SimpleNamespace(call=call, __file__=__file__, runner=None)

    with (
        mock.patch.object(GraphLowering, "__init__", start),
        mock.patch.object(GraphLowering, "compile_to_module", keep),
        compat.inductor.empty_cache(),
        compat.inductor.inductor_patched({"fx_graph_cache": False, "compile_threads": 1}),
        torch._functorch.config.patch(enable_autograd_cache=False),
    ):
        yield texts


_SYMBOL = re.compile(r"p?[su]\d+$")


def unbound(text: str) -> set[str]:
    """Return the symbols of sizes that generated code reads and never defines."""
    functions = [
        node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef) and node.name == "call"
    ]
    missing: set[str] = set()
    for function in functions:
        names = [node for node in ast.walk(function) if isinstance(node, ast.Name) and _SYMBOL.match(node.id)]
        defined = {node.id for node in names if isinstance(node.ctx, ast.Store)}
        missing |= {node.id for node in names} - defined
    return missing


def tensors(value: Any) -> Sequence[torch.Tensor]:
    """Return the tensors in a model's results, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    items = value.values() if isinstance(value, dict) else value
    return [tensor for item in items for tensor in tensors(item)]
