"""Share the work of a VAE between ranks: tiles by rank, or rows of the whole image by DistVAE.

The methods of diffusers that decode or encode in tiles call the decoder for each tile and then blend. They run twice: in
the first pass a rank computes its own tiles and returns empty tensors for the others, then the ranks exchange, and in the
second pass every call returns its result. So the image is bit-equal to that of one rank. A tile of a video may take
several calls, in which the decoder keeps frames of the earlier ones: they stay on one rank.

Without tiling, DistVAE splits the rows of a call if it is installed and has adapters for the class. Its convolutions
exchange the rows at the borders.
"""

from __future__ import annotations

import copy
import functools
import importlib
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from tritium import compat, device
from tritium.errors import PipelineError
from tritium.techniques.parallel import ranks
from tritium.techniques.parallel.guidance import broadcast
from tritium.techniques.parallel.mesh import Axis
from tritium.techniques.skip.history import Structure
from tritium.techniques.technique import Part


def apply(part: Part, axis: Axis) -> Tiles:
    """Share a VAE's decoder or encoder between the ranks of an axis; return the function that undoes it."""
    tiles = Tiles(part, axis)
    part.around(tiles.around, outside=True)
    if (others := ranks.control()) is not None:
        others.watch(tiles)
    return tiles


def why_not(part: Part) -> str | None:
    """Return why a VAE's decoder or encoder cannot be shared between ranks, or None."""
    if _methods(part) or _has_adapter(part):
        return None
    direction = _direction(part)
    return f"{type(part.component).__name__} cannot {direction} in tiles, and DistVAE has no adapter for it or is not installed"


def _direction(part: Part) -> str:
    return "encode" if part.module is getattr(part.component, "encoder", None) else "decode"


def _methods(part: Part) -> list[str]:
    """Return the names of the VAE's methods that work in tiles."""
    names = (f"tiled_{_direction(part)}", f"_tiled_{_direction(part)}")
    return [name for name in names if callable(getattr(part.component, name, None))]


def _has_adapter(part: Part) -> bool:
    if importlib.util.find_spec("distvae") is None:
        return False
    found = getattr(importlib.import_module("distvae.vae.parallel"), f"{_direction(part)}r_adapter_name")
    return found(part.component) is not None


@dataclass(frozen=True)
class _Form:
    """The form of a call's main tensor, from which that of a tile of another size follows."""

    leading: tuple[int, ...]
    dtype: torch.dtype
    # The order of the dims in memory.
    order: tuple[int, ...]
    # Height and width of the output and of the input.
    output: tuple[int, int]
    input: tuple[int, int]
    structure: Structure

    def empty(self, tile: torch.Tensor) -> torch.Tensor:
        sizes = [out * side // own for out, own, side in zip(self.output, self.input, tile.shape[-2:], strict=True)]
        return torch.empty_permuted((*self.leading, *sizes), self.order, dtype=self.dtype, device=tile.device)

    def with_main(self, main: torch.Tensor) -> Any:
        """Return an output with this main tensor, and without the others, such as kept frames."""
        leaves = list(self.structure.leaves)
        leaves[_main(leaves)] = main
        return self.structure.rebuild(leaves)


def _main(leaves: list[Any]) -> int:
    return next(place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor))


@dataclass
class _Pass:
    """One call of a method that works in tiles."""

    # The leading sizes of its input, which decide how many calls a tile takes and the forms of their outputs.
    key: Any
    # True if the first tile is computed on all ranks, because the forms are unknown.
    learns: bool
    # The number of calls that each tile takes; None while the first tile is learned.
    calls: int | None
    is_replay: bool = False
    place: int = 0
    # The results of all calls, in order, each with the rank that computed it, or None for all ranks.
    results: list[tuple[torch.Tensor, int | None]] = field(default_factory=list)


