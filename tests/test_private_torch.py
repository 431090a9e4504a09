"""Only `tritium.compat` touches private names of torch and of other packages.

A private attribute is an attribute whose name starts with one underscore. Outside of `compat`, a file may use those of
`self`, `cls` and `super()`, and those that it defines itself: a method, a field, or a name of the module.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "tritium"
FILES = sorted(path for path in SOURCE.rglob("*.py") if SOURCE / "compat" not in path.parents)
THEIRS = ("torch", "diffusers", "transformers", "peft", "triton")


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def is_private_module(name: str) -> bool:
    package, *parts = name.split(".")
    return package in THEIRS and any(map(is_private, parts))


def definitions(tree: ast.Module) -> set[str]:
    """Return the private names that a file defines."""
    names = set()
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case ast.Name(id=name, ctx=ast.Store()):
                names.add(name)
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                names.add(name)
    return {name for name in names if is_private(name)}


def is_own(base: ast.expr) -> bool:
    match base:
        case ast.Name(id="self" | "cls") | ast.Call(func=ast.Name(id="super")):
            return True
    return False


def private_names(source: str) -> Iterator[str]:
    """Return the private names of other packages that a file uses, each with its line."""
    tree = ast.parse(source)
    own = definitions(tree)
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                found = [alias.name for alias in names if is_private_module(alias.name)]
            case ast.ImportFrom(module=str(module), names=names):
                found = [
                    name for alias in names if is_private_module(name := f"{module}.{alias.name}") and alias.name != "*"
                ]
            case ast.Attribute(value=base, attr=name) if is_private(name) and not is_own(base) and name not in own:
                found = [ast.unparse(node)]
            case ast.Call(
                func=ast.Name(id="getattr" | "hasattr" | "setattr" | "delattr"), args=[_, ast.Constant(str(name)), *_]
            ) if is_private(name) and name not in own:
                found = [ast.unparse(node)]
            case ast.Constant(value=str(text)) if text.isprintable() and " " not in text and is_private_module(text):
                found = [text]
            case _:
                continue
        yield from (f"{node.lineno}: {name}" for name in found)


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("import torch._dynamo", 1),
        ("from torch._inductor import config", 1),
        ("from torch.utils import _pytree as pytree", 1),
        ("import importlib\nimportlib.import_module('torch._inductor.utils')", 1),
        ("def f(tensor): return tensor.untyped_storage()._cdata", 1),
        ("def f(pipe): return getattr(pipe, '_execution_device', None)", 1),
        ("class A:\n    def f(self, other):\n        self._x = 1\n        return self._y + other._x + super()._z", 0),
        ("import torch\ntorch.nn.Module.__call__", 0),
    ],
)
def test_it_finds_private_names(source, count):
    assert len(list(private_names(source))) == count


@pytest.mark.parametrize(
    "path",
    FILES,
    ids=lambda path: str(path.relative_to(SOURCE)),
)
def test_no_private_names_of_other_packages(path):
    assert list(private_names(path.read_text())) == []
