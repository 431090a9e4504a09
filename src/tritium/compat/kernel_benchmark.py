"""Time the kernel in this folder, and the operators it replaces.

    python benchmark.py            prints us per launch, GB/s compared with a copy, and the time of fragment.py
    python benchmark.py --json     the same as data

The source is read from kernel.py (Triton) or kernel.cpp (C++) in this folder: edit it and run this again to measure the
edit. Shapes and strides of the arguments are in meta.json. Integers are zero, so that every index is in bounds.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).resolve().parent

# Seconds of one measurement, after one warm-up launch.
SECONDS = 0.5

# Bytes of the tensor that is copied to measure bandwidth; larger than any cache.
COPIED = {"cpu": 1 << 27, "cuda": 1 << 29}


def make(spec: dict[str, Any]) -> Any:
    """Create a number, or a tensor with the given dtype, size and stride: random, or zeros for integers."""
    if spec["kind"] == "number":
        return spec["value"]
    dtype, size, stride = getattr(torch, spec["dtype"]), spec["size"], spec["stride"]
    extent = 1 + sum((length - 1) * step for length, step in zip(size, stride, strict=True)) if all(size) else 0
    if spec["kind"] == "workspace" or not (dtype.is_floating_point or dtype.is_complex):
        flat = torch.zeros(extent, dtype=dtype, device=spec["device"])
    elif dtype.itemsize == 1:
        flat = torch.randn(extent, device=spec["device"]).to(dtype)
    else:
        flat = torch.randn(extent, dtype=dtype, device=spec["device"])
    return flat.as_strided(size, stride)


def cpp_parameters(source: str) -> list[str]:
    """Return the parameters of the C++ function in a source, each with its type."""
    start = source.rindex('extern "C"')
    inner = source[source.index("(", start) + 1 : source.index(")", start)]
    return [parameter.strip() for parameter in inner.split(",") if parameter.strip()]


def load_kernel(folder: Path, language: str) -> Callable[..., None]:
    """Compile the current source in the folder and return a function of the kernel's arguments."""
    if language == "cpp":
        # Inductor's loader uses the same compiler, flags and vector instructions as in the model.
        from torch._inductor.codecache import CppPythonBindingsCodeCache

        source = (folder / "kernel.cpp").read_text(encoding="utf-8")
        types = [parameter.rpartition(" ")[0] for parameter in cpp_parameters(source)]
        loaded: Callable[..., None] = CppPythonBindingsCodeCache.load_pybinding(types, source)
        return loaded

    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    # The module is as Inductor wrote it; the first launch tries the tile sizes in its decorator.
    values = vars(load_module(folder / "kernel.py")).values()
    (kernel,) = [value for value in values if isinstance(value, CachingAutotuner)]
    return lambda *arguments: kernel.run(*arguments, stream=torch.cuda.current_stream().cuda_stream)


def load_module(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(f"{path.parent.name}_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Triton looks up a kernel's module by name.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def seconds(run: Callable[[], Any]) -> float:
    """Return the median time of a call; on a GPU, of many calls in a row."""
    run()
    # Import late: this imports setuptools.
    from torch.utils.benchmark import Timer

    timer = Timer("run()", globals={"run": run}, num_threads=torch.get_num_threads())
    return float(timer.blocked_autorange(min_run_time=SECONDS).median)


def copy_bandwidth(device: str) -> float:
    """Measure the bytes per second, read and written, of a large copy."""
    source = torch.zeros(COPIED[device], dtype=torch.uint8, device=device)
    target = torch.ones_like(source)
    return 2 * COPIED[device] / seconds(lambda: target.copy_(source))


def measure(folder: Path) -> dict[str, Any]:
    """Measure, and return everything that this file prints as data."""
    meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
    if meta.get("not_runnable"):
        raise SystemExit(f"{meta['name']} cannot be run on its own: {meta['not_runnable']}")
    kernel = load_kernel(folder, meta["language"])
    arguments = [make(given) for given in meta["arguments"]]
    eager = None
    with torch.inference_mode():
        if (folder / "fragment.py").exists():
            fragment = load_module(folder / "fragment.py")
            inputs = fragment.make_inputs()
            eager = seconds(lambda: fragment.run(**inputs))
        taken = seconds(lambda: kernel(*arguments))
        bandwidth = copy_bandwidth(meta["device"])
    moved = meta["bytes_read"] + meta["bytes_written"]
    return {
        "name": meta["name"],
        "device": meta["device"],
        "us": taken * 1e6,
        "eager_us": eager * 1e6 if eager is not None else None,
        "bytes": moved,
        "gb_per_s": moved / taken / 1e9,
        "copy_gb_per_s": bandwidth / 1e9,
    }


def text(found: dict[str, Any]) -> str:
    share = found["gb_per_s"] / found["copy_gb_per_s"]
    cached = " (the data stays in a cache)" if share > 1 else ""
    eager = "no fragment.py"
    if found["eager_us"] is not None:
        eager = f"{found['eager_us']:.2f} us one by one, {found['eager_us'] / found['us']:.2f}x as long"
    return f"""{found["name"]} on {found["device"]}
  time        {found["us"]:.2f} us a launch
  bandwidth   {found["gb_per_s"]:.2f} GB/s for {found["bytes"]} bytes
  copy        {found["copy_gb_per_s"]:.2f} GB/s by a large copy here: the kernel reaches {share:.0%}{cached}
  operators   {eager}
"""


if __name__ == "__main__":
    result = measure(HERE)
    sys.stdout.write(json.dumps(result) + "\n" if "--json" in sys.argv[1:] else text(result))
