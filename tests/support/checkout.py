"""The checkout under test, for the processes that tests start: an installed Tritium may be another one."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
FOLDERS = (ROOT / "src", ROOT / "tests")


def environment(*first: Path, **changes: str) -> dict[str, str]:
    """Return this process's environment with `first` and the checkout in front of PYTHONPATH, and with changes."""
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    folders = dict.fromkeys([*map(str, (*first, *FOLDERS)), *filter(None, given)])
    return {**os.environ, "PYTHONPATH": os.pathsep.join(folders), **changes}
