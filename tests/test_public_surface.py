"""What users import, and what importing does."""

import subprocess
import sys
from pathlib import Path

import pytest

import tritium

ROOT = Path(__file__).parent.parent


def run(*arguments):
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_public_name_is_there():
    for name in tritium.__all__:
        assert getattr(tritium, name) is not None
    # Techniques add their configs; functions for hand-written models count too.
    assert len(tritium.__all__) <= 46
    assert not set(tritium.__all__) & set(tritium.plugins.__all__)
    assert {"Backend", "CompilationConfig", "compile", "explain", "optimize", "Plan"} <= set(tritium.__all__)
    assert set(tritium.__all__) <= set(dir(tritium))
    with pytest.raises(AttributeError, match="no attribute 'compiel'"):
        tritium.compiel  # noqa: B018


OPTIONAL = ["diffusers", "pydantic", "rich", "typer", "triton", "matplotlib", "jinja2", "peft"]


@pytest.mark.parametrize(
    "absent",
    [OPTIONAL, *(pytest.param([name], marks=pytest.mark.thorough) for name in OPTIONAL)],
    ids=lambda names: names[0] if len(names) == 1 else "all of them",
)
def test_the_core_imports_without_optional_packages(absent):
    program = f"""
import sys
sys.modules.update(dict.fromkeys({absent!r}))
import tritium
for name in tritium.__all__:
    getattr(tritium, name)
tritium.Backend()
"""
    run("-c", program)


def test_importing_starts_no_cuda_and_reads_no_arguments():
    program = """
import gc, sys
sys.argv = ["app", "--help"]
import torch
def refuse(*args, **kwargs): raise AssertionError("CUDA was started")
torch.cuda._lazy_init = torch.cuda.init = refuse
import tritium
front_door = {"optimize", "Handle"}
for name in sorted(set(tritium.__all__) - front_door):
    getattr(tritium, name)
tritium.Backend()
assert "torch._inductor.compile_fx" not in sys.modules
# The compiler comes with what compiles a pipeline, so that its first call does not import it.
collections = []
gc.callbacks.append(lambda phase, info: collections.append(info))
for name in front_door:
    getattr(tritium, name)
assert "torch._inductor.compile_fx" in sys.modules
# Collections would take a quarter of these imports.
assert not collections and gc.isenabled()
assert "torch.utils.benchmark" not in sys.modules
assert not torch.cuda.is_initialized()
"""
    run("-c", program)


def test_the_readme_s_generated_parts_are_current():
    run(str(ROOT / "docs" / "generate.py"), "--check")


def test_the_two_commands_of_the_readme_are_the_makefile_s():
    makefile = (ROOT / "Makefile").read_text()
    readme = (ROOT / "README.md").read_text()
    for target in ("setup", "demo", "test", "check", "fmt", "bench", "docs"):
        assert f"\n{target}:" in makefile
    assert "make demo" in readme
    assert "make test" in readme
    assert "make test" in (ROOT / ".ci" / "run").read_text()
