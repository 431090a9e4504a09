"""`tritium quantize`: write a pipeline's folder with quantized weights."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tritium.bench import generation
from tritium.bench.settings import quantized
from tritium.errors import ConfigError
from tritium.techniques.quantize.files import writing


def command(
    pipeline: Annotated[Path, typer.Argument(metavar="PIPELINE", help="A diffusers folder.")],
    *,
    output: Annotated[Path, typer.Option("-o", "--output", metavar="DIR", help="The folder to write; a new one.")],
    to: Annotated[
        str, typer.Option("--to", metavar="FORMAT", help=f"{', '.join(writing.FORMATS)}, or Quantize as JSON.")
    ],
) -> None:
    """Quantize the denoiser of a pipeline and write a folder in torchao's layout, which `from_pretrained` loads.

    Loading it with diffusers alone needs torchao. `tritium.quantize(model, DIR/transformer)` reads it without.
    """
    generation.check_model(str(pipeline))
    if str(pipeline) == generation.EXAMPLE and not pipeline.is_dir():
        raise ConfigError("the example is no folder: save it first, by tritium.load_example().save_pretrained(DIR)")
    for written in writing.write_pipeline(pipeline, output, quantized(to)):
        print(written)
    print(f"wrote {output}")
