"""`tritium.pad_to`: pad inputs to a few lengths, and check that results do not depend on the padding.

    model = tritium.pad_to(model, {"encoder_hidden_states": {1: (128, 256, 512)}}, mask="encoder_attention_mask")

The named dims are padded to the next bucket, a mask marks the padding, and results are cut back to their original
sizes. A model without a mask argument is rejected. The first call of each bucket also runs with different numbers in
the padding, to detect a model that takes a mask but still reads the padding.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from tritium import compat, measure
from tritium.errors import ConfigError, ShapeError, nearest

# The allowance of fidelity `close` for one reordering of sums: masked attention adds zeros.
_TOLERANCE_EPS = 16

# Bucket sizes by argument and dim.
Buckets = Mapping[str, Mapping[int, Sequence[int]]]
FORM = "{argument: {dim: sizes}}, such as {'encoder_hidden_states': {1: (128, 256)}}"

# The dims of one result that grow with a padded dim, each with that argument and dim.
Cuts = Mapping[int, tuple[str, int]]


def pad_to(model: Any, dims: Buckets, *, mask: str | Mapping[str, str] | None = None) -> Any:
    """Wrap a module or function so that the named dims only have a few sizes.

    Args:
        model: The module or function; compile it before or after.
        dims: The padded dims of each argument, with their sizes.
        mask: The argument that takes a mask `[batch, tokens]`, True for real tokens; with several padded arguments, a
            mapping by argument. By default the usual names are tried. A mask passed by the caller is padded.
    """
    # The wrapper that torch.compile puts around a module hides its signature.
    call = compat.modules.unwrapped(model).forward if isinstance(model, nn.Module) else model
    if not callable(call):
        raise ConfigError(f"pad_to takes a module or a function, got {type(model).__name__}")
    padding = Padding(model, inspect.signature(call), dims, mask)
    if isinstance(model, nn.Module):
        return PaddedModule(model, padding)

    @functools.wraps(model)
    def padded(*args: Any, **kwargs: Any) -> Any:
        return padding(*args, **kwargs)

    return padded


class PaddedModule(nn.Module):
    """A module behind padding; attributes are those of the module."""

    def __init__(self, module: nn.Module, padding: Padding) -> None:
        super().__init__()
        self.module = module
        self.padding = padding

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.padding(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


class Padding:
    """The padded dims and masks, and the dims of results to cut."""

    def __init__(
        self,
        call: Callable[..., Any],
        signature: inspect.Signature,
        dims: Buckets,
        mask: str | Mapping[str, str] | None,
    ) -> None:
        self._call = call
        self._signature = signature
        self._dims = _buckets(dims)
        names = list(signature.parameters)
        for name in self._dims:
            if name not in names:
                raise ShapeError(f"pad_to names {name!r}, which is no argument; {nearest(name, names)}")
        self._masks = _masks(self._dims, names, mask, _title(call))
        # The cuts of each result by padded sizes, after a successful check.
        self._proven: dict[tuple[int, ...], list[Cuts]] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        bound = self._signature.bind(*args, **kwargs)
        given = bound.arguments
        targets = {
            (name, dim): _next(name, given[name].shape[dim], sizes)
            for name, of_name in self._dims.items()
            if given.get(name) is not None
            for dim, sizes in of_name.items()
        }
        padded = {**given, **self._padded(given, targets, noise=False)}
        key = tuple(targets.values())
        if key not in self._proven:
            self._proven[key] = self._prove(bound, given, padded, targets)
        leaves, rebuild = compat.tensors.flatten(self._run(bound, padded))
        return rebuild([_cut(leaf, cuts, given) for leaf, cuts in zip(leaves, self._proven[key], strict=True)])

    def _run(self, bound: inspect.BoundArguments, arguments: Mapping[str, Any]) -> Any:
        # An omitted argument, such as a mask, has a place in the signature but is not among the bound arguments.
        ordered = {name: arguments[name] for name in bound.signature.parameters if name in arguments}
        filled = inspect.BoundArguments(bound.signature, ordered)
        return self._call(*filled.args, **filled.kwargs)

    def _padded(
        self, given: Mapping[str, Any], targets: Mapping[tuple[str, int], int], *, noise: bool
    ) -> dict[str, Any]:
        made: dict[str, Any] = {}
        for (name, dim), target in targets.items():
            tensor = made.get(name, given[name])
            made[name] = _pad(tensor, dim, target, noise=noise)
        for name, mask in self._masks.items():
            if name in made:
                (dim,) = self._dims[name]
                made[mask] = _mask(given.get(mask), given[name], dim, targets[name, dim], mask)
        return made

    def _prove(
        self,
        bound: inspect.BoundArguments,
        given: Mapping[str, Any],
        padded: Mapping[str, Any],
        targets: Mapping[tuple[str, int], int],
    ) -> list[Cuts]:
        """Run without padding, with zeros and with noise in it; compare results, and return where to cut."""
        devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
        with torch.random.fork_rng(devices=devices), compat.capture.compiled_code_runs_eagerly(), torch.no_grad():
            noisy = {**given, **self._padded(given, targets, noise=True)}
            results = []
            for arguments in (_copied(given), _copied(padded), noisy):
                # Use the same random numbers in each run.
                torch.manual_seed(0)
                results.append(compat.tensors.flatten(self._run(bound, arguments))[0])
        plain, zeros, noise = results
        cuts = [_where(one, other, given, targets) for one, other in zip(plain, zeros, strict=True)]
        for one, padded_one, noisy_one, cut in zip(plain, zeros, noise, cuts, strict=True):
            if isinstance(one, torch.Tensor):
                self._compare(_cut(padded_one, cut, given), _cut(noisy_one, cut, given), "what stands in it")
                self._compare(one, _cut(padded_one, cut, given), "whether it is there")
        return cuts

    def _compare(self, one: torch.Tensor, other: torch.Tensor, what: str) -> None:
        if not one.is_floating_point():
            error, allowed = float((one != other).sum()), 0.0
        else:
            error, allowed = measure.relative_l2(other, one), _TOLERANCE_EPS * torch.finfo(one.dtype).eps
        if error > allowed:
            masks = ", ".join(sorted(self._masks.values()))
            raise ShapeError(
                f"{_title(self._call)} reads the padding although {masks} masks it: its result depends on {what} "
                f"(relative error {error:.1e}, allowed {allowed:.1e}); it cannot be padded"
            )


def _title(call: Any) -> str:
    return type(call).__name__ if isinstance(call, nn.Module) else getattr(call, "__name__", "the function")


def _buckets(dims: Any) -> dict[str, dict[int, tuple[int, ...]]]:
    """Check the padded dims, and sort the sizes of each."""
    try:
        found = {name: {dim: tuple(sorted(sizes)) for dim, sizes in of_name.items()} for name, of_name in dims.items()}
    except (AttributeError, TypeError) as error:
        raise ConfigError(f"pad_to takes dims as {FORM}; got {dims!r}") from error
    if not found or not all(found.values()):
        raise ConfigError(f"pad_to: no dim is named, so nothing would be padded; write {FORM}")
    for name, of_name in found.items():
        for dim, sizes in of_name.items():
            if not isinstance(dim, int):
                raise ConfigError(f"pad_to: a dim of {name!r} must be an integer, got {dim!r}")
            if not sizes or not all(isinstance(size, int) and size > 0 for size in sizes):
                raise ShapeError(f"pad_to: the sizes of {name!r} must be integers above 0, got {sizes!r}")
    return found


def _masks(dims: Buckets, names: Sequence[str], mask: str | Mapping[str, str] | None, title: str) -> dict[str, str]:
    """Return the mask of each padded argument that has one; raise a `ConfigError` if none has."""
    if isinstance(mask, str):
        mask = {next(iter(dims)): mask}
    for argument, name in (mask or {}).items():
        if argument not in dims:
            raise ConfigError(f"pad_to: mask names {argument!r}, which is not padded; {nearest(argument, dims)}")
        if name not in names:
            raise ConfigError(f"{title} has no argument {name!r} for a mask; {nearest(name, names)}")
    found = dict(mask or {})
    for argument in dims if mask is None else ():
        owner = argument.removesuffix("hidden_states").removesuffix("input_ids")
        usual = (f"{argument}_mask", f"{owner}attention_mask", f"{owner}mask")
        known = next((name for name in usual if name in names), None)
        if known is not None:
            found[argument] = known
    if not found:
        raise ConfigError(
            f"{title} has no way to ignore padding: no argument takes a mask for {', '.join(map(repr, dims))}; "
            "name it with mask=..., or compile each length (Plan(shapes=...), dynamic_dims)"
        )
    for argument in found:
        if len(dims[argument]) != 1:
            raise ConfigError(
                f"pad_to: a mask says which tokens of {argument!r} are real, so one dim of it can be padded"
            )
    return found


def _next(name: str, size: int, sizes: Sequence[int]) -> int:
    fitting = next((bucket for bucket in sizes if bucket >= size), None)
    if fitting is None:
        raise ShapeError(f"{name} has size {size}, and the largest bucket of pad_to is {sizes[-1]}")
    return fitting


def _pad(tensor: torch.Tensor, dim: int, target: int, *, noise: bool) -> torch.Tensor:
    missing = target - tensor.shape[dim]
    if not missing:
        return tensor
    shape = list(tensor.shape)
    shape[dim] = missing
    filling = tensor.new_zeros(shape)
    if noise and tensor.is_floating_point():
        filling = torch.randn(shape, dtype=torch.float32, device=tensor.device).to(tensor.dtype)
    elif noise and tensor.numel():
        # Use values that occur in the input, such as tokens of the vocabulary.
        filling = filling + tensor.amax() if tensor.dtype is not torch.bool else ~filling
    return torch.cat([tensor, filling], dim=dim)


def _mask(given: Any, tensor: torch.Tensor, dim: int, target: int, name: str) -> torch.Tensor:
    size = tensor.shape[dim]
    if given is None:
        real = torch.arange(target, device=tensor.device) < size
        return real.expand(tensor.shape[0], target)
    if given.dim() != 2 or given.shape[1] != size or (given.is_floating_point() and bool((given < 0).any())):
        raise ShapeError(
            f"pad_to pads a mask of shape (batch, tokens) with 0 or False for padding; {name} has shape {tuple(given.shape)}"
            + (" and adds negative numbers" if given.is_floating_point() else "")
        )
    return _pad(given, 1, target, noise=False)


def _copied(arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in arguments.items()}


def _where(plain: Any, padded: Any, given: Mapping[str, Any], targets: Mapping[tuple[str, int], int]) -> Cuts:
    """Return the dims of a result that grew with a padded dim, each with that argument and dim."""
    if not isinstance(plain, torch.Tensor):
        if plain != padded:
            raise ShapeError(f"a result that is no tensor depends on the padding: {plain!r} became {padded!r}")
        return {}
    if plain.dim() != padded.dim():
        raise ShapeError("a result has another number of dims with padding")
    found = {}
    for place, (was, now) in enumerate(zip(plain.shape, padded.shape, strict=True)):
        if was == now:
            continue
        fitting = [key for key, target in targets.items() if target == now and given[key[0]].shape[key[1]] == was]
        if not fitting:
            raise ShapeError(f"dim {place} of a result grows from {was} to {now} with padding, as no padded dim does")
        found[place] = fitting[0]
    return found


def _cut(leaf: Any, cuts: Cuts, given: Mapping[str, Any]) -> Any:
    for place, (name, dim) in cuts.items():
        leaf = leaf.narrow(place, 0, given[name].shape[dim])
    return leaf
