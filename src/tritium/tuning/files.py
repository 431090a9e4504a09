"""Read and write tables. A file is always whole, and a damaged one costs no more than its damaged rows."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tritium.tuning.rows import Key, Verdict


@dataclass(frozen=True)
class Table:
    """The rows of a file and the device they are about; `problem` is None unless the file is damaged."""

    rows: dict[Key, Verdict] = field(default_factory=dict)
    problem: str | None = None
    device: str = ""
    capability: str | None = None
    multiprocessors: int | None = None


def load(path: Path) -> Table:
    """Read a table; a file that does not exist has no rows, and damaged rows are left out with a problem."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return Table()
    except OSError as error:
        return Table(problem=f"it cannot be read ({error.strerror or error})")
    # A UnicodeDecodeError is a ValueError; deep nesting exhausts the parser's stack.
    except (ValueError, RecursionError) as error:
        return Table(problem=f"it is not JSON ({_first_line(error)})")
    entries = found.get("rows") if isinstance(found, dict) else None
    if not isinstance(entries, list):
        return Table(problem="it has no list of rows")
    rows: dict[Key, Verdict] = {}
    problems = []
    for place, entry in enumerate(entries):
        try:
            verdict = Verdict.from_dict(entry)
        except (TypeError, ValueError) as error:
            problems.append(f"row {place + 1}: {_first_line(error)}")
        else:
            rows[verdict.key] = verdict
    more = f", and {len(problems) - 1} more" if len(problems) > 1 else ""
    return Table(rows, f"{problems[0]}{more}" if problems else None, **_device(found))


def _device(found: dict[str, Any]) -> dict[str, Any]:
    """Return the fields about the device that have the right types; without them a table serves its device alone."""
    types = {"device": str, "capability": str, "multiprocessors": int}
    named = {name: found[name] for name, kind in types.items() if isinstance(found.get(name), kind)}
    return {name: value for name, value in named.items() if value}


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0][:120] if text else type(error).__name__


def read(path: Path) -> dict[Key, Verdict]:
    """Return the rows of a table that can be read."""
    return load(path).rows


def store(
    path: Path, device: str, capability: str | None, multiprocessors: int | None, verdicts: Iterable[Verdict]
) -> None:
    """Add rows to a table; the last row of a key wins, and a concurrent reader sees a whole file."""
    merged = read(path) | {verdict.key: verdict for verdict in verdicts}
    rows = [merged[key].to_dict() for key in sorted(merged, key=lambda key: (key.op, key.dtype, key.shape))]
    about = {"device": device, "capability": capability, "multiprocessors": multiprocessors}
    text = "{\n" + "".join(f"{json.dumps(name)}: {json.dumps(value)},\n" for name, value in about.items() if value)
    text += '"rows": [\n'
    text += ",\n".join(json.dumps(row) for row in rows) + "\n]\n}\n"
    replace_file(path, text)


def replace_file(path: Path, text: str) -> None:
    """Write a file through a temporary one: a concurrent reader sees the old text or the new, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".json")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        Path(temporary).replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(temporary).unlink()
        raise
