"""`tritium doctor`: show what is installed, and known problems with a fix for each.

`gather` reads the machine's properties; `diagnose` is a pure function of the result.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json as json_format
import platform
import re
import sysconfig
import tempfile
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tritium import catalog, compat, config, device, envs, fusions, ops, tuning
from tritium.cli import sharing as sharing_checks
from tritium.cli.check import Check, Status
from tritium.compiler.pipeline import passes_for
from tritium.config import CompilationConfig
from tritium.errors import ConfigError, TritiumError
from tritium.ops import scaled_linear

# The Triton version that torch's CUDA wheels require; CPU wheels require none but use an installed one.
TRITON_OF_TORCH = {(2, 11): (3, 6), (2, 12): (3, 7), (2, 13): (3, 7), (2, 14): (3, 8), (2, 15): (3, 9)}

OLDEST_TORCH = (2, 11)
PYTHONS = ((3, 11), (3, 13))

# Limits oneDNN to instructions below AMX; read once, when torch is loaded.
ISA_WITHOUT_AMX = "AVX512_CORE_BF16"


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The properties of a machine that the checks read."""

    python: str
    torch: str
    torch_cuda: str | None
    triton: str | None
    triton_required: str | None
    # Parts of Tritium that decline on this torch version, with the reasons.
    declined: tuple[tuple[str, str], ...]
    diffusers: str | None
    gpu: str | None
    driver: str | None
    # The compiler that Inductor calls, its path if it is on the PATH, and other compilers.
    compiler: str
    compiler_path: str | None
    other_compilers: tuple[str, ...]
    headers: bool
    bf16_works: bool
    # True if products of int8 on the CPU are exact.
    int8_exact: bool
    onednn_isa: str | None
    cache_folder: str
    cache_error: str | None
    variable_error: str | None
    # Number of kernel verdicts for the GPU, or for the CPU without a GPU.
    choices: int
    # For a GPU without rows, the device whose table predicts its verdicts, or None.
    choices_of: str | None = None
    # The compute capability of the GPU.
    capability: tuple[int, int] | None = None
    # Reasons why installed plug-ins are not used.
    broken_plugins: tuple[str, ...] = ()


def gather() -> Facts:
    versions = compat.versions.versions()
    here = tuning.Machine.of(device.default())
    wanted = envs.get("CXX") or "g++"
    others = tuple(name for name in ("g++", "clang++", "c++") if name != wanted and _on_path(name))
    plain = {name: value for name, value in envs.child_environment({}).items() if name != envs.ONEDNN_ISA}
    folder, error = _try_cache_folder()
    return Facts(
        python=platform.python_version(),
        torch=torch.__version__,
        torch_cuda=torch.version.cuda,
        triton=versions["triton"],
        triton_required=_triton_requirement(),
        declined=tuple(compat.declined.declined_parts().items()),
        diffusers=versions["diffusers"],
        gpu=device.describe("cuda").name if device.cuda_available() else None,
        driver=device.nvidia_driver(),
        compiler=wanted,
        compiler_path=_on_path(wanted),
        other_compilers=others,
        headers=(Path(sysconfig.get_path("include")) / "Python.h").exists(),
        int8_exact=compat.operators.int8_products_are_exact(),
        capability=device.capability(torch.device("cuda")),
        bf16_works=device.bf16_matmul_works(plain),
        onednn_isa=envs.get(envs.ONEDNN_ISA),
        cache_folder=folder,
        cache_error=error,
        variable_error=_variable_error(),
        broken_plugins=_broken_plugins(),
        choices=len(tuning.known(here)),
        choices_of=other.name if (other := tuning.like(here)) is not None else None,
    )


def _on_path(command: str) -> str | None:
    # `CXX` may contain options or a full path.
    name = Path(command.split(maxsplit=1)[0])
    candidates = [name] if name.is_absolute() else [folder / name for folder in envs.search_path()]
    return next((str(candidate) for candidate in candidates if candidate.is_file()), None)


def _triton_requirement() -> str | None:
    for requirement in importlib.metadata.requires("torch") or ():
        found = re.match(r"triton\s*[=~]=\s*([\d.]+)", requirement)
        if found:
            return found[1]
    known = TRITON_OF_TORCH.get(compat.versions.TORCH)
    return _dotted(known) if known else None


def _try_cache_folder() -> tuple[str, str | None]:
    folder = None
    try:
        folder = str(compat.inductor.cache_dir())
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        return folder or str(error.filename), error.strerror
    return folder, None


def _variable_error() -> str | None:
    try:
        config.check_environment()
    except ConfigError as error:
        return str(error)
    return None


