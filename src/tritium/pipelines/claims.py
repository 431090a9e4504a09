"""The pipelines that share a part: each claims it with a choice, and the part is put back when no claim is left."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from tritium.pipelines.plan import Choice

# A claim that leaves the part to the other claims.
PASSIVE = Choice(how="eager")


class Claims:
    """Handles by their choice for one part."""

    def __init__(self) -> None:
        self._held: list[tuple[Callable[[], Any], Choice]] = []

    def add(self, handle: Any, choice: Choice, *, strongly: bool) -> None:
        """Claim the part, or change the choice of a claim.

        A handle that is held strongly lives as long as the part's module. A part that pipelines share must not keep
        the other modules of a pipeline that was dropped.
        """
        self.drop(handle)
        self._held.append(((lambda: handle) if strongly else weakref.ref(handle), choice))

    def drop(self, handle: Any) -> None:
        self._held = [(held, choice) for held, choice in self._held if held() not in (None, handle)]

    @property
    def handles(self) -> list[Any]:
        return [handle for held, _ in self._held if (handle := held()) is not None]

    def active(self, *, but: Any = None) -> Choice | None:
        """The choice of the claims that do not leave the part alone, without one handle's; None if there is none."""
        live = [(held(), choice) for held, choice in self._held]
        return next((choice for handle, choice in live if handle not in (None, but) and choice != PASSIVE), None)
