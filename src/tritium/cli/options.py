"""Options of a command as a dataclass: a field with a default and its help is an option."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Any, get_type_hints

Command = Callable[..., None]


def takes(options: type) -> Callable[[Command], Command]:
    """Let typer read the options of a command from a dataclass, which the command gets as `options`."""

    def decorate(command: Command) -> Command:
        names = [field.name for field in fields(options)]

        @functools.wraps(command)
        def run(**values: Any) -> None:
            command(options=options(**{name: values.pop(name) for name in names}), **values)

        hints = get_type_hints(command, include_extras=True) | get_type_hints(options, include_extras=True)
        own = [parameter for parameter in inspect.signature(command).parameters.values() if parameter.name != "options"]
        parameters = [
            *(parameter.replace(annotation=hints[parameter.name]) for parameter in own),
            *(
                inspect.Parameter(
                    field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=hints[field.name]
                )
                for field in fields(options)
            ),
        ]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return run

    return decorate
