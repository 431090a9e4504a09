"""Run all measurements of quantization that need a GPU, side by side in processes, in resumable calls.

    python benchmarks/quantize_session.py --out results [--only attention,products,...] [--jobs 12] [--path DIR]

producers   kernels that write 8-bit rows, each against its 16-bit kernel and against Inductor's code
products    products of FLUX's linears: cuBLAS, and candidates of the int8 Triton kernel
models      denoisers with few blocks: torch.compile, Tritium, and Tritium quantized
attention   attention in 8 bits at the shapes of FLUX, Qwen-Image and Wan, against cuDNN in bfloat16
pipeline    the FLUX-shaped pipeline: torch.compile, `tritium.optimize`, and the same quantized, and with skipped steps

Each part of a section is one process with one JSON file; a file that exists is not measured again. Timings wait for one
another, compilation does not. Exit code 0: everything is measured. 1: a process failed. 3: call again.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DONE, FAILED, LEFT_OVER = 0, 1, 3

SECTIONS = ("pipeline", "models", "attention", "products", "producers")

# Processes among which the cases of a section of kernels are divided.
PARTS = {"producers": 7, "products": 9, "attention": 1}

# Workloads, the formats of their linears, and the least bar of the first one over torch.compile.
# Qwen-Image computes one layer of each block in int8 by default.
ALL_FP8 = r'{"linear": "fp8", "layers": {"re:.*img_mlp[.]net[.]2": "fp8"}}'
WITH_ATTENTION = '{"linear": "fp8", "attention": "int8"}'
MODELS = {"wan": ("fp8", WITH_ATTENTION), "flux": ("fp8", "int8", WITH_ATTENTION), "qwen-image": ("fp8", ALL_FP8)}
BARS = {"flux": 1.42, "qwen-image": 1.45, "wan": 1.15, "flux pipeline 1024": 1.42, "flux pipeline 1024, 28 steps": 1.42}

# The pipeline at 28 steps, alone and with half of them skipped.
LONG = "28-steps"
WINDOW: dict[str, Any] = {"steps": 28, "runs": 14, "first": 3, "last": 2, "growth": 0.3, "order": 1}

# Variants of the pass that are measured beside its defaults, in `flux` alone.
INLINED, JOINED = "tritium fp8, kernels of Inductor", "tritium fp8, no products joined"


@dataclass(frozen=True)
class Job:
    """One process: a section, and its part."""

    section: str
    part: str

    @property
    def file(self) -> str:
        return f"{self.section}-{self.part}.json"


def jobs(sections: Sequence[str]) -> list[Job]:
    """Return the processes of some sections; those that take longest first."""
    parts = {
        "pipeline": [LONG, "1024"],
        "models": list(MODELS),
        **{name: [str(part) for part in range(count)] for name, count in PARTS.items()},
    }
    wanted = [Job(section, part) for section in SECTIONS for part in parts[section]]
    return [job for job in wanted if job.section in sections or f"{job.section}:{job.part}" in sections]


def settings(seconds: float) -> Any:
    from tritium import device
    from tritium.bench.settings import Settings

    return Settings(seconds=seconds, device_type=device.default(), against=("eager", "inductor"), cold=False)


def measure(job: Job, out: Path) -> int:
    """Measure a part in this process and write its file."""
    from tritium.bench.results import Results

    rows = {**dict.fromkeys(PARTS, kernels), "models": models, "pipeline": pipeline}[job.section](job)
    Results.now(rows, settings(1.0).device_type).save(out / job.file)
    return DONE


def note(what: str, share: float = 0.0) -> None:
    del share
    print(what, flush=True)


def makers_of(section: str, *, small: bool) -> list[Any]:
    """Return the functions that make the cases of a section of kernels."""
    # The folder of the script that runs is searched first.
    import quantized_attention
    import quantized_kernels

    if section == "attention":
        return quantized_attention.cases(small=small)
    makers: list[Any] = getattr(quantized_kernels, section)(small=small)
    return makers


def kernels(job: Job) -> list[Any]:
    import quantized_kernels

    chosen = settings(1.0)
    makers = makers_of(job.section, small=chosen.small)
    rows = []
    for maker in makers[int(job.part) :: PARTS[job.section]]:
        rows += quantized_kernels.measure_case(maker(chosen), chosen, note)
    return rows


def models(job: Job) -> list[Any]:
    """Measure one denoiser: eager's result is the reference of all errors."""
    import torch

    from tritium.bench.comparison import Comparison, call_of, compiled, tensor_of
    from tritium.bench.results import EAGER, INDUCTOR, TRITIUM
    from tritium.bench.workloads import WORKLOADS
    from tritium.compiler.passes import quantize

    chosen = settings(4.0)
    (workload,) = WORKLOADS[job.part]
    built = chosen.build(workload)
    comparison = Comparison.of(job.part, built, chosen, note)

    def add(name: str, variant: str, how: Any) -> None:
        model = compiled(built, variant, how)
        comparison.add(name, call_of(model.call, built.inputs), model=model.parts[0])

    add(INDUCTOR, INDUCTOR, chosen)
    add(TRITIUM, TRITIUM, chosen)
    for format_ in MODELS[job.part]:
        how = replace(chosen, quantize=format_)
        add(how.quantized, how.quantized, how)
    if job.part == "flux":
        how = replace(chosen, quantize="fp8", config=without_producers())
        add(INLINED, how.quantized, how)
        quantize.JOIN_ROWS["cuda"] = 0
        how = replace(chosen, quantize="fp8")
        add(JOINED, how.quantized, how)
    with torch.inference_mode():
        comparison.finish(tensor_of(compiled(built, EAGER, chosen).call(**built.inputs), job.part), burst=5)
    for variant in comparison.variants.values():
        variant.fields["remark"] = summary_of(variant.model)
    for name in (TRITIUM, *[f"{TRITIUM} {format_}" for format_ in MODELS[job.part]]):
        print_kernels(name, comparison.variants[name].call)
    return comparison.rows()


