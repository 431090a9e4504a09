"""All hardware queries. Nothing runs on import, and only queries about CUDA start CUDA."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import platform
import re
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

# Bytes read plus written per second by a large copy, measured with the bench workload `copy` or taken from committed
# results. For an unlisted device the report leaves estimated_us empty instead of guessing.
COPY_BANDWIDTH = {"NVIDIA H200": 4.3e12}

# Bytes a second from page-locked memory to a device, and floating-point operations a second of denoisers in bfloat16. The
# link is an estimate for PCIe 5 x16; the rate of operations is that of FLUX at 1024 pixels in benchmarks/results.
RATES = {"NVIDIA H200": (50e9, 700e12)}
DEFAULT_RATES = "NVIDIA H200"

# x86 instruction sets that compilers use by default. Other flags change with the kernel and its mitigations.
_GENERATED = re.compile(r"(pni|s?sse|avx|amx|fma|f16c|bmi|abm|popcnt|movbe|adx|aes|vaes|v?pclmul|gfni|sha_ni|xop|tbm)")


@dataclass(frozen=True)
class Device:
    """A device as described in the report."""

    type: str
    name: str
    capability: str | None = None
    threads: int | None = None

    def to_dict(self) -> dict[str, str | int | None]:
        return asdict(self)


def cuda_available() -> bool:
    return torch.cuda.is_available()


def gpu_count() -> int:
    """Return the number of GPUs that torch can use."""
    return torch.cuda.device_count()


def default() -> str:
    """Return the device type for demos and benchmarks: `cuda` if available, else `cpu`."""
    return "cuda" if cuda_available() else "cpu"


def _proc(path: str) -> dict[str, str]:
    """Return the fields of a file of lines `name: value`, the first of each name; empty if there is no such file."""
    fields: dict[str, str] = {}
    try:
        with Path("/proc", path).open(encoding="utf-8") as lines:
            for line in lines:
                name, _, value = line.partition(":")
                fields.setdefault(name.strip(), value.strip())
    except OSError:
        pass
    return fields


@functools.cache
def cpu_name() -> str:
    return _proc("cpuinfo").get("model name") or platform.processor() or platform.machine()


@functools.cache
def cpu_instructions() -> tuple[str, ...]:
    """Return the instruction sets that a compiler may use for this CPU; empty if unknown.

    They differ between virtual machines of one CPU model, and an unsupported instruction kills the process.
    """
    fields = _proc("cpuinfo")
    flags = set((fields.get("flags") or fields.get("Features") or "").split())
    is_x86 = platform.machine() in {"x86_64", "AMD64"}
    return tuple(sorted(flag for flag in flags if not is_x86 or _GENERATED.match(flag)))


def describe(device_type: str | None = None, index: int | None = None) -> Device:
    """Describe a device: the GPU with this index, or the current one."""
    device_type = device_type or default()
    if device_type == "cuda" and cuda_available():
        properties = torch.cuda.get_device_properties(torch.cuda.current_device() if index is None else index)
        return Device("cuda", properties.name, f"{properties.major}.{properties.minor}")
    if device_type == "cpu":
        return Device("cpu", cpu_name(), torch.backends.cpu.get_cpu_capability(), torch.get_num_threads())
    return Device(device_type, device_type)


def copy_bandwidth(device: Device) -> float | None:
    """Return the measured copy bandwidth in bytes per second, or None for an unmeasured device."""
    return COPY_BANDWIDTH.get(device.name)


def _gpu(where: torch.device) -> Any:
    """Return the properties of a GPU, or None without one."""
    return torch.cuda.get_device_properties(where) if where.type == "cuda" and cuda_available() else None


def uuid(where: torch.device) -> str:
    """Return what identifies a GPU in every process, whatever number it has there."""
    return str(torch.cuda.get_device_properties(where).uuid)


def start_in_background(where: str) -> threading.Thread | None:
    """Start the GPU `cuda:UUID` in a thread, and return the thread; None for other devices.

    The driver takes part of a second, in which Python runs. An error is left to the first function that uses the GPU.
    """
    if not where.startswith("cuda"):
        return None

    def start() -> None:
        with contextlib.suppress(RuntimeError, AssertionError):
            index = index_of(where.removeprefix("cuda:"))
            if index is not None:
                torch.zeros(1, device=torch.device("cuda", index))

    thread = threading.Thread(target=start, name="tritium-device", daemon=True)
    thread.start()
    return thread


def index_of(uuid_: str) -> int | None:
    """Return the number of a GPU in this process, or None if it cannot be used here."""
    numbers = range(torch.cuda.device_count())
    return next((number for number in numbers if uuid(torch.device("cuda", number)) == uuid_), None)


def multiprocessors(device_type: str, index: int | None = None) -> int | None:
    """Return the number of multiprocessors of a GPU, or None without a GPU."""
    gpu = _gpu(torch.device(device_type if index is None else f"{device_type}:{index}"))
    return int(gpu.multi_processor_count) if gpu is not None else None


def capability(where: torch.device) -> tuple[int, int] | None:
    """Return a GPU's compute capability, or None without a GPU."""
    gpu = _gpu(where)
    return (gpu.major, gpu.minor) if gpu is not None else None


