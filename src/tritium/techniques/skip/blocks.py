"""The repeated blocks of a denoiser, in the order in which they run."""

from __future__ import annotations

from torch import nn

from tritium import compat, models


def repeated_blocks(module: nn.Module) -> list[nn.Module]:
    """Return the outermost repeated blocks of a model; empty if it has none, as U-Nets."""
    family = models.family_of(type(module).__name__)
    classes = family.blocks if family is not None else compat.modules.repeated_blocks(module) or _largest_lists(module)
    found: list[nn.Module] = []

    def walk(current: nn.Module) -> None:
        for child in current.children():
            if type(child).__name__ in classes:
                found.append(child)
            else:
                walk(child)

    walk(module)
    return found


def _largest_lists(module: nn.Module) -> tuple[str, ...]:
    """Return the class of the blocks in the uniform list with most parameters, if it holds half of the model."""
    sizes: dict[str, int] = {}
    for inner in module.modules():
        if isinstance(inner, nn.ModuleList) and len({type(entry) for entry in inner}) == 1 and len(inner) > 1:
            name = type(inner[0]).__name__
            sizes[name] = sizes.get(name, 0) + sum(parameter.numel() for parameter in inner.parameters())
    largest = max(sizes, key=sizes.__getitem__, default=None)
    total = sum(parameter.numel() for parameter in module.parameters())
    return (largest,) if largest is not None and sizes[largest] >= total / 2 else ()


def why_no_ranges(module: nn.Module, count: int, end: int) -> str | None:
    """Return why a range of blocks that ends at `end` cannot be left out, or None."""
    if not count:
        return "its repeated blocks are not known; leave out B and A"
    if end > count:
        return f"it has {count} blocks, and the span ends at {end}"
    if compat.diffusers.group_offloads(module):
        return "its layers are moved to the device in groups, in a fixed order, and a range that is left out breaks it"
    return None