def _broken_plugins() -> tuple[str, ...]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        # Invalid variables and duplicate names are reported elsewhere.
        for load in (fusions.catalog, ops.catalog, lambda: passes_for(CompilationConfig(), ())):
            with contextlib.suppress(TritiumError):
                load()
    return tuple(catalog.broken())


def diagnose(facts: Facts) -> list[Check]:
    """Return the checks in the order in which they are shown."""
    # On a GPU, Inductor needs no C++ compiler, and bfloat16 on the CPU is computed only on request.
    of_cpu: Status = "fail" if facts.gpu is None else "warn"
    oldest_python, newest_python = PYTHONS
    python = compat.versions.parse_version(facts.python)
    oldest_torch = _dotted(OLDEST_TORCH)
    is_new = compat.versions.parse_version(facts.torch) >= OLDEST_TORCH
    declined = "; ".join(f"{part} ({reason})" for part, reason in facts.declined)
    known = f"{_dotted(compat.tiling.TILING_KNOWN[0])} to {_dotted(compat.tiling.TILING_KNOWN[-1])}"
    headers = f"apt-get install python{_dotted(python[:2])}-dev"
    return [
        Check(
            "python",
            "warn",
            f"{facts.python} is not tested",
            f"use Python {_dotted(oldest_python)} to {_dotted(newest_python)}",
        ).unless(oldest_python <= python <= newest_python, facts.python),
        Check(
            "torch", "fail", f"{facts.torch} is older than {oldest_torch}", f"pip install 'torch>={oldest_torch}'"
        ).unless(is_new, facts.torch),
        Check(
            "support of this torch",
            "warn",
            f"declines on torch {facts.torch}: {declined}",
            f"install torch {known}; with torch {facts.torch} everything else works",
        ).unless(not facts.declined, f"no part of Tritium declines on torch {facts.torch}"),
        _triton(facts),
        _gpu(facts),
        Check("kernel choices", "ok", _choices(facts)),
        _compiler(facts, of_cpu),
        Check("python headers", of_cpu, "no Python.h: compiled code cannot be loaded", headers).unless(
            facts.headers, "Python.h found"
        ),
        _bf16(facts, of_cpu),
        _int8(facts),
        _float8(facts),
        Check(
            "cache folder",
            "fail",
            f"{facts.cache_folder} cannot be written: {facts.cache_error}",
            "export TORCHINDUCTOR_CACHE_DIR=<a folder of yours>",
        ).unless(facts.cache_error is None, facts.cache_folder),
        Check("environment", "fail", facts.variable_error or "", "correct or unset it").unless(
            facts.variable_error is None, f"every {envs.PREFIX}* variable means something"
        ),
        Check(
            "diffusers", "warn", "not installed: no workloads, no pipelines", "pip install 'tritium[diffusers]'"
        ).unless(facts.diffusers is not None, facts.diffusers or ""),
        Check(
            "plug-ins",
            "warn",
            "; ".join(facts.broken_plugins),
            "update or uninstall the packages that declare them",
        ).unless(not facts.broken_plugins, "none that cannot be used"),
    ]


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _triton(facts: Facts) -> Check:
    required = facts.triton_required
    install = "pip install triton"
    if required:
        # A requirement without a patch version is that of a table.
        install = (
            f"pip install triton=={required}" if required.count(".") > 1 else f"pip install 'triton=={required}.*'"
        )
    if facts.triton is None:
        missing = Check("triton", "fail", "not installed: nothing can be generated for the GPU", install)
        return missing.unless(facts.gpu is None, "not installed, and not needed without a GPU")
    if required is None:
        return Check("triton", "ok", f"{facts.triton} (which one torch {facts.torch} wants is not known here)")
    status: Status = "warn" if facts.gpu is None else "fail"
    detail = f"{facts.triton} does not match torch {facts.torch}, which wants {required}"
    is_wanted = compat.versions.parse_version(facts.triton) == compat.versions.parse_version(required)
    return Check("triton", status, detail, install).unless(is_wanted, facts.triton)


def _gpu(facts: Facts) -> Check:
    if facts.gpu is not None:
        return Check("gpu", "ok", f"{facts.gpu}, driver {facts.driver or 'unknown'}, CUDA {facts.torch_cuda}")
    if facts.driver is None:
        return Check("gpu", "ok", "none: the CPU is used")
    if facts.torch_cuda is None:
        detail = f"NVIDIA driver {facts.driver} is there, but torch {facts.torch} is built without CUDA"
        fix = "install torch from an index of CUDA builds: https://pytorch.org/get-started"
    else:
        detail = f"NVIDIA driver {facts.driver} is there, but torch (CUDA {facts.torch_cuda}) cannot use it"
        fix = "update the driver, or install torch for an older CUDA; see `nvidia-smi`"
    return Check("gpu", "warn", detail, fix)


