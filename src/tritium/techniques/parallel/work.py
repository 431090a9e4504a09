"""Count the work of one call of a denoiser for the cost model, on tensors without memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from tritium import compat
from tritium.errors import PipelineError, brief
from tritium.techniques.experts.mixture import find
from tritium.techniques.memory.estimate import Live, fake_arguments
from tritium.techniques.memory.units import module_bytes
from tritium.techniques.parallel.cost import Work


class _Counted(Live):
    """Also count the operations of attention, and keep the shapes of its queries and keys."""

    def __init__(self) -> None:
        super().__init__(counts_flops=True)
        self.attention = 0
        self.shapes: Counter[tuple[tuple[int, ...], int]] = Counter()
        self.element = 2

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        before = self.flops
        result = super().__torch_dispatch__(func, types, args, kwargs)
        name = func.overloadpacket.__name__
        if name.startswith("_scaled_dot_product"):
            self.attention += self.flops - before
            self.element = args[0].element_size()
            self.shapes[tuple(args[0].shape), args[1].shape[2]] += 1
        return result


def work_of(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    branches: int,
    others: int = 0,
    mode: Any = None,
) -> Work:
    """Return the work of a call; `branches` are those of guidance, `others` the bytes of other components.

    A call with as many rows as branches, or a multiple, has all branches in one batch. `mode` is the fake mode in which
    the module was built, if it is fake itself.
    """
    counted, out = _called(module, args, kwargs, mode or compat.tensors.fake_mode(allow_non_fake_inputs=True))
    (batch, heads, tokens, width), _ = max(counted.shapes, key=lambda shape: shape[0][2] * shape[0][1])
    blocks = sum(times for (q, keys), times in counted.shapes.items() if q[2] == tokens == keys)
    one_batch = branches if branches > 1 and batch % branches == 0 else 1
    rows = batch // one_batch
    mixtures = [[linear for side in routed.linears for linear in side] for routed in find(module)]
    latents = next((leaf for leaf in compat.tensors.leaves_of(out) if isinstance(leaf, torch.Tensor)), None)
    return Work(
        tokens=tokens * rows,
        width=heads * width,
        heads=heads,
        blocks=max(1, blocks),
        linear=(counted.flops - counted.attention) / one_batch,
        attention=counted.attention / one_batch,
        weights=module_bytes(module),
        activations=counted.most,
        branches=branches,
        element=counted.element,
        all_reduces=1 + round(sum(counted.shapes.values()) / max(1, blocks)),
        expert_weights=sum(linear.weight.nbytes for linears in mixtures for linear in linears),
        mixtures=len(mixtures),
        experts=len(next(find(module)).module.experts) if mixtures else 0,
        latents=0 if latents is None else latents.nbytes // one_batch,
        others=others,
    )


def _called(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], fakes: Any) -> tuple[_Counted, Any]:
    """Return what was counted in a call, and its result."""
    counted = _Counted()
    with torch.inference_mode(mode=False), torch.no_grad(), fakes:
        args, named = fake_arguments(args, kwargs)
        try:
            with counted:
                out = module.forward(*args, **named)
        except Exception as error:
            raise PipelineError(
                f"the work of {type(module).__name__} cannot be counted ({brief(error)}), so no mesh can be chosen; name "
                "its degrees, such as Parallel(ulysses=2)"
            ) from error
    if not counted.shapes:
        raise PipelineError(f"{type(module).__name__} has no attention, so no mesh can be chosen; name its degrees")
    return counted, out