def print_kernels(name: str, call: Callable[[], Any], most: int = 40) -> None:
    """Print the kernels of one call by their time on the device: the log of the process shows where the time goes."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    if not torch.cuda.is_available():
        return
    with torch.inference_mode(), profile(activities=[ProfilerActivity.CUDA]) as recorded:
        for _ in range(3):
            call()
        torch.cuda.synchronize()
    events = sorted(recorded.key_averages(), key=lambda event: -event.self_device_time_total)
    total = sum(event.self_device_time_total for event in events)
    print(f"== {name}: {total / 3e3:.3f} ms in kernels of a call")
    for event in events[:most]:
        print(f"{event.self_device_time_total / 3:10.1f} us {event.count // 3:5} x  {event.key[:110]}")


def without_producers() -> Any:
    """Return a configuration in which Inductor generates all code that quantizes."""
    import tritium

    return tritium.CompilationConfig(fusion_patterns=tritium.FusionPatterns(enable_quantize_rows=False))


def summary_of(model: Any) -> str | None:
    """Return the sites of quantized rows in a compiled model, as text."""
    import tritium

    try:
        sites = tritium.explain(model).sites
    except tritium.errors.TritiumError:
        return None
    found = sites.get("quantize_rows")
    return None if found is None else f"quantize_rows: {found.fused} fused, {dict(found.reasons)}"


def pipeline(job: Job) -> list[Any]:
    """Measure the pipeline at one size."""
    import contextlib

    import tritium
    from tritium.bench import flux_pipeline
    from tritium.bench.suite import Clock

    chosen = replace(settings(8.0), quantize="fp8")
    scale = flux_pipeline.FULL
    if job.part == LONG:
        scale = flux_pipeline.LONG
        chosen = replace(chosen, skip=tritium.Skip.window(**WINDOW).rows[0])
    with contextlib.ExitStack() as stack:
        (task, *_) = flux_pipeline.tasks(chosen, stack, scale)
        return task.measure(Clock(600.0), note)


def session(out: Path, limit: float, sections: Sequence[str], path: Sequence[str], workers: int) -> int:
    """Run what is missing, several processes at once; return the exit code."""
    deadline = time.monotonic() + limit
    waiting = [job for job in jobs(sections) if not (out / job.file).exists()]

    def run(job: Job) -> int:
        left = deadline - time.monotonic()
        return _child(job, out, left, path) if left > 30 else LEFT_OVER

    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        codes = list(pool.map(run, waiting))
    print_table(out)
    for job, code in zip(waiting, codes, strict=True):
        if code != DONE:
            print(f"{job.file}: {'call again' if code == LEFT_OVER else 'FAILED, see ' + job.file[:-5] + '.log'}")
    return FAILED if FAILED in codes else LEFT_OVER if LEFT_OVER in codes else DONE


def _child(job: Job, out: Path, seconds: float, path: Sequence[str]) -> int:
    command = [sys.executable, __file__, "--child", f"{job.section}:{job.part}", "--out", str(out)]
    places = [str(ROOT / "src"), *path, os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, places)),
        "TORCHINDUCTOR_COMPILE_THREADS": "4" if job.section in ("models", "pipeline") else "1",
    }
    with (out / f"{job.section}-{job.part}.log").open("w", encoding="utf-8") as log:
        try:
            done = subprocess.run(
                command, env=environment, check=False, timeout=seconds, stdout=log, stderr=subprocess.STDOUT
            )
        except subprocess.TimeoutExpired:
            return LEFT_OVER
    return DONE if done.returncode == DONE else FAILED


def print_table(out: Path) -> None:
    """Print one line a row: microseconds of kernels, milliseconds of models, ratio and error."""
    from tritium.bench.results import Results

    for section in SECTIONS:
        for file in sorted(out.glob(f"{section}-*.json")):
            for row in Results.load(file).rows:
                ratio = "" if row.ratio is None else f"{row.ratio:.3f}x"
                time_ = (
                    f"{row.median_ms:9.3f} ms"
                    if section in ("models", "pipeline")
                    else f"{row.median_ms * 1e3:9.1f} us"
                )
                bar = f"  bar {BARS[row.workload]}" if row.workload in BARS and row.variant == "tritium fp8" else ""
                remark = f"  [{row.remark}]" if row.remark and section in ("models", "attention") else ""
                print(f"{row.workload:32} {row.variant:44} {time_} {ratio:>8}  L2 {row.relative_l2:.2e}{bar}{remark}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--limit", type=float, default=570.0, help="seconds of this call")
    parser.add_argument("--only", default=",".join(SECTIONS), help="sections, or parts such as models:wan")
    parser.add_argument("--path", action="append", default=[], help="a folder with packages, as often as needed")
    parser.add_argument("--jobs", type=int, default=max(1, min(12, (os.cpu_count() or 2) - 2)))
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parsed = parser.parse_args(arguments)
    parsed.out.mkdir(parents=True, exist_ok=True)
    if parsed.child:
        section, _, part = parsed.child.partition(":")
        try:
            return measure(Job(section, part), parsed.out)
        except Exception:  # noqa: BLE001 - the log of the process has the traceback
            traceback.print_exc()
            return FAILED
    sections = parsed.only.split(",")
    unknown = [name for name in sections if name.partition(":")[0] not in SECTIONS]
    if unknown:
        parser.error(f"no section {', '.join(unknown)}; sections: {', '.join(SECTIONS)}")
    return session(parsed.out, parsed.limit, sections, parsed.path, parsed.jobs)


if __name__ == "__main__":
    sys.exit(main())
