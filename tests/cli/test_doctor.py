from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import json

import pytest
from typer.testing import CliRunner

from tritium import compat, device, envs
from tritium.cli import doctor
from tritium.cli.app import app

HEALTHY = doctor.Facts(
    python="3.11.7",
    torch="2.13.0",
    torch_cuda=None,
    triton="3.7.1",
    triton_required="3.7.1",
    declined=(),
    diffusers="0.42.1",
    gpu=None,
    driver=None,
    compiler="g++",
    compiler_path="/somewhere/g++",
    other_compilers=(),
    headers=True,
    bf16_works=True,
    int8_exact=True,
    onednn_isa=None,
    cache_folder="/somewhere/cache",
    cache_error=None,
    variable_error=None,
    choices=0,
)
GPU = {"gpu": "NVIDIA H200", "driver": "570.86.15", "torch_cuda": "13.0", "capability": (9, 0)}


def check(name, **facts):
    found = [entry for entry in doctor.diagnose(dataclasses.replace(HEALTHY, **facts)) if entry.name == name]
    assert len(found) == 1
    return found[0]


def test_a_healthy_machine_has_nothing_to_fix():
    for facts in (HEALTHY, dataclasses.replace(HEALTHY, **GPU)):
        assert [(entry.status, entry.fix) for entry in doctor.diagnose(facts)] == [("ok", None)] * 15


@pytest.mark.parametrize(
    ("name", "facts", "status", "fix"),
    [
        ("python", {"python": "3.10.2"}, "warn", "Python 3.11 to 3.13"),
        ("plug-ins", {"broken_plugins": ("entry point x",)}, "warn", "update or uninstall"),
        ("torch", {"torch": "2.9.1"}, "fail", "torch>=2.11"),
        ("triton", {"triton": "3.6.0"}, "warn", "triton==3.7.1"),
        ("triton", {"triton": "3.6.0", **GPU}, "fail", "triton==3.7.1"),
        ("triton", {"triton": "3.6.0", "triton_required": "3.7", **GPU}, "fail", "'triton==3.7.*'"),
        ("triton", {"triton": None, **GPU}, "fail", "pip install triton"),
        ("gpu", {"driver": "570.86.15"}, "warn", "CUDA builds"),
        ("gpu", {"driver": "450.1", "torch_cuda": "13.0"}, "warn", "update the driver"),
        ("c++ compiler", {"compiler_path": None}, "fail", "apt-get install g++"),
        ("c++ compiler", {"compiler_path": None, "other_compilers": ("clang++",)}, "fail", "export CXX=clang++"),
        ("c++ compiler", {"compiler_path": None, **GPU}, "warn", "apt-get install g++"),
        ("python headers", {"headers": False}, "fail", "python3.11-dev"),
        ("bfloat16 on the CPU", {"bf16_works": False}, "fail", "export ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16"),
        ("bfloat16 on the CPU", {"bf16_works": False, **GPU}, "warn", "before Python starts"),
        ("int8 on the CPU", {"int8_exact": False}, "warn", "use quantize='int8-weights'"),
        ("int8 on the CPU", {"int8_exact": False, "onednn_isa": "AVX2"}, "warn", "unset ONEDNN_MAX_CPU_ISA=AVX2 or"),
        ("float8 products", {**GPU, "torch_cuda": "12.9"}, "warn", "CUDA 12.6 or 13.0, if prompts of up to 256"),
        ("float8 products", {**GPU, "capability": (8, 0)}, "warn", "use quantize='int8'"),
        ("cache folder", {"cache_error": "Permission denied"}, "fail", "TORCHINDUCTOR_CACHE_DIR"),
        ("environment", {"variable_error": "TRITIUM_X means nothing"}, "fail", "unset"),
        ("diffusers", {"diffusers": None}, "warn", "tritium[diffusers]"),
    ],
)
def test_every_trap_has_its_fix(name, facts, status, fix):
    found = check(name, **facts)
    assert found.status == status
    assert fix in found.fix


def test_an_unknown_torch_is_named_with_what_declines():
    found = check(
        "support of this torch", torch="2.16.0", declined=tuple(compat.declined.declined_parts((2, 16)).items())
    )
    assert found.status == "warn"
    assert found.detail == (
        "declines on torch 2.16.0: the tiling policy (supported on torch 2.11 to 2.15, not on 2.16)"
    )
    assert found.fix.startswith("install torch 2.11 to 2.15;")


def test_a_hook_that_this_torch_lacks_is_named(monkeypatch):
    assert compat.declined.declined_parts() == {}
    varlen = importlib.import_module("torch.nn.attention.varlen")
    monkeypatch.delattr(varlen, "varlen_attn")
    monkeypatch.delattr(importlib.import_module("torch._inductor.choices").InductorChoices, "reduction_split_factor")
    this = compat.versions.version_text()
    assert compat.declined.declined_parts() == {
        "the tiling policy": f"torch {this} has no InductorChoices.reduction_split_factor",
        "attention of packed sequences": f"torch {this} has no torch.nn.attention.varlen.varlen_attn",
    }
    assert [part for part, _ in doctor.gather().declined] == ["the tiling policy", "attention of packed sequences"]


