"""Tables from the committed files in benchmarks/results: the README's gains, and those of the documentation.

A row of a table needs its file: without it, the row is left out, and it appears with the next run of docs/generate.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tritium.bench.results import Row

ROOT = Path(__file__).parent.parent
NOTHING = "No results have been committed yet.\n"

# Files of suites: their tables have another form.
SUITES = ("-families", "-pipeline", "-compile-time", "-host", "-quantize", "-skip", "-loss")
KERNELS = "-dynamic-kernels"

DEFAULTS = "(a denoiser as one program, automatic static graphs, owned kernels launched by generated code)"
DEFAULTS_SINCE = "2026-11-18T20:00:00+00:00"


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows]) + "\n"


def results() -> Path:
    return ROOT / "benchmarks" / "results"


@dataclass(frozen=True)
class Gain:
    """One line of the README's table: two variants of a workload, or two fields of one row."""

    label: str
    file: str
    workload: str
    before: str = "inductor"
    after: str = "tritium"
    fields: tuple[str, str] = ("median_ms", "median_ms")

    def seconds(self) -> tuple[float, float, str] | None:
        """Return the time before and after and the date of the measurement, or None without a committed result."""
        path = results() / self.file
        if not path.is_file():
            return None
        file = json.loads(path.read_text(encoding="utf-8"))
        rows = {row["variant"]: row for row in file["rows"] if row["workload"] == self.workload}
        if not {self.before, self.after} <= set(rows):
            return None
        times = [rows[side][field] for side, field in zip((self.before, self.after), self.fields, strict=True)]
        if None in times:
            return None
        before, after = (
            time / (1e3 if field.endswith("_ms") else 1) for time, field in zip(times, self.fields, strict=True)
        )
        return before, after, file["date"]


GAINS = (
    *(
        Gain(f"FLUX-shaped pipeline, an image of {size} x {size}", "h200-pipeline.json", name, after="tritium optimize")
        for size, name in ((512, "flux pipeline 512"), (1024, "flux pipeline 1024"))
    ),
    Gain("VAE decode, 1024 x 1024, one size", "h200-kl-decode.json", "kl-decode"),
    Gain("VAE decode, 1024 x 1024, compiled for any size", "h200-kl-decode.json", "kl-decode dynamic"),
    Gain("video VAE decode (Wan), 17 frames of 544 x 960", "h200-wan-decode.json", "wan-decode"),
    Gain(
        "FLUX denoiser with 12 blocks, 1024 x 1024, linears in float8 (lossy)",
        "h200-quantize.json",
        "flux",
        after="tritium fp8",
    ),
    Gain("small denoiser (PixArt, 512 x 512)", "h200-families.json", "pixart-512", after="tritium optimize"),
    Gain(
        "first image of a new process, with a file of compiled code",
        "h200-example-float32.json",
        "example",
        before="tritium",
        fields=("cold_start_s", "restart_s"),
    ),
)


def gains() -> str:
    """The README's table: what a user gains, as far as results are committed."""
    rows, old, new = [], [], []
    for gain in GAINS:
        times = gain.seconds()
        if times is not None:
            before, after, date = times
            (old if date < DEFAULTS_SINCE else new).append(gain.label)
            rows.append([gain.label, duration(before), duration(after), f"**{before / after:.2f}x**"])
    if not rows:
        return NOTHING
    text = table(["on an NVIDIA H200", "before", "after", "ratio"], rows)
    if old:
        which = "All rows were" if not new else "These rows were"
        names = "" if not new else f": {'; '.join(old)}"
        text += f"\n{which} measured before the current defaults {DEFAULTS}, and not again since{names}.\n"
    return text


