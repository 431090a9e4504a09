"""Which statement of diffusers' source a line belongs to: tags name statements by their text, never by line number."""

import ast
import functools
from dataclasses import dataclass
from pathlib import Path

import diffusers

ROOT = Path(diffusers.__file__).parent


@dataclass(frozen=True)
class Statement:
    """One statement: the file under diffusers, the dotted name of the function around it, its text on one line."""

    file: str
    scope: str
    text: str


def statement_at(filename: str, line: int) -> Statement | None:
    """Return the statement at a line of a diffusers file; None elsewhere."""
    path = Path(filename)
    if not path.is_relative_to(ROOT):
        return None
    return statements(str(path.relative_to(ROOT).as_posix())).get(line)


@functools.cache
def statements(file: str) -> dict[int, Statement]:
    """Map each line of a file to its innermost statement; of a compound statement only the header counts."""
    source = (ROOT / file).read_text()
    lines = source.splitlines()
    found: dict[int, Statement] = {}

    def visit(node: ast.AST, scope: tuple[str, ...]) -> None:
        for child in ast.iter_child_nodes(node):
            inner = scope
            if isinstance(child, ast.FunctionDef | ast.ClassDef):
                inner = (*scope, child.name)
            elif isinstance(child, ast.stmt):
                body = getattr(child, "body", None)
                last = body[0].lineno - 1 if body else child.end_lineno
                numbers = range(child.lineno, max(child.lineno, last) + 1)
                text = " ".join(" ".join(lines[number - 1].split()) for number in numbers)
                found.update(dict.fromkeys(numbers, Statement(file, ".".join(scope), text)))
            visit(child, inner)

    visit(ast.parse(source), ())
    return found