@pytest.mark.parametrize(
    ("name", "facts", "detail"),
    [
        ("kernel choices", {}, "none for this CPU: Inductor computes everything, until `tritium tune` is run"),
        ("kernel choices", GPU, "none for NVIDIA H200: Inductor computes everything, until `tritium tune` is run"),
        (
            "kernel choices",
            {**GPU, "choices_of": "NVIDIA H100"},
            "none for NVIDIA H200: they are predicted from those of NVIDIA H100; `tritium tune` measures",
        ),
        ("kernel choices", {**GPU, "choices": 7}, "7 were measured on NVIDIA H200; see `tritium tune --show`"),
        (
            "bfloat16 on the CPU",
            {"bf16_works": False, "onednn_isa": "AVX512_CORE_BF16"},
            "defused by ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16",
        ),
        ("triton", {"triton": None}, "not needed without a GPU"),
        ("int8 on the CPU", {"int8_exact": False, **GPU}, "quantize='int8' is declined on the CPU"),
        ("float8 products", {}, "no GPU"),
        ("float8 products", GPU, "by cuBLAS, with a scale per row (9.0)"),
        ("float8 products", {**GPU, "capability": (8, 9)}, "by Triton: cuBLAS has scales per row from"),
        ("triton", {"triton": "9.1", "triton_required": None}, "not known"),
    ],
)
def test_what_is_no_trap(name, facts, detail):
    found = check(name, **facts)
    assert found.status == "ok"
    assert detail in found.detail


def test_the_requirement_is_read_from_torch(monkeypatch):
    said = ["filelock", 'triton==3.8.2; platform_system == "Linux"']
    monkeypatch.setattr(importlib.metadata, "requires", lambda package: said)
    assert doctor._triton_requirement() == "3.8.2"
    said[1] = 'triton~=3.9.0; python_version < "3.16"'
    assert doctor._triton_requirement() == "3.9.0"


def test_a_torch_that_says_nothing_is_looked_up(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "requires", lambda package: None)
    monkeypatch.setattr(compat.versions, "TORCH", (2, 11))
    assert doctor._triton_requirement() == "3.6"
    monkeypatch.setattr(compat.versions, "TORCH", (9, 9))
    assert doctor._triton_requirement() is None


def test_the_compiler_is_found_on_the_path(monkeypatch, tmp_path):
    (tmp_path / "bin").mkdir()
    compiler = tmp_path / "bin" / "g++"
    compiler.touch()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert doctor._on_path("g++") == str(compiler)
    assert doctor._on_path("g++ -m64") == str(compiler)
    assert doctor._on_path(str(compiler)) == str(compiler)
    assert doctor._on_path("clang++") is None


def test_a_folder_that_cannot_be_written_is_seen(monkeypatch, tmp_path):
    in_the_way = tmp_path / "file"
    in_the_way.touch()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(in_the_way / "cache"))
    folder, error = doctor._try_cache_folder()
    assert str(in_the_way) in folder
    assert error is not None
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    assert doctor._try_cache_folder() == (str(tmp_path / "cache"), None)


def test_the_probe_runs_without_the_variable(monkeypatch):
    probed = []
    monkeypatch.setenv(envs.ONEDNN_ISA, "AVX2")
    monkeypatch.setattr(device, "bf16_matmul_works", lambda environment: bool(probed.append(environment)))
    facts = doctor.gather()
    assert envs.ONEDNN_ISA not in probed[0]
    assert "PATH" in probed[0]
    assert (facts.bf16_works, facts.onednn_isa) == (False, "AVX2")


@pytest.mark.parametrize("is_exact", [True, False])
def test_the_probe_of_int8_is_that_of_the_op(monkeypatch, is_exact):
    monkeypatch.setattr(compat.operators, "int8_products_are_exact", lambda: is_exact)
    assert doctor.gather().int8_exact is is_exact


def test_a_child_that_dies_is_a_probe_that_fails(monkeypatch):
    environment = envs.child_environment({"TRITIUM_TEST": "a child that dies"})
    monkeypatch.setattr(device, "_BF16_PROBE", "import os, signal; os.kill(os.getpid(), signal.SIGILL)")
    assert device.bf16_matmul_works(environment) is False


def run_doctor(monkeypatch, *arguments, **facts):
    monkeypatch.setattr(doctor, "gather", lambda: dataclasses.replace(HEALTHY, **facts))
    return CliRunner().invoke(app, ["doctor", *arguments])


@pytest.mark.parametrize(("facts", "code"), [({}, 0), ({"diffusers": None}, 0), ({"headers": False}, 1)])
def test_only_a_failure_fails(monkeypatch, facts, code):
    assert run_doctor(monkeypatch, **facts).exit_code == code
    found = run_doctor(monkeypatch, "--json", **facts)
    assert found.exit_code == code
    checks = json.loads(found.stdout)["checks"]
    assert {tuple(entry) for entry in checks} == {("name", "status", "detail", "fix")}
    assert len({entry["name"] for entry in checks}) == len(checks)


def test_the_fix_is_printed_beside_its_check(monkeypatch):
    text = run_doctor(monkeypatch, diffusers=None).stdout
    # Brackets are markup to rich, and must arrive whole.
    assert "fix: pip install 'tritium[diffusers]'" in text


def test_this_machine_can_be_examined():
    found = {entry.name: entry for entry in doctor.diagnose(doctor.gather())}
    assert found.keys() >= {"python", "torch", "triton", "gpu"}
    assert found["support of this torch"].status == "ok"
