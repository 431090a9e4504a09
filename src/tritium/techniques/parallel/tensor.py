"""Split the weights of linears between ranks, to save memory.

A rank holds its share of a weight in the linear's own parameter, as a plain tensor, so compiling, capturing, quantizing
and adapters work as before. Linears come in pairs: the first is split by its outputs, such as the heads of attention, and
the second by its inputs. Its results are added up over the ranks, by an operator that compiled code contains.

Adapters of LoRA are split like the linears around which they are. They keep working when they are loaded, merged or
unloaded later: what is new is split before the next call.
"""

from __future__ import annotations

import functools
import re
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tritium import compat, models
from tritium.errors import PipelineError
from tritium.models.family import TensorFacts
from tritium.techniques.parallel.mesh import Axis
from tritium.techniques.technique import Part


def apply(part: Part, axis: Axis) -> Shares:
    """Keep this rank's share of a part's weights; return the function that gathers them again."""
    shares = Shares(part.module, _plan_of(part.module, axis.size), axis)
    try:
        shares.split()
    except BaseException:
        shares()
        raise
    part.around(shares.around)
    part.compile_with(apart=("tensor", axis.size, axis.rank, compat.collectives.name_of(axis.group)))
    return shares


def why_not(module: nn.Module, ranks: int) -> str | None:
    """Return why the weights of a denoiser cannot be split between ranks, or None."""
    if module in _split:
        # Its plan was checked before.
        return None
    try:
        _plan_of(module, ranks)
    except PipelineError as error:
        return str(error)
    return None


# Denoisers whose weights are split now.
_split: weakref.WeakSet[nn.Module] = weakref.WeakSet()


# --- what is split ---


@dataclass(eq=False)
class _Linear:
    """A linear that is split: by outputs, or by inputs."""

    path: str
    parent: nn.Module
    name: str
    by_outputs: bool
    # The sizes of the parts of its features that are split one by one.
    sizes: tuple[int, ...]
    # The module that was in its place at the last call, with its adapters, and the hook that adds up results.
    outer: nn.Module | None = None
    adapters: tuple[str, ...] = ()
    hook: Any = None

    @property
    def current(self) -> Any:
        """Return the linear, or the adapters around it."""
        return self.parent.get_submodule(self.name)


@dataclass(frozen=True)
class _Plan:
    linears: list[_Linear]
    norms: list[nn.Module]
    attentions: list[nn.Module]
    facts: TensorFacts


def _plan_of(module: nn.Module, ranks: int) -> _Plan:
    """Return what is split; raise a `PipelineError` with the reason if something cannot be."""
    facts, found = _facts_of(module)
    if facts is None:
        raise PipelineError(f"{type(module).__name__} has no plan for its weights")
    _refuse_hooks(module)
    modules = dict(module.named_modules())
    linears = [_linear(modules, path, by_outputs, parts) for path, by_outputs, parts in found]
    weights = [_base(linear.current).weight for linear in linears]
    if len({id(weight) for weight in weights}) < len(weights):
        raise PipelineError("two of its linears share one weight")
    for linear in linears:
        for size in linear.sizes:
            if size % ranks:
                raise PipelineError(f"{linear.path} has {size} features, which {ranks} ranks cannot split evenly")
    attentions = list({id(linear.parent): linear.parent for linear in linears if linear.by_outputs}.values())
    for attention in attentions:
        _check_attention(attention, facts, ranks)
    norms = [inner for path, inner in _in_blocks(module) if _matches(facts.norms, path)]
    for norm in norms:
        if not isinstance(norm, nn.RMSNorm) and type(norm).__name__ != "RMSNorm":
            raise PipelineError(f"{type(norm).__name__} over all heads cannot be split")
    return _Plan(linears, norms, attentions, facts)


