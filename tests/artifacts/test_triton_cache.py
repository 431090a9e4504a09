"""Triton kernels of ops travel in artifacts: the next machine compiles none of them."""

import json
from pathlib import Path

import pytest
import torch

from tritium import compat, envs
from tritium.artifacts import files as artifacts
from tritium.artifacts import libraries, observations
from tritium.artifacts.files import Section
from tritium.artifacts.fingerprint import Fingerprint
from tritium.ops import triton_launch

triton = pytest.importorskip("triton")


@pytest.fixture
def here() -> Fingerprint:
    return Fingerprint.current({"block": {"width": 16}}, "cpu")


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Go to a machine whose caches are folders of their own."""

    def move(name: str) -> Path:
        monkeypatch.setenv(envs.TRITON_CACHE, str(tmp_path / name / "triton"))
        monkeypatch.setattr(compat.inductor, "cache_dir", lambda: tmp_path / name / "inductor")
        return tmp_path / name / "triton"

    return move


@pytest.fixture
def no_interpreter(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


def compiled_kernel():
    """The smallest kernel of an op, for a GPU that need not be there."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from tritium.ops.kernels.group_norm_silu import group_norm_silu_combine_kernel

    signature = {
        **dict.fromkeys(["partials_ptr", "moments_ptr"], "*fp32"),
        **dict.fromkeys(["parts", "plane"], "i32"),
        **dict.fromkeys(["EPS", "BLOCK"], "constexpr"),
    }
    source = ASTSource(group_norm_silu_combine_kernel, signature, {"EPS": 1e-6, "BLOCK": 64})
    return triton.compile(source, target=GPUTarget("cuda", 90, 32))


@pytest.fixture
def nothing_else(monkeypatch):
    """A process that has used this kernel of an op, and nothing that Tritium keeps beside it."""
    monkeypatch.setattr(compat.artifacts, "cache_artifacts", lambda: (b"bytes", 1))
    monkeypatch.setattr(torch.compiler, "load_cache_artifacts", lambda content: "info")
    monkeypatch.setattr(libraries, "USED", {})
    monkeypatch.setattr(observations, "_used", {})


@pytest.mark.usefixtures("nothing_else", "no_interpreter")
def test_the_next_machine_finds_the_kernel(machine, tmp_path, monkeypatch, here):
    machine("first")
    made = compiled_kernel()
    monkeypatch.setattr(triton_launch, "_STARTED", {made.hash: made})
    saved = artifacts.save(tmp_path / "file", here)
    assert (saved.kernels, saved.missing) == (1, 0)
    assert "1 kernels of ops" in str(saved)
    folder = machine("second")
    assert artifacts.load(tmp_path / "file", here).kernels == 1
    # No path of the first machine is left, and no file that a launch does not read.
    assert {path.suffix for path in folder.rglob("*") if path.is_file()} == {".json", ".cubin"}
    assert not [path for path in folder.rglob("*.json") if "first" in path.read_text()]
    (listed,) = [json.loads(path.read_text())["child_paths"] for path in folder.rglob("__grp__*.json")]
    assert len(listed) == 2
    assert all(Path(path).exists() for path in listed.values())
    monkeypatch.setattr(triton.compiler.compiler, "parse", None)
    monkeypatch.setattr(triton.compiler.compiler.ASTSource, "make_ir", None)
    found = compiled_kernel()
    assert found.hash == made.hash
    assert found.asm["cubin"] == made.asm["cubin"]
    assert Path(next(iter(found.metadata_group.values()))).is_relative_to(folder)


@pytest.mark.usefixtures("nothing_else", "no_interpreter")
def test_a_kernel_whose_files_are_gone_is_counted(machine, tmp_path, monkeypatch, here):
    folder = machine("first")
    made = compiled_kernel()
    monkeypatch.setattr(triton_launch, "_STARTED", {made.hash: made})
    next(folder.rglob("*.cubin")).unlink()
    assert artifacts.save(tmp_path / "file", here).missing == 1


@pytest.mark.usefixtures("nothing_else")
def test_what_is_there_already_stays(machine, tmp_path, here):
    folder = machine("first")
    (folder / "ABC").mkdir(parents=True)
    (folder / "ABC" / "name.cubin").write_bytes(b"old")
    path = tmp_path / "file"
    sections = [
        Section("torch", "artifacts", b""),
        Section("kernel", "ABC.name.cubin", b"new"),
        Section("kernel", "ABC.__grp__name.json", json.dumps({"child_paths": {"name.cubin": "/elsewhere"}}).encode()),
    ]
    path.write_bytes(artifacts.encode(here, sections, 1))
    artifacts.load(path, here)
    assert (folder / "ABC" / "name.cubin").read_bytes() == b"old"
    listed = json.loads((folder / "ABC" / "__grp__name.json").read_text())
    assert listed == {"child_paths": {"name.cubin": str(folder / "ABC" / "name.cubin")}}


def test_triton_s_folder_is_the_one_inductor_would_choose(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv(envs.TRITON_CACHE, "to be put back")
    monkeypatch.delenv(envs.TRITON_CACHE)
    assert compat.triton_cache.triton_folder() == tmp_path / "triton" / "0"
    assert envs.get(envs.TRITON_CACHE) == str(tmp_path / "triton" / "0")
    monkeypatch.setenv(envs.TRITON_CACHE, "elsewhere")
    assert compat.triton_cache.triton_folder() == Path("elsewhere")
