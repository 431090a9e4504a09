"""Combine all commands, and print errors as one line."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import typer
from typer.core import TyperGroup

from tritium.cli import bench, doctor, explain, keep, plan, quantize, run, serve, tune, verify
from tritium.cli.ranks import ARGUMENTS
from tritium.errors import TritiumError


class Commands(TyperGroup):
    """Print a `TritiumError` as one line and exit with code 2; other errors keep their traceback."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ARGUMENTS.set(tuple(args))
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        try:
            with _brief_warnings():
                return super().invoke(ctx)
        except Exception as error:
            ours = _raised_on_purpose(error)
            if ours is None:
                raise
            typer.echo("tritium: " + " ".join(str(ours).split()), err=True)
            raise typer.Exit(2) from error


@contextlib.contextmanager
def _brief_warnings() -> Iterator[None]:
    """Print Tritium's warnings as one line each, without the place in the source; others as Python does."""
    of_python = warnings.formatwarning

    def formatted(message: Any, *arguments: Any, **options: Any) -> str:
        text = str(message)
        return f"{text}\n" if text.startswith("tritium: ") else of_python(message, *arguments, **options)

    warnings.formatwarning = formatted
    try:
        yield
    finally:
        warnings.formatwarning = of_python


def _raised_on_purpose(error: BaseException | None) -> TritiumError | None:
    # Dynamo wraps a backend's exception and keeps it as `inner_exception`.
    while error is not None and not isinstance(error, TritiumError):
        error = getattr(error, "inner_exception", None) or error.__cause__
    return error


app = typer.Typer(
    cls=Commands,
    name="tritium",
    help="Fusion for diffusion: make stock diffusers models fast, and say what was done.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("run")(run.command)
app.command("doctor")(doctor.command)
app.command("bench")(bench.command)
app.command("explain")(explain.command)
app.command("tune")(tune.command)
app.command("verify")(verify.command)
app.command("quantize")(quantize.command)
app.command("plan")(plan.command)
app.command("keep")(keep.command)
app.command("serve")(serve.command)