def _facts_of(module: nn.Module) -> tuple[TensorFacts | None, list[tuple[str, bool, tuple[int | str, ...]]]]:
    """Return a denoiser's facts, and its linears with their kind and parts: Tritium's own, or the model's plan."""
    facts = models.tensor_of(type(module).__name__)
    if facts is None:
        plan = compat.diffusers.tensor_plan(module)
        return (TensorFacts(columns={}, rows={}, counts=()) if plan else None), [*plan]
    paths = {id(inner): path for path, inner in module.named_modules()}
    found = []
    for path, inner in _in_blocks(module):
        if isinstance(inner, nn.ModuleList):
            continue
        for by_outputs, patterns in ((True, facts.columns), (False, facts.rows)):
            found += [
                (paths[id(inner)], by_outputs, parts)
                for pattern, parts in patterns.items()
                if re.fullmatch(pattern, path)
            ]
    return facts, found


def _in_blocks(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules in repeated blocks, by their paths in the block."""
    family = models.family_of(type(module).__name__)
    for block in module.modules():
        if family is not None and type(block).__name__ in family.blocks:
            yield from block.named_modules()


def _matches(patterns: tuple[str, ...], path: str) -> bool:
    return any(re.fullmatch(pattern, path) for pattern in patterns)


def _linear(modules: dict[str, nn.Module], path: str, by_outputs: bool, parts: tuple[int | str, ...]) -> _Linear:
    parent_path, _, name = path.rpartition(".")
    parent, linear = modules[parent_path], _base(modules[path])
    if not isinstance(linear, nn.Linear):
        raise PipelineError(f"{path} is a {type(linear).__name__}, and not a linear with a weight of its own")
    weight = linear.weight
    if type(weight) is not nn.Parameter or not weight.is_floating_point() or weight.element_size() < 2:
        raise PipelineError(
            f"the weight of {path} is quantized already; load it in floating point, and quantize each rank's share with "
            "Plan(quantize=...)"
        )
    _check_adapters(path, modules[path])
    features = weight.shape[0 if by_outputs else 1]
    proportions = [part if isinstance(part, int) else _number(parent, part) for part in parts] or [1]
    if features % sum(proportions):
        raise PipelineError(f"{path} has {features} features, which are not parts of {proportions}")
    unit = features // sum(proportions)
    return _Linear(path, parent, name, by_outputs, tuple(unit * one for one in proportions))


def _number(parent: nn.Module, path: str) -> int:
    value: Any = parent
    for name in path.split("."):
        value = getattr(value, name)
    return int(value)


def _refuse_hooks(module: nn.Module) -> None:
    """Raise if other code moves the weights, such as offloading."""
    for path, inner in module.named_modules():
        hooks = [type(hook).__name__ for hook in [compat.modules.accelerate_hook(inner)] if hook is not None]
        hooks += compat.modules.diffusers_hooks(inner)
        if hooks:
            raise PipelineError(
                f"{path or type(inner).__name__} has a hook that handles its weights ({', '.join(hooks)})"
            )
        if any(parameter.is_meta for parameter in inner.parameters(recurse=False)):
            raise PipelineError(f"{path} has weights on the meta device")


def _check_attention(attention: nn.Module, facts: TensorFacts, ranks: int) -> None:
    for name in facts.counts:
        count = attention.__dict__.get(name)
        if isinstance(count, int) and count % ranks:
            raise PipelineError(
                f"{type(attention).__name__} has {name}={count}, which {ranks} ranks cannot split evenly"
            )
    kv_heads = _kv_heads(attention)
    if kv_heads is not None and kv_heads % ranks:
        raise PipelineError(
            f"{type(attention).__name__} has {kv_heads} heads of keys, which {ranks} ranks cannot split evenly"
        )
    if getattr(attention, "fused_projections", False):
        raise PipelineError("its projections are fused; call unfuse_qkv_projections() first")
    processor = getattr(attention, "processor", None)
    if isinstance(processor, nn.Module) and next(processor.parameters(), None) is not None:
        raise PipelineError(f"{type(processor).__name__} has weights of its own, as for IP-Adapters; unload them first")


def _kv_heads(attention: Any) -> int | None:
    """Return the heads of keys of an attention in which several heads of queries share one, or None."""
    heads, features = getattr(attention, "heads", 0), getattr(attention, "inner_dim", 0)
    keys = getattr(attention, "inner_kv_dim", features)
    return keys // (features // heads) if heads and features and keys != features else None


# --- adapters ---


def _base(module: Any) -> Any:
    """Return the linear inside of adapters."""
    while hasattr(module, "base_layer"):
        module = module.base_layer
    return module


def _adapters(module: Any) -> tuple[str, ...]:
    return tuple(getattr(module, "lora_A", ()))


def _check_adapters(path: str, module: nn.Module) -> None:
    """Raise if the adapters around a linear are not plain LoRA."""
    if not hasattr(module, "base_layer"):
        return
    kind = type(module).__name__
    if not hasattr(module, "lora_A") or hasattr(module.base_layer, "base_layer"):
        raise PipelineError(f"{path} has adapters of the kind {type(module).__module__}.{kind}; only LoRA can be split")
    if len(getattr(module, "lora_magnitude_vector", ())):
        raise PipelineError(f"{path} has adapters with magnitudes (DoRA), which need whole weights; merge them first")


# --- the ranks' shares ---


@dataclass(eq=False)
class _Share:
    """A parameter that holds this rank's share: along a dim, or all of it on the first rank and zeros on the others."""

    parameter: nn.Parameter
    dim: int | None
    sizes: tuple[int, ...]

    def take(self, axis: Axis) -> None:
        full = self.parameter.data
        if self.dim is None:
            self.parameter.data = full.clone() if axis.rank == 0 else torch.zeros_like(full)
            return
        counts = [size // axis.size for size in self.sizes]
        parts = zip(full.split(list(self.sizes), self.dim), counts, strict=True)
        self.parameter.data = torch.cat(
            [part.narrow(self.dim, axis.rank * count, count) for part, count in parts], self.dim
        )

    def gather(self, axis: Axis) -> None:
        own = self.parameter.data.contiguous()
        if self.dim is None:
            dist.broadcast(own, dist.get_global_rank(axis.group, 0), group=axis.group)
            self.parameter.data = own
            return
        shares = [torch.empty_like(own) for _ in range(axis.size)]
        dist.all_gather(shares, own, group=axis.group)
        counts = [size // axis.size for size in self.sizes]
        by_rank = [share.split(counts, self.dim) for share in shares]
        self.parameter.data = torch.cat([ranks[part] for part in range(len(counts)) for ranks in by_rank], self.dim)


class Shares:
    """This rank's share of a part's weights; call it to gather them."""

    def __init__(self, module: nn.Module, plan: _Plan, axis: Axis) -> None:
        self._module, self._plan, self._axis = module, plan, axis
        self._group = compat.collectives.name_of(axis.group)
        # By the id of the parameter, in the order in which they were split, which is equal on all ranks.
        self._shares: dict[int, _Share] = {}
        self._before = self._after = 0
        self._undo: list[Callable[[], None]] = []

    def note(self) -> str:
        return (
            f"this rank holds {self._after / 2**20:.1f} of {self._before / 2**20:.1f} MiB of the weights that are split"
        )

    def split(self) -> None:
        _split.add(self._module)
        for linear in self._plan.linears:
            self._follow(linear)
        for norm in self._plan.norms:
            self._split_norm(norm)
        for attention in self._plan.attentions:
            self._split_attention(attention)

    def __call__(self) -> None:
        """Gather the weights, and restore hooks, forwards and counts."""
        for linear in self._plan.linears:
            self._follow(linear)
            if linear.hook is not None:
                linear.hook.remove()
        while self._undo:
            self._undo.pop()()
        alive = {id(parameter) for linear in self._plan.linears for parameter in linear.current.parameters()}
        alive |= {id(parameter) for norm in self._plan.norms for parameter in norm.parameters()}
        with torch.no_grad():
            for key, share in self._shares.items():
                if key in alive:
                    share.gather(self._axis)
        self._shares.clear()
        _split.discard(self._module)

    def around(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Split adapters that were loaded since the last call."""
        if not compat.dynamo.is_compiling():
            for linear in self._plan.linears:
                current = linear.current
                if current is not linear.outer or _adapters(current) != linear.adapters:
                    self._follow(linear)
        return call(*args, **kwargs)

    def _follow(self, linear: _Linear) -> None:
        """Split what is in the place of a linear, and add up its results if it is split by inputs."""
        current = linear.current
        _check_adapters(linear.path, current)
        base, dim = _base(current), 0 if linear.by_outputs else 1
        self._take(base.weight, dim, linear.sizes)
        self._take(base.bias, 0 if linear.by_outputs else None, linear.sizes)
        for name in _adapters(current):
            down, up = current.lora_A[name], current.lora_B[name]
            split = up if linear.by_outputs else down
            self._take(split.weight, dim, linear.sizes)
            self._take(up.bias, 0 if linear.by_outputs else None, linear.sizes)
        if not linear.by_outputs and linear.outer is not current:
            if linear.hook is not None:
                linear.hook.remove()
            linear.hook = current.register_forward_hook(self._added_up)
        linear.outer, linear.adapters = current, _adapters(current)

    def _take(self, parameter: nn.Parameter | None, dim: int | None, sizes: tuple[int, ...]) -> None:
        if parameter is None or id(parameter) in self._shares:
            return
        share = self._shares[id(parameter)] = _Share(parameter, dim, sizes)
        self._before += parameter.nbytes
        share.take(self._axis)
        self._after += parameter.nbytes

    @functools.cached_property
    def _added_up(self) -> Callable[..., torch.Tensor]:
        group = self._group

        def added_up(_module: nn.Module, _args: Any, output: torch.Tensor) -> torch.Tensor:
            return compat.collectives.all_reduce(output, group)

        return added_up

    def _split_norm(self, norm: nn.Module) -> None:
        weight: Any = norm.weight
        features = weight.shape[0] if weight is not None else 0
        self._take(weight, 0, (features,))
        self._take(getattr(norm, "bias", None), 0, (features,))
        norm.__dict__["forward"] = _norm_over_ranks(norm, self._group, self._axis.size)
        self._undo.append(functools.partial(norm.__dict__.pop, "forward"))

    def _split_attention(self, attention: nn.Module) -> None:
        for name in self._plan.facts.counts:
            count = attention.__dict__.get(name)
            if isinstance(count, int):
                attention.__dict__[name] = count // self._axis.size
                self._undo.append(functools.partial(attention.__dict__.__setitem__, name, count))
        if self._plan.facts.tables:
            handle = attention.register_forward_pre_hook(self._own_tables, with_kwargs=True)
            self._undo.append(handle.remove)

    @functools.cached_property
    def _own_tables(self) -> Callable[..., Any]:
        tables, rank, ranks = self._plan.facts.tables, self._axis.rank, self._axis.size

        def own_tables(_module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
            own = {
                name: _share(kwargs[name], dim, rank, ranks)
                for name, dim in tables.items()
                if kwargs.get(name) is not None
            }
            return args, {**kwargs, **own}

        return own_tables


def _share(value: Any, dim: int, rank: int, ranks: int) -> Any:
    """Return a rank's share of a dim of a tensor, or of each in a tuple."""
    if isinstance(value, tuple):
        return tuple(_share(one, dim, rank, ranks) for one in value)
    count = value.shape[dim] // ranks
    return value.narrow(dim, rank * count, count)


def _norm_over_ranks(norm: Any, group: str, ranks: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the forward of an RMS norm whose features are on several ranks: they add up the squares."""
    is_torch = isinstance(norm, nn.RMSNorm)

    def forward(x: torch.Tensor) -> torch.Tensor:
        wide = x.float() if x.element_size() < 4 else x
        eps = norm.eps if norm.eps is not None else torch.finfo(x.dtype).eps
        squares = compat.collectives.all_reduce(wide.pow(2).sum(-1, keepdim=True), group)
        scaled: torch.Tensor = wide * torch.rsqrt(squares / (x.shape[-1] * ranks) + eps)
        if norm.weight is None:
            return scaled.to(x.dtype)
        if is_torch:
            return torch.mul(scaled, norm.weight).to(x.dtype)
        # diffusers' class multiplies in the dtype of a weight of 16 bits.
        scaled = scaled.to(norm.weight.dtype) if norm.weight.element_size() < 4 else scaled
        scaled = torch.mul(scaled, norm.weight)
        return scaled if norm.bias is None else torch.add(scaled, norm.bias)

    return forward