class Tiles:
    """Shares the calls of a VAE's decoder or encoder between the ranks of an axis."""

    def __init__(self, part: Part, axis: Axis) -> None:
        self._part, self._axis = part, axis
        self._pass: _Pass | None = None
        # The calls of a tile by the leading sizes of the whole input, and the form of each of these calls.
        self._calls: dict[Any, int] = {}
        self._forms: dict[Any, _Form] = {}
        # The attributes of the module that hold tensors before a tile.
        self._state: frozenset[tuple[int, str]] = frozenset()
        self.computed = self.left = 0
        self._rows = 0
        # Why calls are not shared, each said once.
        self.declined: dict[str, None] = {}
        self._before: dict[str, Any] = {}
        for name in _methods(part):
            methods = part.component.__dict__
            self._before[name] = methods.get(name)
            methods[name] = self._tiled(getattr(part.component, name))

    def __call__(self) -> None:
        """Undo it."""
        for name, before in self._before.items():
            if before is None:
                self._part.component.__dict__.pop(name, None)
            else:
                self._part.component.__dict__[name] = before
        self.__dict__.pop("_by_rows", None)

    def note(self) -> str:
        words = []
        if self.computed or self.left:
            words.append(f"this rank computed {self.computed} calls of tiles and left {self.left} to others")
        if self._rows:
            words.append(f"DistVAE split {self._rows} calls by rows")
        return "; ".join([*words, *self.declined])

    def after_failure(self, *, renewed: bool) -> None:
        """Learn the tiles again: the ranks stopped at different ones."""
        self._calls.clear()
        self._forms.clear()
        if renewed:
            self.__dict__.pop("_by_rows", None)

    # --- the methods that work in tiles ---

    def _tiled(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def tiled(*args: Any, **kwargs: Any) -> Any:
            if self._pass is not None or compat.dynamo.is_compiling() or device.is_capturing():
                return method(*args, **kwargs)
            whole = next(value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))
            key = (whole.shape[:-2], whole.dtype)
            first = _Pass(key, learns=key not in self._calls, calls=self._calls.get(key))
            self._state = self._tensors_held()
            try:
                self._pass = first
                method(*args, **kwargs)
                self._finish(first)
                self._pass = _Pass(key, learns=False, calls=first.calls, is_replay=True, results=first.results)
                return method(*args, **kwargs)
            finally:
                self._pass = None

        return tiled

    def _finish(self, first: _Pass) -> None:
        """Exchange the results of a pass."""
        self._calls[first.key] = first.calls = first.calls or first.place
        with torch.no_grad():
            for result, owner in first.results:
                if owner is not None:
                    broadcast(result, owner, self._axis)

    # --- calls of the decoder or encoder ---

    def around(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if compat.dynamo.is_compiling() or device.is_capturing():
            return call(*args, **kwargs)
        current = self._pass
        if current is None:
            return self._whole(call, args, kwargs)
        place, current.place = current.place, current.place + 1
        if current.is_replay:
            result, current.results[place] = current.results[place][0], (torch.empty(0), None)
            return self._forms[self._form_key(current, place, args, kwargs)].with_main(result)
        if current.calls is None and place and self._is_fresh(kwargs):
            current.calls = place
        owner = self._owner(current, place)
        form = self._form_key(current, place, args, kwargs)
        if owner is None or owner == self._axis.rank:
            return self._compute(current, form, owner, call, args, kwargs)
        self.left += 1
        result = self._forms[form].empty(_tile_of(args, kwargs))
        current.results.append((result, owner))
        # Blending writes into tiles: the results stay as they are.
        return self._forms[form].with_main(torch.empty_like(result))

    def _compute(
        self,
        current: _Pass,
        key: Any,
        owner: int | None,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        self.computed += 1
        output = call(*args, **kwargs)
        structure = Structure(output)
        main = structure.leaves[_main(structure.leaves)]
        tile = _tile_of(args, kwargs)
        if key not in self._forms:
            self._forms[key] = _form_of(structure, tile)
        elif self._forms[key].empty(tile).shape != main.shape:
            raise PipelineError(
                f"{self._part.name} returned a tile of shape {tuple(main.shape)}, whose size does not follow from that of "
                "its input, so the ranks cannot share the tiles; use Parallel(vae=None)"
            )
        current.results.append((main.clone(), owner))
        return output

    def _owner(self, current: _Pass, place: int) -> int | None:
        """Return the rank that computes a call, or None if all do."""
        if current.calls is None:
            return None
        tile = place // current.calls
        if not current.learns:
            return tile % self._axis.size
        return (tile - 1) % self._axis.size if tile else None

    def _form_key(self, current: _Pass, place: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        within = place % current.calls if current.calls is not None else place
        return current.key, within, _tile_of(args, kwargs).shape[:-2]

    def _is_fresh(self, kwargs: dict[str, Any]) -> bool:
        """Return True if a call begins a tile: no frames of earlier calls are kept, in arguments or in the module."""
        caches = [value for name, value in kwargs.items() if "cache" in name]
        if any(leaf is not None for cache in caches for leaf in compat.tensors.leaves_of(cache)):
            return False
        return self._tensors_held() == self._state

    def _tensors_held(self) -> frozenset[tuple[int, str]]:
        return frozenset(
            (id(module), name)
            for module in self._part.module.modules()
            for name, value in vars(module).items()
            if not isinstance(value, dict) and any(isinstance(one, torch.Tensor) for one in _items(value))
        )

    # --- without tiles ---

    def _whole(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if getattr(self._part.component, "use_tiling", False):
            # It fits in one tile.
            return call(*args, **kwargs)
        if self._by_rows is None:
            direction = _direction(self._part)
            self.declined.setdefault(f"every rank {direction}s whole images; vae.enable_tiling() shares the tiles")
            return call(*args, **kwargs)
        try:
            with torch.no_grad():
                output = self._by_rows(*args, **kwargs)
        except ValueError as error:
            # Raised before the ranks exchange anything, by all of them.
            if not str(error).startswith("Cannot split"):
                raise
            self.declined.setdefault(f"DistVAE: {error}")
            return call(*args, **kwargs)
        except BaseException:
            # It holds the group, in which other ranks may wait.
            self.__dict__.pop("_by_rows", None)
            raise
        self._rows += 1
        return output

    @functools.cached_property
    def _by_rows(self) -> nn.Module | None:
        """Return DistVAE's form of the module, which shares its weights, or None."""
        if not _has_adapter(self._part):
            return None
        vae, name = self._part.component, f"{_direction(self._part)}r"
        # DistVAE replaces modules inside of the one it adapts.
        twin = copy.deepcopy(self._part.module, {id(tensor): tensor for tensor in _tensors(self._part.module)})
        stand_in = SimpleNamespace(**{name: twin}, config=vae.config, device=next(_tensors(twin)).device)
        getattr(importlib.import_module("distvae.vae.parallel"), f"parallelize_{name}")(stand_in, self._axis.group)
        adapted: nn.Module = getattr(stand_in, name)
        return adapted.eval()


def _tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def _items(value: Any) -> Any:
    return value if isinstance(value, (list, tuple)) else (value,)


def _tile_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    return next(value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))


def _form_of(structure: Structure, tile: torch.Tensor) -> _Form:
    """Return the form of an output, and drop its tensors."""
    main = structure.leaves[_main(structure.leaves)]
    structure.leaves = [
        torch.empty(0) if leaf is main else None if isinstance(leaf, torch.Tensor) else leaf
        for leaf in structure.leaves
    ]
    strides = main.stride()
    order = tuple(sorted(range(main.dim()), key=lambda dim: -strides[dim]))
    (height, width), (rows, columns) = main.shape[-2:], tile.shape[-2:]
    return _Form(tuple(main.shape[:-2]), main.dtype, order, (height, width), (rows, columns), structure)
