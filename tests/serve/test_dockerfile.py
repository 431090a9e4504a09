"""The Dockerfile, without an engine that builds it: its files, its user, its probe and its command."""

import fnmatch
import json
import re
import tomllib

import pytest

from support import checkout
from tritium.cli import app as commands
from tritium.serve.app import build_app
from tritium.serve.dispatch import Dispatcher
from tritium.serve.runner import LocalRunner

ROOT = checkout.ROOT


@pytest.fixture(scope="module")
def instructions():
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    lines = "\n".join(line for line in text.splitlines() if not line.startswith("#")).replace("\\\n", " ")
    return [tuple(line.split(maxsplit=1)) for line in lines.splitlines() if line.strip()]


def of(instructions, name):
    return [value for found, value in instructions if found == name]


def test_copied_files_exist_and_are_sent(instructions):
    patterns = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    for value in of(instructions, "COPY"):
        if value.startswith("--from"):
            continue
        *sources, _ = value.split()
        for source in sources:
            name = source.removeprefix("./")
            assert (ROOT / name).exists(), name
            decisions = [
                not pattern.startswith("!") for pattern in patterns if fnmatch.fnmatch(name, pattern.lstrip("!"))
            ]
            assert decisions
            assert decisions[-1] is False, f"{name} is ignored"


def test_the_package_can_be_built_from_them(instructions):
    """What the build reads from the checkout is copied: setup.py's README and the licence files."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    copied = " ".join(of(instructions, "COPY")).split()
    assert {"pyproject.toml", "setup.py", "README.md", *project["license-files"]} <= set(copied)
    extras = next(value for value in of(instructions, "ARG") if value.startswith("EXTRAS="))
    assert set(extras.removeprefix("EXTRAS=").split(",")) <= set(project["optional-dependencies"])


def test_the_last_stage_runs_without_root(instructions):
    last = max(place for place, (name, _) in enumerate(instructions) if name == "FROM")
    assert of(instructions[last:], "USER") == ["tritium"]
    assert "useradd" in " ".join(of(instructions[last:], "RUN"))


def test_the_probe_is_a_route(instructions):
    (probe,) = of(instructions, "HEALTHCHECK")
    path = re.search(r"http://127.0.0.1:8000(/\w+)", probe)[1]
    routes = {getattr(route, "path", None) for route in _routes(build_app(Dispatcher(LocalRunner([]))).routes)}
    assert path in routes


def _routes(routes):
    for route in routes:
        yield route
        yield from _routes(getattr(getattr(route, "original_router", None), "routes", ()))


def test_the_command_is_one_of_tritium(instructions):
    import typer

    program, *arguments = json.loads(of(instructions, "ENTRYPOINT")[0]) + json.loads(of(instructions, "CMD")[0])
    assert program == "tritium"
    command = typer.main.get_command(commands.app)
    name, found, rest = command.resolve_command(
        command.make_context("tritium", ["doctor"], resilient_parsing=True), arguments
    )
    context = found.make_context(name, rest)
    assert (context.params["host"], context.params["port"], context.params["pipeline"]) == ("0.0.0.0", 8000, "example")
