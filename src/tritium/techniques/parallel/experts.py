"""Split the experts of routed mixtures between ranks.

All ranks of the axis have the same tokens. A rank computes the choices of the experts that it holds, and the results are
added up over the ranks. An expert may have copies on several ranks, which share its tokens. The loads are counted on the
device; between images, experts may move to other ranks.

Until it is undone, the weights of other ranks' experts are on the meta device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from tritium import compat
from tritium.errors import PipelineError
from tritium.layers import experts as layers
from tritium.techniques.experts.mixture import Grouped, Routed, find, group, stack, ungroup
from tritium.techniques.parallel.mesh import Axis
from tritium.techniques.parallel.placement import Placement, device_loads, plan_placement
from tritium.techniques.skip.clock import Clock
from tritium.techniques.technique import Part

# The buffers of a split mixture. Weights are [slots, N, K]. By expert: the number of copies, the number of this rank's copy
# or -1, its slot, and the tokens that chose it.
_WEIGHTS = ("split_gate", "split_up", "split_down")
_TABLES = ("split_copies", "split_copy", "split_slot", "split_loads")


def apply(part: Part, axis: Axis) -> Split:
    """Keep this rank's share of a part's experts; return the function that gathers them again."""
    split = Split(part, axis)
    try:
        split.begin()
    except BaseException:
        split()
        raise
    part.around(split.around)
    part.compile_with(apart=("split experts", axis.size, axis.rank))
    return split


def why_not(module: nn.Module) -> str | None:
    """Return why the experts of a denoiser cannot be split between ranks, or None."""
    mixtures = list(find(module))
    if not mixtures:
        return "it has no routed experts"
    for routed in mixtures:
        experts = [getattr(expert, name) for name in routed.names for expert in routed.module.experts]
        if not all(compat.modules.is_plain(linear, nn.Linear) for linear in experts):
            return f"the linears of {routed.path} have adapters, hooks or stored bytes; add them to a model that is not split"
    return None


def mix(module: Any, x: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the sum over the experts of each token, from the experts of all ranks."""
    places, counts = layers.ranked(indices, len(module.split_loads))
    module.split_loads.add_(counts)
    # The copies of an expert take turns.
    is_mine = places % module.split_copies[indices] == module.split_copy[indices]
    own = torch.where(is_mine, module.split_slot[indices], -1)
    sides = (getattr(module, name) for name in _WEIGHTS)
    return compat.collectives.all_reduce(layers.routed_swiglu(x, own, weights, *sides), module.split_group)


