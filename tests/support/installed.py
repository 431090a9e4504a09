"""Build the wheel, and environments that have it installed, as a user of another machine would."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from support.scripts import ROOT

SOURCES = ("pyproject.toml", "setup.py", "README.md", "LICENSE", "NOTICE")
EXTRAS = ("cli", "diffusers", "report", "serve")


def wheel(folder: Path) -> Path:
    """Build the wheel of a copy of the sources: setuptools writes into the folder that it builds."""
    for name in SOURCES:
        shutil.copy(ROOT / name, folder)
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "src", folder / "src", ignore=ignored)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", "dist", "."]
    subprocess.run(command, check=True, cwd=folder)
    (built,) = (folder / "dist").glob("*.whl")
    return built


@dataclass(frozen=True)
class Environment:
    """A virtual environment without this checkout, and a folder in which its programs run."""

    folder: Path

    @classmethod
    def create(cls, folder: Path) -> Environment:
        subprocess.run([sys.executable, "-m", "venv", str(folder / "venv")], check=True)
        return cls(folder)

    @property
    def variables(self) -> dict[str, str]:
        """Return the variables of this process without those that lead to the checkout."""
        kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
        return kept | {"TORCHINDUCTOR_CACHE_DIR": str(self.folder / "inductor"), "HF_HUB_OFFLINE": "1"}

    def install(self, *requirements: str) -> None:
        self.python("-m", "pip", "install", "--quiet", *requirements)

    def python(self, *arguments: str) -> str:
        return self.run("python", *arguments).stdout

    @contextlib.contextmanager
    def started(self, program: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
        """Start a program of the environment, and end it with SIGTERM as an orchestrator does."""
        command = [str(self.folder / "venv" / "bin" / program), *arguments]
        with (self.folder / "started.log").open("w") as log:
            process = subprocess.Popen(command, cwd=self.folder, env=self.variables, stdout=log, stderr=log, text=True)
            try:
                yield process
            finally:
                process.terminate()
                process.wait(60)

    def run(self, program: str, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run a program of the environment; one that fails shows what it printed."""
        command = [str(self.folder / "venv" / "bin" / program), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=self.folder, env=self.variables)
        assert not check or done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
        return done
