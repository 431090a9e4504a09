"""The command line. One file a command; `app.py` puts them together."""

from __future__ import annotations

import importlib
import sys

from tritium.errors import MissingExtra

_NEEDED = ("typer", "rich")


def main() -> None:
    """The console script `tritium`."""
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
        # Something else that is missing inside an installed package is a broken installation, and says so itself.
        if error.name != module:
            raise
        raise MissingExtra(module, "cli", "the command line") from error
