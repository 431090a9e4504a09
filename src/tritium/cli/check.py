"""The result of one check of `tritium doctor`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Check:
    name: str
    status: Status
    detail: str
    fix: str | None = None

    def unless(self, is_fine: bool, detail: str) -> Check:
        """Return this check, or if all is fine a check that says so."""
        return Check(self.name, "ok", detail) if is_fine else self
