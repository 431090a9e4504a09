"""The rules by which split tokens pass through torch's functions and methods."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from tritium.techniques.parallel.exchange import Segment
from tritium.techniques.parallel.streams import Mixed, Operation, Tag, Tokens, Uniform, merged

Rule = Callable[[Operation], Any]


def tags_of(operation: Operation) -> Any:
    """Return the tag of all results, or a list with the tag of each; raise `Mixed` if tokens meet others."""
    tags = [operation.tag_of(tensor) for tensor in operation.tensors]
    if operation.name in _FRESH:
        return Uniform()
    if not any(tags):
        return None
    rule = RULES.get(operation.name)
    is_split = any(isinstance(tag, Tokens) and tag.is_split for tag in tags)
    if rule is None:
        if is_split:
            raise operation.mixed("is no operator that is known to keep tokens apart")
        return None
    try:
        return rule(operation)
    except Mixed:
        if is_split:
            raise
        # Whole tensors may be mixed.
        return None


def name_of(target: Any) -> str:
    """Return the plain name of a function or method: `add` for `operator.iadd`, `Tensor.add_` and `aten.add.Tensor`."""
    name = target if isinstance(target, str) else getattr(target, "__name__", str(target))
    if name == "__get__":
        # A property of tensors.
        name = target.__self__.__name__
    name = name.split(".")[0]
    if name.startswith("__"):
        name = name.strip("_")
        name = name[1:] if name[1:] in _ELEMENTWISE and name[0] in "ri" and name not in _ELEMENTWISE else name
    elif name.endswith("_"):
        name = name.rstrip("_")
    return name[1:] if name[:1] == "i" and name[1:] in _ELEMENTWISE and name not in _ELEMENTWISE else name


# --- rules ---


def _tagged(rule: Callable[[Operation, Tokens], Any]) -> Rule:
    """Return a rule for a first argument with tokens; results have the tag of another one."""

    @functools.wraps(rule)
    def call(operation: Operation) -> Any:
        tag = operation.tag_of(operation.first)
        return rule(operation, tag) if isinstance(tag, Tokens) else tag

    return call


def _same(operation: Operation) -> Tag:
    """The first argument is changed value by value."""
    return operation.tag_of(operation.first)


def _elementwise(operation: Operation) -> Tag:
    rank = operation.out.dim() if isinstance(operation.out, torch.Tensor) else max(x.dim() for x in operation.tensors)
    found: Tokens | None = None
    for tensor in operation.tensors:
        tag = operation.tokens(tensor)
        if tag is not None:
            tag = tag.at(tag.dim + rank - tensor.dim())
            found = tag if found is None else _unified(operation, found, tag)
    if found is None:
        return Uniform() if all(isinstance(operation.tag_of(x), Uniform) for x in operation.tensors) else None
    _check_others(operation, found, rank)
    return found


def _check_others(operation: Operation, tag: Tokens, rank: int) -> None:
    """Raise if a whole tensor has values along the dim of tokens."""
    for tensor in operation.tensors:
        dim = tag.dim - (rank - tensor.dim())
        if operation.tag_of(tensor) is None and dim >= 0 and tensor.shape[dim] != 1:
            raise operation.mixed("has values for each of the whole tokens, or mixes tokens")


def _unified(operation: Operation, left: Tokens, right: Tokens) -> Tokens:
    """Return the tag of values that belong together."""
    grid, segments = operation.grid, []
    if left.segments != right.segments:
        # Samples may have other numbers of text tokens and of pads, which are on every rank.
        left, right = merged(left), merged(right)
    if replace(left, segments=()) != replace(right, segments=()) or len(left.segments) != len(right.segments):
        raise operation.mixed("joins tokens of different streams")
    for one, other in zip(left.segments, right.segments, strict=True):
        if one.share(grid.size) != other.share(grid.size) or (
            one != other and not one.is_uniform and not other.is_uniform
        ):
            raise operation.mixed("joins tokens of different streams")
        segments.append(other if one.is_uniform else one)
    return replace(left, segments=tuple(segments))


def _dims(operation: Operation, value: Any) -> set[int]:
    rank = operation.first.dim()
    dims = value if isinstance(value, (tuple, list)) else [value]
    return {int(dim) % rank for dim in dims}


def _over_dim(operation: Operation, index: int = 1, default: Any = None, name: str = "dim") -> Tokens | None:
    """Return the tag of the first argument if an operator acts along other dims than its tokens."""
    tag = operation.tokens(operation.first)
    dims = operation.argument(index, name, default)
    if tag is None:
        return None
    if dims is None or tag.dim in _dims(operation, dims):
        raise operation.mixed(f"acts along dim {tag.dim} of its tokens")
    return tag


def _along(index: int = 1, default: Any = None) -> Rule:
    return lambda operation: _over_dim(operation, index, default)


def _reduced(index: int = 1, keep: int = 2) -> Rule:
    def rule(operation: Operation) -> Tag:
        tag = _over_dim(operation, index)
        if tag is not None and not operation.argument(keep, "keepdim", False):
            gone = _dims(operation, operation.argument(index, "dim"))
            tag = tag.at(tag.dim - sum(dim < tag.dim for dim in gone))
        return tag

    return rule


def _normalized(operation: Operation) -> Tag:
    """Norms over the last dims."""
    shape = operation.argument(1, "normalized_shape")
    tag = operation.tokens(operation.first)
    count = len(shape) if isinstance(shape, (tuple, list)) else 1
    if tag is not None and tag.dim >= operation.first.dim() - count:
        raise operation.mixed()
    return tag


def _linear(operation: Operation) -> Tag:
    tag = operation.tokens(operation.first)
    if tag is None or tag.dim == operation.first.dim() - 1:
        raise operation.mixed()
    return tag


def _rows_quantized(operation: Operation) -> list[Tag]:
    """Quantized values and a scale for each row, or one for all."""
    tag = _linear(operation)
    assert isinstance(tag, Tokens)
    size = operation.first.shape[tag.dim]
    return [tag if x.dim() > tag.dim and x.shape[tag.dim] == size else None for x in operation.out]


def _matmul(operation: Operation) -> Tag:
    left, right = operation.tensors[:2]
    tag = operation.tokens(left)
    if tag is None or operation.tokens(right) is not None or tag.dim == left.dim() - 1:
        raise operation.mixed("is a product over tokens: this attention is not PyTorch's function")
    rank = operation.out.dim()
    tag = tag.at(tag.dim + rank - left.dim())
    place = tag.dim - (rank - right.dim())
    if tag.dim < rank - 2 and place >= 0 and right.shape[place] != 1:
        raise operation.mixed()
    return tag


@_tagged
def _view(operation: Operation, tag: Tokens) -> Tag:
    return _reshaped(operation, tag, tuple(operation.first.shape), tuple(operation.out.shape))


def _reshaped(operation: Operation, tag: Tokens, old: tuple[Any, ...], new: tuple[Any, ...]) -> Tokens:
    """Return the dim with the tokens after a view."""
    dim, size = tag.dim, operation.grid.local(tag.segments)
    if new[: dim + 1] == old[: dim + 1]:
        return tag
    if new[len(new) - (len(old) - dim) :] == old[dim:] and len(new) >= len(old) - dim:
        return tag.at(len(new) - (len(old) - dim))
    before = math.prod(old[:dim]) * tag.outer
    behind = math.prod(old[dim + 1 :]) * tag.inner
    found = []
    for place in range(len(new)):
        outer, rest = divmod(before, math.prod(new[:place]))
        inner, left = divmod(behind, math.prod(new[place + 1 :]))
        if not rest and not left and new[place] == outer * size * inner:
            found.append(Tokens(place, tag.segments, outer, inner))
    if not found:
        raise operation.mixed("merges or cuts the dim of its tokens")
    return min(found, key=lambda one: one.outer * one.inner)


def _moved(order: Callable[[Operation, int], Sequence[int]]) -> Rule:
    """Permutations of dims: `order` returns the old dim of each new one."""

    @_tagged
    def rule(operation: Operation, tag: Tokens) -> Tag:
        rank = operation.first.dim()
        return tag.at([dim % rank for dim in order(operation, rank)].index(tag.dim))

    return rule


def _transposed(operation: Operation, rank: int) -> list[int]:
    order = list(range(rank))
    one, other = (operation.argument(place, name, -place) for place, name in ((1, "dim0"), (2, "dim1")))
    order[one], order[other] = order[other], order[one]
    return order


def _permuted(operation: Operation, _rank: int) -> Sequence[int]:
    dims = operation.argument(1, "dims")
    return dims if isinstance(dims, (tuple, list)) else operation.args[1:]


def _movedim(operation: Operation, rank: int) -> list[int]:
    sources, targets = (operation.argument(place, name) for place, name in ((1, "source"), (2, "destination")))
    sources, targets = ([x] if isinstance(x, int) else list(x) for x in (sources, targets))
    placed = {target % rank: source % rank for source, target in zip(sources, targets, strict=True)}
    rest = iter(dim for dim in range(rank) if dim not in placed.values())
    return [placed[dim] if dim in placed else next(rest) for dim in range(rank)]


def _last_two(_operation: Operation, rank: int) -> list[int]:
    return [*range(rank - 2), rank - 1, rank - 2]


@_tagged
def _squeezed(operation: Operation, tag: Tokens) -> Tag:
    dims = operation.argument(1, "dim")
    shape = operation.first.shape
    gone = range(len(shape)) if dims is None else sorted(_dims(operation, dims))
    return tag.at(tag.dim - sum(dim < tag.dim and shape[dim] == 1 for dim in gone))


@_tagged
def _unsqueezed(operation: Operation, tag: Tokens) -> Tag:
    dim = operation.argument(1, "dim") % (operation.first.dim() + 1)
    return tag.at(tag.dim + (dim <= tag.dim))


@_tagged
def _expanded(operation: Operation, tag: Tokens) -> Tag:
    moved = tag.at(tag.dim + operation.out.dim() - operation.first.dim())
    if operation.out.shape[moved.dim] != operation.first.shape[tag.dim]:
        raise operation.mixed("repeats tokens")
    return moved


def _cut(operation: Operation, tag: Tokens, start: int, size: int) -> Tokens | None:
    """Return the tag of consecutive tokens; a split segment is kept whole or dropped."""
    if tag.outer * tag.inner > 1:
        raise operation.mixed("cuts merged tokens")
    segments, at = [], 0
    for segment in tag.segments:
        share = segment.share(operation.grid.size)
        first, last = max(at, start), min(at + share, start + size)
        if first < last and (segment.is_split and last - first < share):
            raise operation.mixed(f"cuts {last - first} of {share} split tokens")
        if first < last:
            segments.append(segment if last - first == share else Segment(last - first, False, segment.is_uniform))
        at += share
    kept = replace(tag, segments=tuple(segments))
    return kept if any(segment.is_split or segment.is_uniform for segment in segments) else None


@_tagged
def _narrowed(operation: Operation, tag: Tokens) -> Tag:
    dim, start, size = (operation.argument(place, name) for place, name in enumerate(("dim", "start", "length"), 1))
    if dim % operation.first.dim() != tag.dim:
        return tag
    return _cut(operation, tag, int(start) % operation.first.shape[tag.dim], int(size))


@_tagged
def _selected(operation: Operation, tag: Tokens) -> Tag:
    dim = operation.argument(1, "dim") % operation.first.dim()
    if dim != tag.dim:
        return tag.at(tag.dim - (dim < tag.dim))
    index = int(operation.argument(2, "index")) % operation.first.shape[dim]
    _cut(operation, tag, index, 1)
    return None


def _parts(default: int | None = None) -> Rule:
    """Operators that return parts along a dim."""

    @_tagged
    def rule(operation: Operation, tag: Tokens) -> Any:
        dim = int(operation.argument(2, "dim", default)) % operation.first.dim()
        if dim != tag.dim:
            return tag
        found, start = [], 0
        for part in operation.out:
            found.append(_cut(operation, tag, start, part.shape[dim]))
            start += part.shape[dim]
        return found

    return rule


@_tagged
def _unbound(operation: Operation, tag: Tokens) -> Tag:
    dim = int(operation.argument(1, "dim", 0)) % operation.first.dim()
    if dim == tag.dim:
        raise operation.mixed("takes tokens apart")
    return tag.at(tag.dim - (dim < tag.dim))


def _joined(operation: Operation) -> Tag:
    tensors = operation.tensors
    rank = tensors[0].dim()
    dim = int(operation.argument(1, "dim", operation.kwargs.get("axis", 0))) % rank
    tags = [operation.tokens(tensor) for tensor in tensors]
    tagged = next((tag for tag in tags if tag is not None), None)
    if tagged is not None and tagged.dim != dim:
        return _elementwise(operation)
    segments: list[Segment] = []
    for tensor, tag in zip(tensors, tags, strict=True):
        if tag is not None and (tag.dim != dim or tag.outer * tag.inner > 1):
            raise operation.mixed("joins tokens along different dims")
        is_uniform = isinstance(operation.tag_of(tensor), Uniform)
        segments += tag.segments if tag is not None else [Segment(int(tensor.shape[dim]), False, is_uniform)]
    return Tokens(dim, tuple(segment for segment in segments if segment.length))


def _stacked(operation: Operation) -> Tag:
    dim = int(operation.argument(1, "dim", 0)) % (operation.tensors[0].dim() + 1)
    tag = _elementwise(replace(operation, out=operation.tensors[0]))
    return tag.at(tag.dim + (dim <= tag.dim)) if isinstance(tag, Tokens) else tag


def _repeated(operation: Operation) -> Tag:
    tag = operation.tokens(operation.first)
    dim = operation.argument(2, "dim")
    if tag is not None and (dim is None or dim % operation.first.dim() == tag.dim):
        raise operation.mixed("repeats tokens")
    return tag


def _padded(operation: Operation) -> Tag:
    tag = operation.tokens(operation.first)
    pads = list(operation.argument(1, "pad"))
    if tag is None:
        return None
    behind = 2 * (operation.first.dim() - 1 - tag.dim)
    added = [Segment(pad, False) for pad in (*pads[behind : behind + 2], 0, 0)[:2]]
    if any(segment.length < 0 for segment in added) or (any(pads[behind : behind + 2]) and tag.outer * tag.inner > 1):
        raise operation.mixed("cuts tokens")
    # The same values on every rank.
    segments = (added[0], *tag.segments, added[1])
    return replace(tag, segments=tuple(segment for segment in segments if segment.length))


@_tagged
def _item(operation: Operation, tag: Tokens) -> Tag:
    """Indexing by integers, slices, None and an ellipsis."""
    tensor, index = operation.args[:2]
    items = list(index) if isinstance(index, tuple) else [index]
    if any(isinstance(item, (torch.Tensor, list)) for item in items):
        raise operation.mixed("picks tokens by an index")
    if Ellipsis not in items:
        items.append(Ellipsis)
    taken = sum(item is not None and item is not Ellipsis for item in items)
    place = items.index(Ellipsis)
    items[place : place + 1] = [slice(None)] * (tensor.dim() - taken)
    dim = new = 0
    found: Tokens | None = tag
    for item in items:
        if item is None:
            new += 1
            continue
        if dim == tag.dim:
            found = _item_of_tokens(operation, tag, item, tensor.shape[dim])
            found = None if found is None else found.at(new)
        dim, new = dim + 1, new + (not isinstance(item, int))
    return found


def _item_of_tokens(operation: Operation, tag: Tokens, item: Any, size: int) -> Tokens | None:
    if not isinstance(item, slice):
        _cut(operation, tag, int(item) % size, 1)
        return None
    start, stop, step = item.indices(size)
    if step != 1:
        raise operation.mixed("takes every second token")
    return tag if stop - start == size else _cut(operation, tag, start, max(0, stop - start))


def assigned(operation: Operation) -> Tag:
    """Return the tag of a tensor after values were written to it by `x[...] = value`."""
    tensor, index, value = operation.args[:3]
    own, other = operation.tag_of(tensor), operation.tag_of(value)
    if not isinstance(other, Tokens):
        return own
    items = index if isinstance(index, tuple) else (index,)
    is_whole = Ellipsis in items and all(item is Ellipsis or isinstance(item, (slice, int)) for item in items)
    if isinstance(own, Tokens) and own.is_split == other.is_split:
        target = _item(replace(operation, args=(tensor, index)))
        if isinstance(target, Tokens):
            moved = other.at(other.dim + tensor[index].dim() - value.dim())
            _unified(operation, target, moved)
            return own
    elif isinstance(own, Uniform) and is_whole and tensor.dim() == value.dim():
        # New memory, filled part by part.
        return other
    raise operation.mixed("writes split tokens to others")


def _as_complex(step: int) -> Rule:
    def rule(operation: Operation) -> Tag:
        tag = operation.tokens(operation.first)
        if tag is not None and step < 0 and tag.dim == operation.first.dim() - 1:
            raise operation.mixed()
        return tag

    return rule


_ELEMENTWISE = frozenset(
    """
    add sub subtract rsub mul multiply div divide true_divide truediv floordiv floor_divide remainder mod fmod pow neg
    negative abs sign sqrt rsqrt square exp exp2 expm1 log log1p log2 sin cos tan tanh sigmoid relu relu6 silu gelu elu
    leaky_relu softplus mish hardswish hardsigmoid erf reciprocal clamp clamp_min clamp_max clip minimum maximum where
    lerp addcmul addcdiv masked_fill logical_not logical_and logical_or logical_xor and or xor invert bitwise_not
    bitwise_and bitwise_or eq ne lt le gt ge isnan isinf isfinite nan_to_num round floor ceil trunc polar complex conj
    logaddexp atan2 sinh cosh
    """.split()  # noqa: SIM905 - shorter than one name per line
)
_SAME = """
    to type type_as float double half bfloat16 bool int long contiguous clone detach dropout alias feature_dropout
    alpha_dropout zeros_like ones_like empty_like full_like rand_like randn_like requires_grad cpu cuda identity
    _to_copy copy fill zero resolve_conj real imag angle data all_reduce wait_tensor
