"""The command line: one file for each command, combined in `app.py`."""

from __future__ import annotations

import importlib
import sys

from tritium.errors import MissingExtra

_NEEDED = ("typer", "rich")


def main() -> None:
    """Run the console script `tritium`."""
    try:
        for module in _NEEDED:
            _require(module)
    except MissingExtra as error:
        print(f"tritium: {error}", file=sys.stderr)
        sys.exit(2)
    importlib.import_module("tritium.cli.app").app()


def _require(module: str) -> None:
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        # Another missing module means a broken installation: keep its error.
        if error.name != module:
            raise
        raise MissingExtra(module, "cli", "the command line") from error
