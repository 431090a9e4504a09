"""Choose the provider of an attention, dense or block-sparse, and call it.

    runtime   the fastest in a measurement on this machine; the first call of a kind is measured, even while compiling;
              on one of several ranks as static, so that all choose the same
    static    the winner in a shipped table, otherwise by a rule
    lossy     as runtime, with lossy providers where they save 3 %; `lossy:NAME` takes that one wherever it can compute
    a name    the provider of this name

`TRITIUM_ATTENTION` is one of these, and overrides the choice of dense attention.

A graph of Dynamo contains `tritium::choose_<op>`, which decomposes into other operators: it chooses when it is traced, for
the sizes of that call. A compiled model makes no choice at run time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from tritium import compat, envs, ops, tuning
from tritium.errors import ArgumentError, nearest
from tritium.ops import REFERENCE, Arguments, Op, attention, block_sparse_attention
from tritium.ops.op import present
from tritium.report.ledger import LEDGER

RUNTIME, STATIC, LOSSY = MODES = ("runtime", "static", "lossy")

DENSE, SPARSE = attention.OP.name, block_sparse_attention.OP.name
OPS = {DENSE: attention.OP, SPARSE: block_sparse_attention.OP}

_LIBRARY = torch.library.Library("tritium", "FRAGMENT")


def compute(name: str, by: str, *arguments: Any) -> torch.Tensor:
    """Compute the op `name`, `DENSE` or `SPARSE`, by a mode or a provider."""
    if torch.compiler.is_dynamo_compiling():
        operator = getattr(torch.ops.tritium, f"choose_{name}").default
        return operator(*arguments, by, identity(name))  # type: ignore[no-any-return]
    return _compute(OPS[name], *arguments, by, "")


def _compute(op: Op, *arguments: Any) -> torch.Tensor:
    *values, by, _identity = arguments
    given = Arguments(**dict(zip(op.parameters, values, strict=True)))
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    if any(map(compat.traced.is_traced, tensors)):
        # Symbolic sizes have other values in other calls.
        name = choose(op, given, by)
        frame = compat.dynamo.compiling_frame()
        if frame is not None:
            LEDGER.attention_chosen(frame.compile_id, name, _words(op, given))
        return _implementation(op, name)(given)
    forms = tuple((tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors)
    grad = compat.dynamo.needs_gradients(*tensors)
    ranks = compat.collectives.has_other_ranks()
    call = (op.name, forms, given.q.device, given.causal, by, grad, ranks, envs.get(envs.ATTENTION))
    return tuning.once(call, lambda: _implementation(op, choose(op, given, by)))(given)


def _implementation(op: Op, name: str) -> Callable[[Arguments], torch.Tensor]:
    provider = ops.providers(op).get(name)
    if provider is not None and provider.inlined:
        return provider.run  # type: ignore[return-value]
    return lambda given: op.overload(*vars(given).values(), provider=name)


def choose(op: Op, given: Arguments, by: str) -> str:
    """Return the name of the provider for a call; raise if a named provider cannot compute it."""
    override = envs.get(envs.ATTENTION) if op.name == DENSE else None
    prefix = f"{envs.ATTENTION}={override}: " if override else ""
    name = override or by
    wanted = name.removeprefix(f"{LOSSY}:") if name.startswith(f"{LOSSY}:") else ""
    if wanted and ops.providers(op)[wanted].decline(given) is None:
        return wanted
    if name in MODES or wanted:
        is_lossy = name == LOSSY and op.trial is not None and op.trial.lossy_use is not None
        # Measurements on each rank could differ, and providers round differently.
        measures = name != STATIC and not compat.collectives.has_other_ranks()
        return tuning.choose_at_first_use(op, given, measures=measures, lossy=is_lossy)[0]
    if problem := _problem(op.name, name):
        raise ArgumentError(prefix + problem)
    providers = ops.providers(op)
    if name in providers and (reason := providers[name].decline(given)):
        able = ", ".join(other for other, provider in providers.items() if provider.decline(given) is None)
        raise ArgumentError(
            f"{prefix}provider {name!r} cannot compute attention of {_words(op, given)}: {reason}; those that can: "
            f"{able or REFERENCE}"
        )
    return name


def check_name(op: str, name: str | None) -> None:
    """Raise for the name of a provider that no call of an op has."""
    if name is not None and (problem := _problem(op, name)):
        raise ArgumentError(problem)


# Dynamo treats the results as constants: it cannot trace the search for installed packages.
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _problem(op: str, name: str) -> str | None:
    known = list(ops.providers(OPS[op]))
    if op == SPARSE:
        # A graph calls it as one operator; dense attention has PyTorch's `math` instead.
        known.append(REFERENCE)
    return None if name in known else f"there is no attention provider {name!r}; {nearest(name, known)}"


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def identity(op: str) -> str:
    """Return a digest of everything but the call that choices depend on, for a graph's cache key."""
    return f"{envs.get(envs.ATTENTION) or ''} {tuning.identity(OPS[op])}"


def _words(op: Op, given: Arguments) -> str:
    if op.name == DENSE:
        return attention.words(given)
    queries, blocks, keys = map(present, (given.q.shape[1], given.counts.shape[2], given.k.shape[1]))
    return f"sparse, {given.q.dtype} on {given.q.device.type}, {queries} queries in {blocks} blocks, {keys} keys"


def _register(op: Op) -> None:
    inputs, _, output = op.schema.rpartition(") -> ")
    _LIBRARY.define(f"choose_{op.name}{inputs}, str by, str identity) -> {output}")
    implementation: Callable[..., torch.Tensor] = functools.partial(_compute, op)
    _LIBRARY.impl(f"choose_{op.name}", implementation, "CompositeImplicitAutograd")


for _op in OPS.values():
    _register(_op)
