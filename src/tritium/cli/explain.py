"""`tritium explain`: compile a workload with Tritium and say what was done to it."""

from __future__ import annotations

import importlib
from typing import Annotated, Any

import torch
import typer

from tritium.bench import run, workloads
from tritium.cli import progress
from tritium.cli.bench import known_device
from tritium.config import CompilationConfig

_NAMES = ", ".join(workloads.WORKLOADS)


def command(
    name: Annotated[str, typer.Argument(metavar="WORKLOAD", help=f"One of: {_NAMES}.")],
    engine: Annotated[
        str | None, typer.Option(help="inductor, or eager: recognise and rewrite without generating code.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    device_type: Annotated[str | None, typer.Option("--device", help="cuda or cpu; the GPU if there is one.")] = None,
) -> None:
    """Compile a workload with Tritium and say what fused, what did not, and why."""
    workload = workloads.find(name)
    # Without the option the environment decides, as it does for a Backend; a wrong name is a ConfigError.
    given: dict[str, Any] = {} if engine is None else {"engine": engine}
    config = CompilationConfig(**given)
    settings = run.Settings(device_type=known_device(device_type), config=config)
    with progress.shown() as notify:
        notify(f"{name}: building", 0.0)
        built = run.build(workload, settings)
        notify(f"{name}: compiling with engine {config.engine}", 0.2)
        model = run.compiled(built.model, "tritium", settings)
        with torch.inference_mode():
            model(**built.inputs)
    tritium: Any = importlib.import_module("tritium")
    report = tritium.explain(model)
    print(
        report.to_json()
        if json
        else f"{name}: {built.note}{' (shrunk for the CPU)' if built.shrunk else ''}\n\n{report}"
    )