def shared_memory(where: torch.device) -> int | None:
    """Return the largest shared memory of one GPU program in bytes, or None without a GPU."""
    gpu = _gpu(where)
    return int(gpu.shared_memory_per_block_optin) if gpu is not None else None


def is_capturing() -> bool:
    """Return True if the current stream is being captured: synchronizing and timing would fail."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


@functools.cache
def has_triton() -> bool:
    """Return True if triton is installed, without importing it."""
    return importlib.util.find_spec("triton") is not None


def synchronize(device_type: str) -> None:
    if device_type == "cuda":
        torch.cuda.synchronize()


def busy_cpu_seconds() -> float | None:
    """Return the seconds that all processes have spent on the cores since boot, or None if unknown."""
    try:
        first = Path("/proc/stat").read_text(encoding="utf-8").splitlines()[0]
    except OSError:
        return None
    user, nice, system, _idle, _waiting, irq, softirq = (int(field) for field in first.split()[1:8])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def forget_peak_memory() -> bool:
    """Reset the peak of this process's resident memory; return False if the system cannot."""
    try:
        # 5: reset the high-water mark of resident memory (proc(5)).
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return False
    return True


def peak_memory_of_process() -> int | None:
    """Return the peak of resident bytes since `forget_peak_memory`, or None if unknown."""
    return _kilobytes(_proc("self/status").get("VmHWM"))


def _kilobytes(text: str | None) -> int | None:
    return int(text.split()[0]) * 1024 if text is not None else None


def total_memory(where: torch.device) -> int | None:
    """Return the bytes of a GPU's memory, or None for other devices."""
    gpu = _gpu(where)
    return int(gpu.total_memory) if gpu is not None else None


def free_memory(where: torch.device) -> int | None:
    """Return the bytes that can be allocated on a device now, or None if unknown."""
    if where.type == "cuda":
        if torch.cuda.is_current_stream_capturing():
            return None
        free, _ = torch.cuda.mem_get_info(where)
        # torch reuses the memory it has cached from freed tensors first.
        return int(free) + torch.cuda.memory_reserved(where) - torch.cuda.memory_allocated(where)
    if where.type != "cpu":
        return None
    memory = _proc("meminfo")
    available = _kilobytes(memory.get("MemAvailable"))
    # Count free swap: swapped memory is slow, but the allocation succeeds.
    return available if available is None else available + (_kilobytes(memory.get("SwapFree")) or 0)


def empty_cache() -> None:
    """Return the memory that torch has cached to the GPU, if CUDA has started."""
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def host_memory() -> int | None:
    """Return the bytes that this process can still take: the machine's, or those that its container leaves.

    Page-locked memory cannot be reclaimed, and in a container the machine's figure may be far too large.
    """
    available = _kilobytes(_proc("meminfo").get("MemAvailable"))
    left = [limit - used for limit, used in _limits_of_container()]
    return min([*left, *([] if available is None else [available])], default=None)


def _limits_of_container() -> list[tuple[int, int]]:
    """Return limit and use of memory of each control group around this process, in both versions of the interface."""
    root, found = Path("/sys/fs/cgroup"), []
    groups = {name: path for _, name, path in _groups()}
    for folder, limit, used in (
        (root, "memory.max", "memory.current"),
        (root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        path = groups.get("memory" if folder != root else "", "/")
        own = folder / path.strip("/")
        for place in (own, *own.parents):
            if place.is_relative_to(folder):
                found += _limit_in(place, limit, used)
    return found


def _groups() -> list[tuple[str, ...]]:
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    return [tuple(line.split(":", 2)) for line in lines if line.count(":") >= 2]


def _limit_in(group: Path, limit: str, used: str) -> list[tuple[int, int]]:
    try:
        most, taken = (int((group / name).read_text(encoding="ascii")) for name in (limit, used))
        lines = (group / "memory.stat").read_text(encoding="ascii").splitlines()
    except (OSError, ValueError):
        # No such group, or the text "max".
        return []
    # Pages of files count as used, and are given up when memory runs short.
    stat = {name: int(value) for name, value in (line.split() for line in lines)}
    return [(most, max(0, taken - stat.get("inactive_file", 0) - stat.get("active_file", 0)))]


def usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def nvidia_driver() -> str | None:
    """Return the version of the NVIDIA kernel driver, or None without one. torch may be unable to use it."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
    except OSError:
        return None
    found = re.search(r"Kernel Module.*?\s(\d+\.\d+(?:\.\d+)*)\s", text)
    return found[1] if found else "unknown"


# Large enough for oneDNN; smaller products do not use AMX.
_BF16_PROBE = "import torch; a = torch.ones(256, 256, dtype=torch.bfloat16); assert float((a @ a)[0, 0]) == 256"


def bf16_matmul_works(environment: Mapping[str, str]) -> bool:
    """Return True if a bfloat16 matrix product on the CPU succeeds in a child process with an environment.

    Some virtual machines advertise AMX and then fault on its instructions.
    """
    command = [sys.executable, "-c", _BF16_PROBE]
    # Safe: this interpreter runs a constant program.
    return subprocess.run(command, env=dict(environment), capture_output=True, check=False).returncode == 0  # noqa: S603


def cuda_version() -> str | None:
    """Return the version of CUDA that torch was built with, or None without CUDA."""
    version: str | None = torch.version.cuda
    return version
