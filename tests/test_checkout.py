"""The tests themselves: sizes, names and folders; and their processes import the checkout under test."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support import checkout

PROGRAM = "import tritium; print(tritium.__file__)"
EXPECTED = str(checkout.ROOT / "src" / "tritium" / "__init__.py")
TESTS = checkout.ROOT / "tests"
FILES = sorted(TESTS.rglob("test_*.py"))


@pytest.fixture
def another_install(tmp_path):
    """A Tritium that would be imported instead, as an installed package would."""
    package = tmp_path / "installed" / "tritium"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    return package.parent


def found(**options):
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, **options)
    return done.stdout.strip()


def test_a_process_that_inherits_the_environment():
    assert found() == EXPECTED


def test_a_folder_of_the_user_s_comes_after_the_checkout(another_install, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(another_install))
    assert found() == str(another_install / "tritium" / "__init__.py")
    environment = checkout.environment(TRITIUM_TEST="set")
    assert found(env=environment) == EXPECTED
    assert environment["PYTHONPATH"].split(os.pathsep)[-1] == str(another_install)
    assert environment["TRITIUM_TEST"] == "set"


def test_a_folder_of_the_test_s_comes_before_it(another_install):
    environment = checkout.environment(another_install)
    assert found(env=environment) == str(another_install / "tritium" / "__init__.py")


@pytest.mark.parametrize("loaded", [False, True])
def test_programs_of_the_fixture(in_process, loaded):
    assert Path(in_process(PROGRAM, loaded=loaded).strip()) == Path(EXPECTED)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(TESTS).as_posix())
def test_files_and_names_are_short(path):
    text = path.read_text(encoding="utf-8")
    functions = [node.name for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
    assert text.count("\n") <= 500
    assert [name for name in functions if name.startswith("test_") and len(name) >= 60] == []


def test_folders_mirror_the_package():
    folders = {path.parent.relative_to(TESTS).as_posix() for path in FILES} - {"census", "examples"}
    assert [folder for folder in folders if not (checkout.ROOT / "src" / "tritium" / folder).is_dir()] == []
