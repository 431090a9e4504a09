"""`tritium plan`: what stays on the device within a budget, and what that costs, without running anything."""

from __future__ import annotations

import json as json_format
from dataclasses import asdict
from typing import Annotated

import typer
from rich import box
from rich.table import Table

from tritium.bench import placement
from tritium.bench.placement import Placement
from tritium.cli.table import console
from tritium.errors import ConfigError
from tritium.techniques.memory.config import bytes_of, gigabytes
from tritium.techniques.memory.planning import cost, share_resident


def command(
    pipeline: Annotated[
        str, typer.Argument(metavar="PIPELINE", help="A diffusers folder, 'example', or a model: flux, wan, ...")
    ],
    *,
    vram: Annotated[str, typer.Option("--vram", metavar="BYTES", help="The budget: 16GB, 14.5GiB, or fit.")],
    size: Annotated[
        str | None, typer.Option(metavar="WxH", help="Pixels of an image; the model's own if left out.")
    ] = None,
    link: Annotated[
        str | None, typer.Option(metavar="BYTES", help="Bytes a second from the host to the device, such as 25GB.")
    ] = None,
    tflops: Annotated[float | None, typer.Option(help="10^12 operations a second of the denoiser.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
) -> None:
    """Print which blocks of a denoiser stay on the device within a budget, and what a step then takes. Nothing runs."""
    if tflops is not None and tflops <= 0:
        raise ConfigError(f"--tflops cannot be {tflops:g}; give a number above 0")
    found = placement.plan(pipeline, vram, size, bytes_of(link) if link else None, tflops * 1e12 if tflops else None)
    if json:
        print(json_format.dumps(_data(found), indent=2))
        return
    _show(found)


def _data(found: Placement) -> dict[str, object]:
    schedule, machine = found.schedule, found.machine
    return {
        "budget": found.budget,
        "denoiser": found.demand.name,
        "size": found.size,
        "blocks": [
            {**asdict(block), "resident": place in schedule.resident} for place, block in enumerate(schedule.blocks)
        ],
        "slots": schedule.slots,
        "rest": found.demand.rest,
        "activations": found.demand.reserve,
        "step_ms": schedule.step_ms,
        "resident_step_ms": schedule.compute_ms,
        "needed_share": schedule.needed_share,
        "others": found.others,
        "link": machine.link,
        "operations_a_second": machine.flops,
    }


def _show(found: Placement) -> None:
    schedule, demand = found.schedule, found.demand
    table = Table(title=f"{demand.name}, {found.size}, in {gigabytes(found.budget)}", box=box.SIMPLE_HEAD)
    for name in ("what", "count", "each", "ms each", "resident", "streamed", "on the device"):
        table.add_column(name, justify="left" if name == "what" else "right", no_wrap=True)
    for kind, places in found.kinds.items():
        block = schedule.blocks[places[0]]
        kept = sum(place in schedule.resident for place in places)
        cells = (
            gigabytes(block.size),
            f"{block.ms:.2f}",
            str(kept),
            str(len(places) - kept),
            gigabytes(kept * block.size),
        )
        table.add_row(kind, str(len(places)), *cells)
    table.add_row("outside of blocks", "", "", f"{demand.other_ms:.2f}", "all", "", gigabytes(demand.rest))
    slots = min(schedule.slots, len(schedule.streamed))
    table.add_row("slots", str(slots), gigabytes(schedule.slot_size), "", "", "", gigabytes(slots * schedule.slot_size))
    table.add_row("activations", "", "", "", "", "", gigabytes(demand.reserve))
    table.add_section()
    total = schedule.size + demand.rest + demand.reserve
    share = f"{share_resident(schedule.blocks, schedule.resident):.0%}"
    table.add_row("all", "", gigabytes(demand.weights), f"{schedule.compute_ms:.1f}", share, "", gigabytes(total))
    console().print(table)
    for name, size in found.others.items():
        print(
            f"{name}: {gigabytes(size)}, takes its turn in the same memory: {size / found.machine.rate:.0f} ms an image"
        )
    constant, slope = found.line
    print(f"activations, from two sizes: {gigabytes(constant)} and {gigabytes(slope)} a token, and a margin")
    machine = found.machine
    print(
        f"nothing was run: times are operations at {machine.flops / 1e12:.0f} TFLOP/s, and the link has {machine}; "
        "--tflops and --link set those of your machine"
    )
    print(cost(demand.name, schedule, found.budget, machine))
