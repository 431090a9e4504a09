"""Pipelines that share a part: each claims it with a choice, and the last claim to go restores it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from tritium.techniques.choice import Choice

# The choice of a claim that leaves the part to other claims.
PASSIVE = Choice(how="eager")


class Claims:
    """The handles that claim one part, each with its choice."""

    def __init__(self) -> None:
        self._held: list[tuple[Callable[[], Any], Choice]] = []

    def add(self, handle: Any, choice: Choice, *, strongly: bool) -> None:
        """Claim the part, or change the choice of a claim.

        A strong claim keeps its handle alive as long as the part's module. A part that several pipelines share is
        claimed weakly, so that it does not keep the other modules of a dropped pipeline in memory.
        """
        self.drop(handle)
        self._held.append(((lambda: handle) if strongly else weakref.ref(handle), choice))

    def drop(self, handle: Any) -> None:
        self._held = [(held, choice) for held, choice in self._held if held() not in (None, handle)]

    @property
    def handles(self) -> list[Any]:
        return [handle for held, _ in self._held if (handle := held()) is not None]

    def active(self, *, but: Any = None) -> Choice | None:
        """Return the choice of the first claim other than `but` that is not passive, or None."""
        live = [(held(), choice) for held, choice in self._held]
        return next((choice for handle, choice in live if handle not in (None, but) and choice != PASSIVE), None)