class _Mixture:
    """One mixture that is split: its placement, and this rank's weights."""

    def __init__(self, routed: Routed, axis: Axis) -> None:
        self.routed, self.axis = routed, axis
        self.module: Any = routed.module
        self.count = len(self.module.experts)
        self.slots = min(self.count, self.module.slots or -(-self.count // axis.size))
        # The whole weights' parameters, which are put back.
        self._parameters: list[tuple[nn.Linear, nn.Parameter]] = []
        self.is_split = False
        self.placement: Placement = plan_placement([1.0] * self.count, axis.size, self.slots)

    @torch.inference_mode(mode=False)
    @torch.no_grad()
    def split(self) -> None:
        """Keep the weights of this rank's experts."""
        self.is_split = True
        mine = self.placement[self.axis.rank]
        for name, side in zip(_WEIGHTS, self.routed.linears, strict=True):
            weight = side[0].weight
            kept = weight.new_zeros(self.slots, *weight.shape)
            for slot, expert in enumerate(mine):
                kept[slot].copy_(side[expert].weight)
            self.module.register_buffer(name, kept, persistent=False)
            self._parameters += [(linear, cast("nn.Parameter", linear.weight)) for linear in side]
        where = self.module.split_gate.device
        for name in _TABLES:
            self.module.register_buffer(
                name, torch.zeros(self.count, dtype=torch.int64, device=where), persistent=False
            )
        self.module.__dict__.update(mix=mix, split_group=compat.collectives.name_of(self.axis.group))
        self._point()

    def _point(self) -> None:
        """Write the tables of the placement, and let the linears of this rank's experts have the slots' weights."""
        mine = self.placement[self.axis.rank]
        holders = [[rank for rank, held in enumerate(self.placement) if expert in held] for expert in range(self.count)]
        rank = self.axis.rank
        rows = {
            "split_copies": [len(ranks) for ranks in holders],
            "split_copy": [ranks.index(rank) if rank in ranks else -1 for ranks in holders],
            "split_slot": [mine.index(expert) if expert in mine else 0 for expert in range(self.count)],
        }
        for name, row in rows.items():
            getattr(self.module, name).copy_(torch.tensor(row))
        slices = {
            id(linear): getattr(self.module, name)[slot]
            for name, side in zip(_WEIGHTS, self.routed.linears, strict=True)
            for slot, linear in enumerate(side[expert] for expert in mine)
        }
        for linear, parameter in self._parameters:
            kept = slices.get(id(linear))
            # An empty tensor frees the memory.
            parameter.data = parameter.new_empty(0) if kept is None else kept
            linear.weight = parameter if kept is not None else self._absent(parameter, linear)

    def _absent(self, parameter: nn.Parameter, linear: nn.Linear) -> nn.Parameter:
        shape = (linear.out_features, linear.in_features)
        return nn.Parameter(torch.empty(shape, dtype=parameter.dtype, device="meta"), requires_grad=False)

    def changed(self) -> str | None:
        """Return which linear is not as it was left, or None."""
        mine = self.placement[self.axis.rank]
        for name, side in zip(_WEIGHTS, self.routed.linears, strict=True):
            kept = getattr(self.module, name)
            memory = compat.tensors.storage_id(kept)
            for slot, expert in enumerate(mine):
                weight, start = side[expert].weight, kept.storage_offset() + slot * kept.stride(0)
                if compat.tensors.storage_id(weight) != memory or weight.storage_offset() != start:
                    return f"{self.routed.path}.experts.{expert}"
        names = self.routed.names
        for number, expert in enumerate(self.module.experts):
            if not all(compat.modules.is_plain(getattr(expert, name), nn.Linear) for name in names):
                return f"{self.routed.path}.experts.{number}"
        return None

    @torch.inference_mode(mode=False)
    @torch.no_grad()
    def move(self, placement: Placement) -> int:
        """Send experts to the ranks of another placement; return the number of weights that were sent."""
        before, rank = self.placement, self.axis.rank
        moved = [
            expert
            for expert in range(self.count)
            if any(expert in new and expert not in old for old, new in zip(before, placement, strict=True))
        ]
        self.placement = placement
        for name in _WEIGHTS:
            kept = getattr(self.module, name)
            new = {expert: kept[before[rank].index(expert)].clone() for expert in before[rank]}
            for expert in moved:
                owner = next(place for place, held in enumerate(before) if expert in held)
                weight = new[expert] if expert in new else torch.empty_like(kept[0])
                self._broadcast(weight, owner)
                new[expert] = weight
            for slot, expert in enumerate(placement[rank]):
                kept[slot].copy_(new[expert])
        self._point()
        return len(moved)

    def _broadcast(self, tensor: torch.Tensor, owner: int) -> None:
        dist.broadcast(tensor, dist.get_global_rank(self.axis.group, owner), group=self.axis.group)

    @torch.inference_mode(mode=False)
    @torch.no_grad()
    def join(self) -> None:
        """Gather all weights, and forward as one rank does."""
        if not self.is_split:
            return
        self.is_split = False
        mine = self.placement[self.axis.rank]
        parameters = iter(self._parameters)
        for name, side in zip(_WEIGHTS, self.routed.linears, strict=True):
            kept = getattr(self.module, name)
            for expert in range(len(side)):
                owner = next(place for place, held in enumerate(self.placement) if expert in held)
                weight = kept[mine.index(expert)].clone() if expert in mine else torch.empty_like(kept[0])
                self._broadcast(weight, owner)
                linear, parameter = next(parameters)
                parameter.data = weight
                linear.weight = parameter
        self._parameters.clear()
        for name in (*_WEIGHTS, *_TABLES):
            delattr(self.module, name)
        self.module.__dict__.update(mix=None)
        del self.module.__dict__["split_group"]
        stack(self.module, self.routed.names)


class Split:
    """The experts of a part on the ranks of an axis; call it to gather them."""

    def __init__(self, part: Part, axis: Axis) -> None:
        self._part, self._axis = part, axis
        self._mixtures: list[_Mixture] = []
        # Mixtures that are grouped for ranks alone.
        self._grouped: list[Routed] = []
        self._clock = Clock(lambda: part.schedulers)
        self._image: Any = None
        self.moved = 0

    def begin(self) -> None:
        mixtures = list(find(self._part.module))
        for routed in mixtures:
            if not isinstance(routed.module, Grouped):
                reason = group(routed)
                if reason is not None:
                    raise PipelineError(f"the experts of {routed.path} cannot be split between ranks: {reason}")
                self._grouped.append(routed)
        for routed in mixtures:
            self._mixtures.append(_Mixture(routed, self._axis))
            self._mixtures[-1].split()

    def __call__(self) -> None:
        """Gather the weights of all ranks."""
        for mixture in self._mixtures:
            mixture.join()
        self._mixtures.clear()
        while self._grouped:
            ungroup(self._grouped.pop())

    def around(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Move experts before the first step of an image, by the loads of the last one."""
        for mixture in self._mixtures:
            if (changed := mixture.changed()) is not None:
                raise PipelineError(
                    f"{changed} was changed while its weights are split over ranks; call remove() on the handle, change "
                    "it, and optimize again"
                )
        moment = self._clock.now()
        if not isinstance(moment, str) and moment.image is not self._image:
            if self._image is not None:
                self.rebalance()
            self._image = moment.image
        return call(*args, **kwargs)

    def loads(self) -> list[list[int]]:
        """Return the tokens that chose each expert of each mixture since the last image began."""
        return [mixture.module.split_loads.tolist() for mixture in self._mixtures]

    def rebalance(self) -> None:
        """Plan placements by the loads of this image, and move experts; count the next image's loads from zero."""
        for mixture, loads in zip(self._mixtures, self.loads(), strict=True):
            moves = mixture.module.moves
            if moves != 0 and any(loads):
                current = mixture.placement
                placement = plan_placement(loads, self._axis.size, mixture.slots, current, moves)
                if placement != current:
                    self.moved += mixture.move(placement)
            mixture.module.split_loads.zero_()

    def imbalance(self) -> float | None:
        """Return the largest load of a rank divided by the mean load, over all mixtures; None before a call."""
        largest = mean = 0.0
        for mixture, loads in zip(self._mixtures, self.loads(), strict=True):
            by_rank = device_loads(loads, mixture.placement)
            largest += max(by_rank)
            mean += sum(by_rank) / len(by_rank)
        return largest / mean if mean else None

    def note(self) -> str:
        if not self._mixtures:
            return ""
        first, imbalance = self._mixtures[0], self.imbalance()
        words = f"{first.slots} of {first.count} experts on each of {self._axis.size} ranks"
        if imbalance is not None:
            words += f", the busiest rank has {imbalance:.2f} times the mean load"
        return words + (f", {self.moved} experts moved" if self.moved else "")
