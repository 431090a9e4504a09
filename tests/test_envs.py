"""What child processes get from their parent."""

import os
import subprocess
import sys
from pathlib import Path

import tritium
from tritium import envs

PROGRAM = """
import subprocess, sys
sys.path.insert(0, {checkout!r})
from tritium import envs
program = "import tritium; print(tritium.__file__)"
subprocess.run([sys.executable, "-c", program], env=envs.child_environment({{}}), check=True)
"""


def test_a_child_imports_what_its_parent_found_through_sys_path(tmp_path):
    """A checkout that is not installed: only the parent's program names its folder."""
    checkout = tmp_path / "checkout"
    checkout.symlink_to(Path(tritium.__file__).parent.parent)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(checkout=str(checkout))],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert Path(done.stdout.strip()) == checkout / "tritium" / "__init__.py"


def test_a_user_without_a_home_has_a_cache(monkeypatch):
    def fail():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(envs.Path, "home", fail)
    assert envs.cache_home().is_dir()