def _choices(facts: Facts) -> str:
    where = facts.gpu or "this CPU"
    if facts.choices:
        return f"{facts.choices} were measured on {where}; see `tritium tune --show`"
    if facts.choices_of is not None:
        return f"none for {where}: they are predicted from those of {facts.choices_of}; `tritium tune` measures"
    return f"none for {where}: Inductor computes everything, until `tritium tune` is run"


def _compiler(facts: Facts, status: Status) -> Check:
    detail, fix = f"no {facts.compiler} on the PATH", "apt-get install g++, or export CXX=..."
    if facts.other_compilers:
        detail, fix = f"Inductor calls {facts.compiler}, not found", f"export CXX={facts.other_compilers[0]}"
    return Check("c++ compiler", status, detail, fix).unless(facts.compiler_path is not None, facts.compiler_path or "")


def _bf16(facts: Facts, status: Status) -> Check:
    if facts.bf16_works:
        return Check("bfloat16 on the CPU", "ok", "a product works")
    cause = "a bfloat16 product kills the process (AMX is advertised and refused)"
    fix = f"export {envs.ONEDNN_ISA}={ISA_WITHOUT_AMX} before Python starts, or use float32 on the CPU"
    defused = f"{cause}; defused by {envs.ONEDNN_ISA}={facts.onednn_isa}"
    return Check("bfloat16 on the CPU", status, cause, fix).unless(facts.onednn_isa is not None, defused)


def _int8(facts: Facts) -> Check:
    name = "int8 on the CPU"
    if facts.int8_exact:
        return Check(name, "ok", "products are exact")
    detail = "products saturate without a message (no VNNI instructions): quantize='int8' is declined on the CPU"
    if facts.gpu is not None:
        return Check(name, "ok", detail)
    fix = "use quantize='int8-weights', which stores weights alone"
    if facts.onednn_isa is not None:
        fix = f"unset {envs.ONEDNN_ISA}={facts.onednn_isa} or allow it VNNI (AVX512_CORE_VNNI); otherwise {fix}"
    return Check(name, "warn", detail, fix)


def _float8(facts: Facts) -> Check:
    name = "float8 products"
    if facts.gpu is None:
        return Check(name, "ok", "no GPU: they are computed from dequantized values; quantize='int8' is for CPUs")
    shown = "unknown" if facts.capability is None else _dotted(facts.capability)
    if facts.capability is None or facts.capability < scaled_linear.FP8_CORES:
        needed = _dotted(scaled_linear.FP8_CORES)
        detail = f"they need compute capability {needed}, {facts.gpu} has {shown}: quantize='fp8' is declined"
        return Check(name, "warn", detail, "use quantize='int8'")
    if facts.capability < scaled_linear.ROW_SCALES:
        needed = _dotted(scaled_linear.ROW_SCALES)
        return Check(
            name, "ok", f"by Triton: cuBLAS has scales per row from compute capability {needed} on, not {shown}"
        )
    version, rows = scaled_linear.SLOW_SUMS
    detail = (
        f"CUDA {version} has no fast sums for {rows} rows or fewer with a large K: such products run with slow ones"
    )
    fix = f"install torch for CUDA 12.6 or 13.0, if prompts of up to {rows} tokens matter"
    return Check(name, "warn", detail, fix).unless(
        facts.torch_cuda != version, f"by cuBLAS, with a scale per row ({shown})"
    )


def command(
    pipeline: Annotated[
        str | None, typer.Argument(metavar="PIPELINE", help="With --sharing: a diffusers folder, or 'example'.")
    ] = None,
    *,
    sharing: Annotated[
        bool, typer.Option("--sharing", help="Show what processes share of their weights instead.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the checks as JSON.")] = False,
) -> None:
    """Find problems that keep compiled models from working on this machine, and show how to fix them.

    Exits with 1 if a check fails.
    """
    if pipeline is not None and not sharing:
        raise ConfigError(f"doctor takes a pipeline with --sharing alone: leave out {pipeline!r}, or add --sharing")
    checks = sharing_checks.checks(pipeline) if sharing else diagnose(gather())
    if json:
        print(json_format.dumps({"checks": [asdict(check) for check in checks]}, indent=2))
    else:
        Console().print(_table(checks))
    if any(check.status == "fail" for check in checks):
        raise typer.Exit(1)


def _table(checks: list[Check]) -> Table:
    colours = {"ok": "green", "warn": "yellow", "fail": "red"}
    table = Table(box=None, pad_edge=False)
    for name in ("", "check", "what was found"):
        table.add_column(name)
    for check in checks:
        fix = f"\n  fix: {escape(check.fix)}" if check.fix else ""
        colour = colours[check.status]
        table.add_row(f"[{colour}]{check.status}[/]", check.name, escape(check.detail) + fix)
    return table
