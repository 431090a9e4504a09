"""`tritium keep`: keep a pipeline's weights for other processes."""

from __future__ import annotations

import gc
import os
import signal
import threading
from pathlib import Path
from typing import Annotated, Any

import typer

from tritium import example
from tritium.bench import generation
from tritium.bench.settings import quantized
from tritium.cli.bench import known_device
from tritium.errors import ConfigError, SharingError
from tritium.pipelines import sharing
from tritium.pipelines.parts import DENOISERS
from tritium.techniques.quantize.files import loading


def command(
    pipeline: Annotated[str, typer.Argument(metavar="PIPELINE", help="A diffusers folder, or 'example'.")],
    *,
    name: Annotated[
        str | None, typer.Option(metavar="NAME", help="The name for tritium.attach; that of the folder.")
    ] = None,
    device_type: Annotated[str | None, typer.Option("--device", help="cuda or cpu; the GPU if there is one.")] = None,
    quantize: Annotated[
        str | None, typer.Option(metavar="FORMAT", help="Load the denoiser in fp8, int8 or int8-weights.")
    ] = None,
) -> None:
    """Load a pipeline once and let other processes map its weights, by `tritium.attach(NAME)`.

    SIGTERM and Ctrl-C accept no more users and wait for the others to end; a second signal ends at once, and the pipelines
    of the users stop. SIGHUP loads the pipeline again, for later users.
    """
    generation.check_model(pipeline)
    where = known_device(device_type)
    name = name or Path(pipeline).resolve().name
    signals = _Signals()
    with sharing.keeper(name) as keeper:
        _say(f"keeping {name!r}: loading {pipeline} (process {os.getpid()})")
        while not signals.ends:
            signals.reload = False
            number = keeper.publish(_loaded(pipeline, where, quantize))
            # On a CPU, the keeper has copies and drops the pipeline.
            gc.collect()
            _say(
                f"keeping {name!r}: ready, {keeper.bytes / 1e6:,.1f} MB on {where}, generation {number}; "
                f"tritium.attach({name!r})"
            )
            keeper.wait(lambda: signals.ends > 0 or signals.reload)
            if keeper.spoiled:
                raise SharingError(f"keeper {name!r} ends, and so do its users: {keeper.spoiled}")
        _say(f"keeping {name!r}: draining, {keeper.accept_no_more()} users")
        keeper.wait(lambda: not keeper.users or signals.ends > 1)
    _say(f"keeping {name!r}: ended")


class _Signals:
    """The signals that this process has got."""

    def __init__(self) -> None:
        self.ends, self.reload = 0, False
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, self._end)
            signal.signal(signal.SIGHUP, self._reload)

    def _end(self, *_: Any) -> None:
        self.ends += 1

    def _reload(self, *_: Any) -> None:
        self.reload = True


def _loaded(pipeline: str, where: str, quantize: str | None) -> Any:
    if quantize is None:
        return generation.load(pipeline, where)
    folder = example.WEIGHTS if pipeline == generation.EXAMPLE else Path(pipeline)
    dtype, config = generation.dtype_for(pipeline, where), loading.QuantizationConfig(quantized(quantize))
    # Weights that are mapped from their files are not read before they are replaced.
    pipe = generation.load(pipeline, "cpu", dtype)
    denoisers = {name: module for name in DENOISERS if (module := pipe.components.get(name)) is not None}
    if not denoisers:
        raise ConfigError(f"--quantize: {pipeline} has no denoiser; it looks for {', '.join(DENOISERS)}")
    for name, module in denoisers.items():
        loaded = type(module).from_pretrained(folder / name, quantization_config=config, torch_dtype=dtype)
        setattr(pipe, name, loaded)
    return pipe.to(where)


def _say(text: str) -> None:
    print(text, flush=True)
