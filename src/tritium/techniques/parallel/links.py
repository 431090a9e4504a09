"""Measure what the cost model of the mesh needs: bandwidth and latency of a collective, and the rate of products."""

from __future__ import annotations

import functools
import time

import torch
import torch.distributed as dist

from tritium import device, measure
from tritium.techniques.parallel.cost import Rates

# Bytes that a rank exchanges in two collectives. The difference of their times has no launch in it.
_SIZES = (1 << 16, 1 << 23)
_RUNS = 5

# Attention reaches this share of the rate of linears.
_ATTENTION = 6 / 7

# The share of a GPU's memory for weights and activations; the allocator and libraries have the rest.
_USABLE = 0.94


def rates(where: torch.device) -> Rates:
    """Return the rates of this world, the same on all ranks; it takes about 20 ms on GPUs. All ranks must call it."""
    return _rates(where, dist.group.WORLD)


# The key is the world: a process may destroy its group and start another.
@functools.cache
def _rates(where: torch.device, _world: object) -> Rates:
    bandwidth, latency = _link(where)
    flops = _flops(where)
    memory = device.total_memory(where)
    usable = None if memory is None else int(memory * _USABLE)
    mine = [bandwidth, latency, flops, float(usable or 0)]
    # The slowest rank and the smallest memory decide, so that all ranks choose alike.
    by_rank: list[list[float]] = [mine] * dist.get_world_size()
    dist.all_gather_object(by_rank, mine)
    bandwidth, flops = (min(rank[place] for rank in by_rank) for place in (0, 2))
    smallest = int(min(rank[3] for rank in by_rank))
    return Rates(
        linear=flops,
        attention=flops * _ATTENTION,
        bandwidth=bandwidth,
        latency=max(rank[1] for rank in by_rank),
        memory=smallest or None,
        source="measured",
    )


def _link(where: torch.device) -> tuple[float, float]:
    """Return bytes a second and seconds to start of an all-to-all over all ranks."""
    world = dist.get_world_size()
    seconds = [_all_to_all(size, where) for size in _SIZES]
    moved = [size * (world - 1) / world for size in _SIZES]
    bandwidth = (moved[1] - moved[0]) / max(seconds[1] - seconds[0], 1e-9)
    return bandwidth, max(1e-6, seconds[0] - moved[0] / bandwidth)


def _all_to_all(size: int, where: torch.device) -> float:
    world = dist.get_world_size()
    source = torch.zeros(-(-size // world) * world, dtype=torch.uint8, device=where)
    target = torch.empty_like(source)
    taken = []
    for _ in range(_RUNS):
        device.synchronize(where.type)
        dist.barrier()
        start = time.perf_counter()
        dist.all_to_all_single(target, source)
        device.synchronize(where.type)
        taken.append(time.perf_counter() - start)
    # The first one connects the ranks.
    return min(taken[1:])


def _flops(where: torch.device) -> float:
    """Return operations a second of denoisers: of a table, or of a large product."""
    listed = device.RATES.get(device.describe(where.type).name)
    if listed is not None:
        return listed[1]
    return measure.product_rate(where.type, torch.bfloat16 if where.type == "cuda" else torch.float32)
