"""Time steps of denoisers within budgets of device memory, against all weights on the device and group offloading.

    python benchmarks/memory.py --only flux --out h200-memory.json
    python benchmarks/memory.py --only offload --out h200-memory.json
    python benchmarks/memory.py --only wan --out h200-memory.json

`flux`: a FLUX-shaped pipeline, resident and at three budgets; `offload`: the same pipeline with diffusers' group offloading
on a stream; `wan`: Wan 14B at 81 frames of 480 x 832, resident and at 12 GB, with and without captures. Sections add to the
rows of the file. The last lines compare with the limits.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import tritium
from tritium import device, measure
from tritium.bench import flux_pipeline
from tritium.bench.models import MODELS, size_of
from tritium.bench.results import Results, Row
from tritium.bench.settings import Settings
from tritium.bench.workload import Normals
from tritium.measure import Timing
from tritium.techniques.memory.config import gigabytes
from tritium.techniques.memory.units import module_bytes

SECTIONS = ("flux", "offload", "wan")
BUDGETS = ("24GB", "16GB", "12GB")
GRAPHS = "with_compile"

# Steps of an image, and timed images.
STEPS, IMAGES = 8, 3

# The whole model: what is outside of the blocks would weigh more with fewer.
WAN_BLOCKS = 40


@dataclass(frozen=True)
class Sample:
    """What one way of running took a step, and what it allocated."""

    timing: Timing
    first_call_s: float
    # In the timed calls, and since the model was loaded, with compilation.
    peak: int
    peak_of_all: int
    result: torch.Tensor
    # The note of the technique, and the captures in use.
    plan: dict[str, Any]
    captures: int


def synchronized_ms(run: Callable[[], Any], where: str) -> float:
    device.synchronize(where)
    start = time.perf_counter()
    run()
    device.synchronize(where)
    return (time.perf_counter() - start) * 1e3


def forget_peak(where: str) -> None:
    if where == "cuda":
        torch.cuda.reset_peak_memory_stats()


def peak(where: str) -> int:
    return int(torch.cuda.max_memory_allocated()) if where == "cuda" else 0


def sample(run: Callable[[], torch.Tensor], steps: int, where: str, handle: Any = None, warm: int = 2) -> Sample:
    """Time images of some steps after `warm` others; the last one returns its result."""
    forget_peak(where)
    first = synchronized_ms(run, where) / 1e3
    for _ in range(warm - 1):
        run()
    device.synchronize(where)
    of_all = peak(where)
    forget_peak(where)
    times = [synchronized_ms(run, where) / steps for _ in range(IMAGES)]
    timed = peak(where)
    plan = next((part.techniques.get("memory", {}) for part in handle.components if part.calls), {}) if handle else {}
    captures = len(handle.captures) if handle else 0
    return Sample(Timing.of(times), first, timed, of_all, run(), plan, captures)


def row(workload: str, variant: str, note: str, settings: Settings, found: Sample, reference: torch.Tensor) -> Row:
    plan = dict(found.plan)
    for name in ("misses", "notes", "streamed"):
        plan.pop(name, None)
    plan["resident"] = len(plan["resident"]) if isinstance(plan.get("resident"), list) else plan.get("resident")
    return Row(
        workload=workload,
        variant=variant,
        mode=None,
        dtype=str(settings.dtype).removeprefix("torch."),
        shrunk=settings.small,
        note=note,
        shapes={},
        median_ms=found.timing.median_ms,
        lower_quartile_ms=found.timing.lower_quartile_ms,
        upper_quartile_ms=found.timing.upper_quartile_ms,
        samples=found.timing.samples,
        ratio=None,
        first_call_s=found.first_call_s,
        first_call_cold=False,
        peak_memory_bytes=found.peak,
        relative_l2=measure.relative_l2(found.result.float().cpu(), reference.float().cpu()),
        disturbed=None,
        remark=f"{found.captures} captures; peak with compilation {gigabytes(found.peak_of_all)}; {plan}",
    )


def tell(name: str, found: Sample, seconds: float) -> None:
    bound = found.plan.get("step_ms")
    simulated = f", simulated {bound:.1f} ms ({found.timing.median_ms / bound:.3f}x)" if bound else ""
    print(
        f"{name}: {found.timing.median_ms:.1f} ms a step{simulated}, peak {gigabytes(found.peak)} (compiling: "
        f"{gigabytes(found.peak_of_all)}), {found.captures} captures, first {found.first_call_s:.1f} s, all {seconds:.0f} s",
        flush=True,
    )
    for note in (*found.plan.get("notes", ()), *(f"missed {name}" for name in list(found.plan.get("misses", ()))[:3])):
        print(f"    {note}", flush=True)


@dataclass(frozen=True)
class Run:
    """The settings of this run, the chosen limits on the share of a small model, and the rows so far."""

    settings: Settings
    rows: list[Row]
    misses: list[str]
    out: Path | None = None

    @property
    def where(self) -> str:
        return self.settings.device_type

    def add(self, row: Row) -> None:
        """Keep a row, instead of an older one of its kind, and write the file: a run may be cut off."""
        self.rows[:] = [*(other for other in self.rows if other.key != row.key), row]
        if self.out:
            Results.now(self.rows, self.where).save(self.out)

    def limit(self, what: str, value: float, most: float) -> None:
        """Compare with a limit; on a CPU the figures mean nothing."""
        passed = value <= most
        print(f"{'pass' if passed else 'FAIL'}: {what}: {value:.3f} (at most {most:g})", flush=True)
        if not passed and not self.settings.small:
            self.misses.append(what)

    def budget(self, text: str, module: Any) -> str | int:
        """Return a budget; for a small model the same share of its weights, and space for its activations."""
        share = float(text.removesuffix("GB")) / 24
        return int(share * module_bytes(module)) + 2_500_000 if self.settings.small else text


def flux(run: Run) -> tuple[flux_pipeline.Scale, Any]:
    scale = flux_pipeline.SMALL if run.settings.small else flux_pipeline.FULL
    if run.settings.small:
        scale = replace(scale, transformer={**scale.transformer, "num_layers": 4, "num_single_layers": 8}, sizes=(32,))
    scale = replace(scale, steps=2 if run.settings.small else STEPS)
    start = time.perf_counter()
    pipe = flux_pipeline.build(scale, run.where, run.settings.dtype)
    size = gigabytes(module_bytes(pipe.transformer))
    print(f"built {size} of weights in {time.perf_counter() - start:.0f} s", flush=True)
    return scale, pipe


def image(scale: flux_pipeline.Scale, pipe: Any, run: Run, output: str = "latent") -> Callable[[], torch.Tensor]:
    normal, config = Normals(run.where, run.settings.dtype), pipe.transformer.config
    size = scale.sizes[0]
    arguments = {
        "prompt_embeds": normal(1, scale.text, config.joint_attention_dim),
        "pooled_prompt_embeds": normal(1, config.pooled_projection_dim),
        "num_inference_steps": scale.steps,
        "output_type": output,
    }
    return lambda: pipe(**arguments, height=size, width=size, generator=torch.Generator().manual_seed(0)).images


def measure_flux(run: Run, budgets: list[str]) -> None:
    scale, pipe = flux(run)
    draw, decoded = image(scale, pipe, run), image(scale, pipe, run, "pt")
    note = f"{scale.note}; {scale.sizes[0]} x {scale.sizes[0]} pixels, {scale.steps} steps of the denoiser"
    config = tritium.CompilationConfig(engine="eager" if run.settings.small else "inductor")
    common = {"components": {"vae": "eager"}, "progress": False, "config": config}
    found: dict[str, Sample] = {}
    for name in ("resident", *budgets):
        start = time.perf_counter()
        memory = {} if name == "resident" else {"memory": run.budget(name, pipe.transformer), "graphs": GRAPHS}
        if isinstance(memory.get("memory"), int):
            memory["memory"] = tritium.Memory(memory["memory"])
        with tritium.optimize(pipe, tritium.Plan(**common, **memory)) as handle:
            taken = time.perf_counter() - start
            found[name] = sample(draw, scale.steps, run.where, handle)
            tell(f"flux {name} (placed in {taken:.0f} s)", found[name], time.perf_counter() - start)
            forget_peak(run.where)
            ms = synchronized_ms(decoded, run.where)
            again = synchronized_ms(draw, run.where) / scale.steps
            print(
                f"    with a decode: {ms:.0f} ms, peak {gigabytes(peak(run.where))}; next step {again:.1f} ms, "
                f"{len(handle.captures)} captures"
            )
            if name == budgets[0]:
                print(f"    {handle}")
        run.add(row("memory flux", name, note, run.settings, found[name], found["resident"].result))
        release(run.where)
    for name, one in found.items():
        if name == "resident":
            continue
        budget = float(str(name).removesuffix("GB")) * 1e9
        run.limit(f"flux {name}: peak / budget", one.peak / budget, 1.0)
        run.limit(f"flux {name}: captures declined", float(one.captures == 0), 0.0)
        if name == BUDGETS[0]:
            run.limit(f"flux {name} / resident", one.timing.median_ms / found["resident"].timing.median_ms, 1.05)
        else:
            run.limit(f"flux {name} / simulated", one.timing.median_ms / one.plan["step_ms"], 1.1)
    equal = [torch.equal(found[name].result, found[budgets[0]].result) for name in budgets]
    print(f"equal latents at all budgets: {all(equal)}")


def measure_offload(run: Run, _budgets: list[str]) -> None:
    scale, pipe = flux(run)
    draw = image(scale, pipe, run)
    note = f"{scale.note}; {scale.sizes[0]} x {scale.sizes[0]} pixels, {scale.steps} steps of the denoiser"
    reference = draw()
    start = time.perf_counter()
    pipe.transformer.enable_group_offload(
        onload_device=torch.device(run.where),
        offload_device=torch.device("cpu"),
        offload_type="block_level",
        num_blocks_per_group=1,
        use_stream=run.where == "cuda",
        record_stream=run.where == "cuda",
    )
    release(run.where)
    taken = time.perf_counter() - start
    found = sample(draw, scale.steps, run.where, warm=1)
    tell(f"flux group offload (placed in {taken:.0f} s)", found, time.perf_counter() - start)
    run.add(row("memory flux", "diffusers group offload", note, run.settings, found, reference))
    for other in run.rows:
        if other.workload == "memory flux" and other.variant in BUDGETS[1:] and other.shrunk == run.settings.small:
            run.limit(f"flux {other.variant} / group offload", other.median_ms / found.timing.median_ms, 1.0)


def measure_wan(run: Run, _budgets: list[str]) -> None:
    model = MODELS["wan"]
    size = model.tiny if run.settings.small else size_of(model.workloads["wan"], model.published)
    size = replace(size, config={**size.config, "num_layers": WAN_BLOCKS})
    module = model.build(size.config, run.where, run.settings.dtype)
    arguments = model.arguments(module.config, size, Normals(run.where, run.settings.dtype))

    def step() -> torch.Tensor:
        with torch.inference_mode():
            result: torch.Tensor = module(**arguments)[0]
        return result

    config = tritium.CompilationConfig(engine="eager" if run.settings.small else "inductor")
    note = f"{WAN_BLOCKS} blocks of the 14B model, 81 frames of 480 x 832"
    found: dict[str, Sample] = {}
    # Without captures, what remains is the price of blocks compiled one by one, and of the copies.
    for name, graphs in {"resident": "off", "12GB": GRAPHS, "12GB, not captured": "off"}.items():
        start = time.perf_counter()
        budget = run.budget("12GB", module)
        memory: dict[str, Any] = {} if name == "resident" else {"memory": tritium.Memory(budget), "graphs": graphs}
        with tritium.optimize(module, tritium.Plan(progress=False, config=config, **memory)) as handle:
            taken = time.perf_counter() - start
            found[name] = sample(step, 1, run.where, handle, warm=2 if name == "resident" else 6)
            tell(f"wan {name} (placed in {taken:.0f} s)", found[name], time.perf_counter() - start)
        run.add(row("memory wan", name, note, run.settings, found[name], found["resident"].result))
        release(run.where)
    run.limit("wan 12GB: peak / budget", found["12GB"].peak / 12e9, 1.0)
    run.limit("wan 12GB / resident", found["12GB"].timing.median_ms / found["resident"].timing.median_ms, 1.03)
    run.limit("wan 12GB: captures declined", float(found["12GB"].captures == 0), 0.0)


def release(where: str) -> None:
    gc.collect()
    if where == "cuda":
        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=SECTIONS, action="append", help="Sections; all if left out.")
    parser.add_argument("--budget", action="append", metavar="BYTES", help="Budgets of `flux`; 24GB, 16GB and 12GB.")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    where = device.default()
    before = Results.load(given.out).rows if given.out and given.out.is_file() else ()
    run = Run(Settings(seconds=1.0, device_type=where), list(before), [], given.out)
    if where == "cuda":
        print(f"link: {measure.link_rate(torch.device(where, 0)) / 1e9:.1f} GB/s", flush=True)
    measures = {"flux": measure_flux, "offload": measure_offload, "wan": measure_wan}
    for section in given.only or SECTIONS:
        start = time.perf_counter()
        measures[section](run, given.budget or list(BUDGETS))
        release(where)
        print(f"{section}: {time.perf_counter() - start:.0f} s", flush=True)
    if run.misses:
        raise SystemExit(f"missed: {', '.join(run.misses)}")


if __name__ == "__main__":
    main()