def duration(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def measured() -> str:
    """Every committed ratio of a model against torch.compile."""
    rows = []
    for path in sorted(results().glob("*.json")):
        if path.stem.endswith((*SUITES, KERNELS)):
            continue
        file = json.loads(path.read_text(encoding="utf-8"))
        # Functions are compared with something else than torch.compile, which their notes name: ratios of that are not 1.
        yardsticks = [row for row in file["rows"] if row["variant"] == "inductor" and row["ratio"] == 1]
        first_call = {row["workload"]: row["first_call_s"] for row in yardsticks}
        for row in file["rows"]:
            if row["variant"] != "tritium" or row["workload"] not in first_call:
                continue
            caches = "" if row["first_call_cold"] else ", warm caches"
            rows.append(
                [
                    file["device"]["name"],
                    row["workload"] + (" (shrunk)" if row["shrunk"] else ""),
                    row["dtype"],
                    f"{row['median_ms']:.2f} ms",
                    f"{row['ratio']:.2f}",
                    f"{row['first_call_s']:.1f} s ({first_call[row['workload']]:.1f} s){caches}",
                    f"`{path.name}`",
                ]
            )
    if not rows:
        return NOTHING
    return table(["device", "workload", "dtype", "median", "ratio", "first call (torch.compile's)", "file"], rows)


def of_suite(suite: str, text: Callable[[tuple[Row, ...]], str]) -> str:
    """Each device's file of a suite, under the device's name."""
    from tritium.bench.results import Results

    parts = []
    for path in sorted(results().glob(f"*{suite}.json")):
        file = Results.load(path)
        versions = f"torch {file.versions['torch']}, {file.rows[0].dtype}"
        if body := text(file.rows):
            parts.append(f"{file.device['name']}, {versions} (`{path.name}`):\n\n{body}")
    return "\n".join(parts) or NOTHING


def dynamic_kernels() -> str:
    """Single regions with dynamic sizes: both sides, and Tritium against torch.compile with static sizes."""
    from tritium.bench import summary

    def text(rows: tuple[Row, ...]) -> str:
        lines = []
        for workload, sides in summary.by_workload(rows).items():
            theirs, ours = sides["inductor"], sides["tritium"]
            name = workload.removeprefix("kernel ").removesuffix(" dynamic")
            times = [f"{side.median_ms:.3f} ms" for side in (theirs, ours)]
            lines.append([name, ours.note, *times, f"{ours.ratio:.2f}", f"{ours.against_static:.2f}"])
        return table(["region", "sizes", "torch.compile", "Tritium", "ratio", "of static"], lines)

    return of_suite(KERNELS, text)


def families_summary() -> str:
    """The worst, the median and the best of the families."""
    from tritium.bench import summary

    header = ["", "over `torch.compile`", "over eager"]
    return of_suite("-families", lambda rows: table(header, summary.families_summary(rows)))


def families() -> str:
    from tritium.bench import summary

    return of_suite("-families", lambda rows: table(summary.FAMILIES_HEADER, summary.families_table(rows)))


# Denoisers with few blocks whose linears were quantized.
QUANTIZED = ("flux", "qwen-image", "wan")
# The columns, and the variants of `benchmarks/quantize_session.py`.
COLUMNS = {
    "`torch.compile`": "inductor",
    "Tritium": "tritium",
    "fp8": "tritium fp8",
    "int8": "tritium int8",
    "fp8, attention in int8": 'tritium {"linear": "fp8", "attention": "int8"}',
}


def quantized() -> str:
    """Milliseconds of a call of denoisers in 16 bits and quantized, and the ratio over torch.compile."""

    def text(rows: tuple[Row, ...]) -> str:
        lines = []
        for name in QUANTIZED:
            known = {row.variant: row for row in rows if row.workload == name}
            if "inductor" in known:
                shown = [known.get(variant) for variant in COLUMNS.values()]
                cells = ["-" if row is None else f"{row.median_ms:.1f} ms ({row.ratio:.2f}x)" for row in shown]
                lines.append([f"{name}, {known['inductor'].note}", *cells])
        return table(["denoiser", *COLUMNS], lines) if lines else ""

    return of_suite("-quantize", text)


# What the variants of the pipeline are called in pages.
LONG_VARIANTS = {
    "inductor": "`compile_repeated_blocks`, `torch.compile` of the decoder",
    "tritium optimize": "`tritium.optimize(pipe)`",
    "tritium fp8": '`Plan(quantize="fp8")`',
    "tritium skip": "`Plan(skip=Skip.window(steps=28, runs=14))`",
    "tritium fp8 skip": "both",
}


def long_pipeline() -> str:
    """Milliseconds of an image in 28 steps: as it comes, quantized, with skipped steps, and with both."""

    def text(rows: tuple[Row, ...]) -> str:
        known = {row.variant: row for row in rows if row.workload == "flux pipeline 1024, 28 steps"}
        lines = [
            [words, f"{known[name].median_ms:,.0f} ms", f"{known[name].ratio:.2f}", f"{known[name].relative_l2:.1e}"]
            for name, words in LONG_VARIANTS.items()
            if name in known
        ]
        header = ["19 + 38 blocks, 1024 x 1024, 28 steps", "an image", "over `torch.compile`", "difference of images"]
        return table(header, lines) if lines else ""

    return of_suite("-quantize", text)


# The same in the README, where a line says what a way does.
FRONT_VARIANTS = {
    "inductor": "`torch.compile` of the blocks and the decoder, as diffusers documents it",
    "tritium optimize": "`tritium.optimize(pipe)`: fused kernels, static graphs where they help",
    "tritium fp8": '`Plan(quantize="fp8")`: linears in float8',
    "tritium skip": "`Plan(skip=Skip.window(steps=28, runs=14))`: every second step forecast",
    "tritium fp8 skip": "both",
}


def front() -> str:
    """The FLUX-shaped pipeline in 28 steps, with the loss of the same settings on the example pipeline."""
    path, losses = results() / "h200-quantize.json", results() / "cpu-2-cores-loss.json"
    if not path.is_file() or not losses.is_file():
        return NOTHING
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    known = {row["variant"]: row for row in rows if row["workload"] == "flux pipeline 1024, 28 steps"}
    lost = {row["variant"]: row for row in json.loads(losses.read_text(encoding="utf-8"))["rows"]}
    lines = [
        [words, f"{known[name]['median_ms']:,.0f} ms", f"**{known[name]['ratio']:.2f}x**", decibels(lost.get(name))]
        for name, words in FRONT_VARIANTS.items()
        if name in known
    ]
    return table(["19 + 38 blocks, 1024 x 1024, 28 steps", "an image", "speed-up", "median and worst PSNR"], lines)


def decibels(row: dict[str, Any] | None) -> str:
    """Return the loss of a row; images that are equal without generated code differ by the order of sums with it."""
    if row is None or row["psnr_median"] is None:
        return "" if row is None else "no loss but the order of sums"
    return f"{row['psnr_median']:.1f} and {row['psnr_worst']:.1f} dB"


# Sides of a kernel that writes 8-bit rows.
PRODUCER_SIDES = ("16 bits", "16 bits Inductor", "8 bits Inductor", "8 bits Triton")


def producers() -> str:
    """Microseconds of kernels that write 8-bit rows, and of those that write 16 bits."""

    def text(rows: tuple[Row, ...]) -> str:
        lines = []
        for name in dict.fromkeys(row.workload for row in rows):
            known = {row.variant: row for row in rows if row.workload == name}
            if "8 bits Triton" in known and len(name.split()) < 4:
                times = [known.get(side) for side in PRODUCER_SIDES]
                cells = ["-" if row is None else f"{row.median_ms * 1e3:.1f}" for row in times]
                lines.append([name.replace("_e4m3fn", ""), known["8 bits Triton"].note, *cells])
        header = ["kernel", "rows", "16 bits", "16 bits, Inductor", "8 bits, Inductor", "8 bits, Tritium"]
        return table(header, sorted(lines)) if lines else ""

    return of_suite("-quantize", text)


def pipeline() -> str:
    from tritium.bench import summary

    return of_suite("-pipeline", lambda rows: table(summary.PIPELINE_HEADER, summary.pipeline_table(rows)))
