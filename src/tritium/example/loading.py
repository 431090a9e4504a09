"""Load a pipeline from a local folder without progress bars and log messages."""

from __future__ import annotations

import contextlib
import importlib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from tritium.errors import MissingExtra


def load_pipeline(folder: Path, dtype: torch.dtype, purpose: str) -> Any:
    """Load a diffusers pipeline in one dtype, without downloading."""
    try:
        importlib.import_module("transformers")
        diffusers: Any = importlib.import_module("diffusers")
    except ImportError as absent:
        raise MissingExtra(absent.name or "diffusers", "diffusers", purpose) from absent
    with _quiet():
        # diffusers 0.36 accepts only `torch_dtype`; newer versions warn that it is renamed to `dtype`.
        return diffusers.DiffusionPipeline.from_pretrained(folder, local_files_only=True, torch_dtype=dtype)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    logs: list[Any] = [importlib.import_module(f"{name}.utils.logging") for name in ("diffusers", "transformers")]
    before = [(log.get_verbosity(), log.is_progress_bar_enabled()) for log in logs]
    try:
        for log in logs:
            log.set_verbosity_error()
            log.disable_progress_bar()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for log, (verbosity, bars) in zip(logs, before, strict=True):
            log.set_verbosity(verbosity)
            if bars:
                log.enable_progress_bar()
