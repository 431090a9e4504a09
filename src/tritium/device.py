"""The only asker about hardware. Nothing here runs on import, and nothing starts CUDA unless it is asked about CUDA."""

from __future__ import annotations

import functools
import importlib.util
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

# Bytes read plus written per second by a large copy, measured with the bench workload `copy` or read from committed results.
# A device that is not listed has no estimate: the report then leaves estimated_us empty instead of guessing.
COPY_BANDWIDTH = {
    "NVIDIA H200": 4.3e12,
}


# Families of x86 instructions that compilers use unasked. Other flags change with the kernel and its mitigations.
_GENERATED = re.compile(r"(pni|s?sse|avx|amx|fma|f16c|bmi|abm|popcnt|movbe|adx|aes|vaes|v?pclmul|gfni|sha_ni|xop|tbm)")


@dataclass(frozen=True)
class Device:
    """What the report says about the machine."""

    type: str
    name: str
    capability: str | None = None
    threads: int | None = None

    def to_dict(self) -> dict[str, str | int | None]:
        return {"type": self.type, "name": self.name, "capability": self.capability, "threads": self.threads}


def cuda_available() -> bool:
    return torch.cuda.is_available()


def default() -> str:
    """Where a demo or benchmark should run: the GPU when there is one."""
    return "cuda" if cuda_available() else "cpu"


@functools.cache
def cpu_name() -> str:
    return _cpuinfo("model name") or platform.processor() or platform.machine()


@functools.cache
def cpu_instructions() -> tuple[str, ...]:
    """The instruction sets that a compiler may use in code for this very machine; empty where nobody says.

    Virtual machines of one CPU model may differ in them, and code with an instruction that is missing kills the process.
    """
    found = _cpuinfo("flags") or _cpuinfo("Features") or ""
    is_x86 = platform.machine() in {"x86_64", "AMD64"}
    return tuple(sorted(flag for flag in set(found.split()) if not is_x86 or _GENERATED.match(flag)))


def _cpuinfo(name: str) -> str | None:
    """A field of the first core."""
    try:
        with Path("/proc/cpuinfo").open(encoding="utf-8") as lines:
            for line in lines:
                if line.partition(":")[0].strip() == name:
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return None


def describe(device_type: str | None = None, index: int | None = None) -> Device:
    """A device; of several GPUs the one of a number, or the current one."""
    device_type = device_type or default()
    if device_type == "cuda" and cuda_available():
        properties = torch.cuda.get_device_properties(torch.cuda.current_device() if index is None else index)
        return Device("cuda", properties.name, f"{properties.major}.{properties.minor}")
    if device_type == "cpu":
        return Device("cpu", cpu_name(), torch.backends.cpu.get_cpu_capability(), torch.get_num_threads())
    return Device(device_type, device_type)


def copy_bandwidth(device: Device) -> float | None:
    """Measured copy bandwidth in bytes a second, or None for a device nobody has measured."""
    return COPY_BANDWIDTH.get(device.name)


def multiprocessors(device_type: str, index: int | None = None) -> int | None:
    """How many multiprocessors a GPU has; None for what is no GPU."""
    if device_type != "cuda" or not cuda_available():
        return None
    return int(torch.cuda.get_device_properties(index if index is not None else "cuda").multi_processor_count)


def capability(where: torch.device) -> tuple[int, int] | None:
    """A GPU's compute capability; None for what is no GPU or is not there."""
    if where.type != "cuda" or not cuda_available():
        return None
    return torch.cuda.get_device_capability(where)


def shared_memory(where: torch.device) -> int | None:
    """The most bytes of shared memory that one program may have on a GPU; None for what is no GPU or is not there."""
    if where.type != "cuda" or not cuda_available():
        return None
    return int(torch.cuda.get_device_properties(where).shared_memory_per_block_optin)  # type: ignore[attr-defined]


def is_capturing() -> bool:
    """Whether what this thread launches is being recorded as a CUDA graph: nothing can be waited for or timed."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


@functools.cache
def has_triton() -> bool:
    """Whether the triton package is there; importing it is left to whoever launches a kernel."""
    return importlib.util.find_spec("triton") is not None


def synchronize(device_type: str) -> None:
    if device_type == "cuda":
        torch.cuda.synchronize()


def busy_cpu_seconds() -> float | None:
    """Seconds that all processes of this machine have spent on its cores since it started; None where nobody says."""
    try:
        first = Path("/proc/stat").read_text(encoding="utf-8").splitlines()[0]
    except OSError:
        return None
    user, nice, system, _idle, _waiting, irq, softirq = (int(field) for field in first.split()[1:8])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def forget_peak_memory() -> bool:
    """Start measuring the most memory this process has anew; False where the system cannot."""
    try:
        # 5: reset the high-water mark of resident memory (proc(5)).
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return False
    return True


def peak_memory_of_process() -> int | None:
    """The most bytes of this process that were resident at once since `forget_peak_memory`; None where nobody says."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    kilobytes = next((line.split()[1] for line in lines if line.startswith("VmHWM:")), None)
    return int(kilobytes) * 1024 if kilobytes is not None else None


def free_memory(where: torch.device) -> int | None:
    """Bytes that a tensor on a device could take now; None where nobody says."""
    if where.type == "cuda":
        if torch.cuda.is_current_stream_capturing():
            return None
        free, _ = torch.cuda.mem_get_info(where)
        # What torch keeps of freed tensors serves new ones first.
        return int(free) + torch.cuda.memory_reserved(where) - torch.cuda.memory_allocated(where)
    return _free_memory_of_host() if where.type == "cpu" else None


def _free_memory_of_host() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    kilobytes = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
    if "MemAvailable" not in kilobytes:
        return None
    # What is swapped out is slow and not refused.
    return (kilobytes["MemAvailable"] + kilobytes.get("SwapFree", 0)) * 1024


def usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def nvidia_driver() -> str | None:
    """The version of the NVIDIA kernel driver, or None where there is none; torch need not be able to use it."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
    except OSError:
        return None
    found = re.search(r"Kernel Module.*?\s(\d+\.\d+(?:\.\d+)*)\s", text)
    return found[1] if found else "unknown"


# Large enough that oneDNN computes it; smaller products do not reach the instructions in question.
_BF16_PROBE = "import torch; a = torch.ones(256, 256, dtype=torch.bfloat16); assert float((a @ a)[0, 0]) == 256"


def bf16_matmul_works(environment: Mapping[str, str]) -> bool:
    """Whether a bfloat16 product on the CPU survives under an environment.

    Some virtual machines advertise AMX and then refuse its instructions, which kills the process: hence a child.
    """
    return _bf16_matmul_works(frozenset(environment.items()))


@functools.cache
def _bf16_matmul_works(environment: frozenset[tuple[str, str]]) -> bool:
    # The interpreter and the program are our own.
    child = subprocess.run(  # noqa: S603
        [sys.executable, "-c", _BF16_PROBE], env=dict(environment), capture_output=True, check=False
    )
    return child.returncode == 0
