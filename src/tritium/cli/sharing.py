"""`tritium doctor --sharing`: the keepers of this user, and where the weights of their users and of a pipeline are."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tritium import example
from tritium.bench import generation
from tritium.cli.check import Check
from tritium.sharing import attach
from tritium.sharing.placement import Placement, placements


def checks(pipeline: str | None) -> list[Check]:
    """Return a check for each keeper and each of its users; with a pipeline, also for each of its models on a CPU."""
    found = [check for name, status in attach.statuses() for check in _of_keeper(name, status)]
    found = found or [Check("keepers", "ok", "none is running; start one with `tritium keep PIPELINE --name NAME`")]
    if pipeline is not None:
        generation.check_model(pipeline)
        folder = example.WEIGHTS if pipeline == generation.EXAMPLE else Path(pipeline)
        pipe = generation.load(pipeline, "cpu")
        found += [of_component(placement, pipeline) for placement in placements(pipe, folder)]
    return found


def _of_keeper(name: str, status: dict[str, Any]) -> Iterator[Check]:
    users = {int(number): processes for number, processes in status["users"].items()}
    count = sum(map(len, users.values()))
    where = f"{_size(status['bytes'])} on {status['device'].partition(':')[0]}, " if status["device"] else ""
    detail = f"{status['state']}, {where}generation {status['generation']}, process {status['process']}, {count} users"
    yield Check(f"keeper {name}", "ok", detail)
    for number, processes in users.items():
        for process in processes:
            yield _of_user(name, process, number, status)


def _of_user(name: str, process: int, generation_: int, status: dict[str, Any]) -> Check:
    label = f"user {process} of {name}"
    if generation_ != status["generation"]:
        detail = f"it has generation {generation_} of the weights, and both are in memory"
        return Check(label, "warn", detail, "let it attach again")
    if status["device"] != "cpu":
        return Check(label, "ok", "it maps the weights on the GPU")
    pages = {component: entry for (keeper, component), entry in attach.pages_of(process).items() if keeper == name}
    described = ", ".join(f"{component} {_size(size)}" for component, (size, _) in pages.items())
    copied = {component: own for component, (_, own) in pages.items() if own}
    check = Check(
        label,
        "warn",
        f"it maps {described}; it has written into {', '.join(f'{n} ({_size(b)})' for n, b in copied.items())}: those pages are its own",
        "write into weights in the keeper, before it is ready",
    )
    return check.unless(not copied, f"it maps {described}" if pages else "it has copied all weights")


def of_component(placement: Placement, pipeline: str) -> Check:
    """Return whether processes that load a component share its memory, and what to do if they do not."""
    label, keep = f"{placement.component} of {pipeline}", f"`tritium keep {pipeline}`"
    if placement.is_cast:
        detail = f"cast: {placement.stored} in its files, {placement.dtype} in memory, so each process has {_size(placement.private)}"
        return Check(label, "warn", detail, f"save the pipeline in {placement.dtype}, or share it by {keep}")
    detail = f"private: each process that loads it has {_size(placement.private)}"
    total = placement.mapped + placement.private
    return Check(label, "warn", detail, f"share it by {keep}").unless(
        placement.private <= 0.05 * total, f"mapped from its files: processes share {_size(placement.mapped)}"
    )


def _size(size: int) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"