""".split()  # noqa: SIM905 - shorter than one name per line
_FRESH = frozenset(("zeros", "ones", "full", "empty", "new_zeros", "new_ones", "new_full", "new_empty"))
_VIEWS = "view reshape flatten unflatten view_as reshape_as _unsafe_view".split()  # noqa: SIM905

RULES: dict[str, Rule] = {
    **dict.fromkeys(_ELEMENTWISE, _elementwise),
    **dict.fromkeys(_SAME, _same),
    **dict.fromkeys(_VIEWS, _view),
    **dict.fromkeys(("softmax", "log_softmax", "_softmax", "cumsum", "cumprod", "flip", "roll"), _along()),
    **dict.fromkeys(("glu",), _along(1, -1)),
    **dict.fromkeys(("normalize",), _along(2, 1)),
    **dict.fromkeys(("sort", "argsort"), _along(1, -1)),
    **dict.fromkeys(("topk",), _along(2, -1)),
    **dict.fromkeys(("mean", "sum", "var", "std", "amax", "amin", "logsumexp", "prod", "max", "min"), _reduced()),
    **dict.fromkeys(("all", "any", "argmax", "argmin"), _reduced()),
    **dict.fromkeys(("norm", "linalg_vector_norm", "vector_norm"), _reduced(2, 3)),
    **dict.fromkeys(("layer_norm", "rms_norm", "native_layer_norm"), _normalized),
    **dict.fromkeys(("linear", "weight_only_linear", "scaled_linear"), _linear),
    "quantize_rows": _rows_quantized,
    **dict.fromkeys(("matmul", "bmm"), _matmul),
    **dict.fromkeys(("transpose", "swapaxes", "swapdims"), _moved(_transposed)),
    "permute": _moved(_permuted),
    **dict.fromkeys(("movedim", "moveaxis"), _moved(_movedim)),
    **dict.fromkeys(("t", "T", "mT", "numpy_T"), _moved(_last_two)),
    "squeeze": _squeezed,
    "unsqueeze": _unsqueezed,
    **dict.fromkeys(("expand", "expand_as", "broadcast_to", "repeat", "tile"), _expanded),
    "repeat_interleave": _repeated,
    "narrow": _narrowed,
    "select": _selected,
    **dict.fromkeys(("split", "chunk", "split_with_sizes", "tensor_split", "unsafe_chunk"), _parts(0)),
    "unbind": _unbound,
    **dict.fromkeys(("cat", "concat", "concatenate"), _joined),
    "stack": _stacked,
    "pad": _padded,
    "getitem": _item,
    "view_as_complex": _as_complex(-1),
    "view_as_real": _as_complex(1),
}
