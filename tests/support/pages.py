"""The fenced blocks of the documentation: code that tests run, and command lines."""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

from support.scripts import ROOT

FENCE = re.compile(
    r"^(?P<indent>[ >]*)```(?P<language>[^\n`]*)\n(?P<text>.*?)^(?P=indent)```", re.MULTILINE | re.DOTALL
)
# Programs whose lines in a block without a language are commands.
PROGRAMS = ("tritium", "make", "pip", "python", "curl", "git", "cd", "torchrun")


@dataclass(frozen=True)
class Block:
    """A fenced block: where its text begins, and its language, empty where none is named."""

    page: Path
    line: int
    language: str
    text: str

    @property
    def where(self) -> str:
        return f"{name_of(self.page)}:{self.line}"

    @property
    def commands(self) -> list[str]:
        """Return its command lines, continued ones as one, without prompts and comments."""
        if self.language not in ("", "bash", "console", "yaml"):
            return []
        joined = re.sub(r"\\\n\s*", " ", self.text)
        lines = [re.sub(r"^(\$|- run:) ", "", line.strip()) for line in joined.splitlines()]
        lines = [re.sub(r"\s+# .*$", "", line) for line in lines]
        return [line for line in lines if line.split(" ")[0] in PROGRAMS or re.match(r"[A-Z_]+=\S* tritium ", line)]


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def pages() -> list[Path]:
    """Return the pages that people write: the reference is generated from docstrings, which doctest runs."""
    outside = {"reference", ".venv", ".venv-newest", ".carry", ".pytest_cache", ".cache", "site", "build", "dist"}
    return sorted(page for page in ROOT.rglob("*.md") if not outside & set(page.relative_to(ROOT).parts))


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [
        Block(
            page, text[: match.start("text")].count("\n") + 1, match["language"].strip(), textwrap.dedent(match["text"])
        )
        for match in FENCE.finditer(text)
    ]
