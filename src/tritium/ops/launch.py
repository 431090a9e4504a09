"""How kernels are launched: what is asked before, and how a launch is remembered.

Binding thirty arguments to a Triton kernel costs the host several times what the kernel costs the device, and a CPU
computes on small tensors in the time that Python takes to look at their strides. So the first launch with arguments of
some shapes is remembered; later ones only fill in addresses.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from tritium import device, envs

NARROW = (torch.float16, torch.bfloat16, torch.float32)

# Shapes that a provider remembers; whoever has more than that has other worries than the host's time.
REMEMBERED = 1024


def cannot_launch(*tensors: torch.Tensor | None) -> str | None:
    """Why a Triton kernel that computes in float32 cannot take these tensors, or None."""
    given = [tensor for tensor in tensors if tensor is not None]
    if not device.has_triton():
        return "triton is not installed"
    elsewhere = {tensor.device.type for tensor in given} - {"cuda"}
    if elsewhere and not envs.triton_interpreted():
        return f"Triton kernels run on a GPU, this graph runs on {', '.join(sorted(elsewhere))}"
    wide = {str(tensor.dtype) for tensor in given if tensor.dtype not in NARROW}
    return f"the kernel computes in float32, an input is {', '.join(sorted(wide))}" if wide else None


Run = Callable[..., Any]


@dataclass(frozen=True)
class Launch:
    """One launch as it happened: what was called, and every argument in the kernel's order."""

    runner: Run
    values: tuple[Any, ...]


@dataclass
class Record:
    """What a provider did: its launches in their order, and the memory that it took for itself alone."""

    launches: list[Launch] = field(default_factory=list)
    scratch: list[torch.Tensor] = field(default_factory=list)


_RECORD: ContextVar[Record | None] = ContextVar("launches", default=None)


# Triton kernels that this process has launched, as they were compiled, by their hash.
_STARTED: dict[str, Any] = {}


def start(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """Launch a Triton kernel; inside a provider that is remembered, note how."""
    compiled = kernel[grid](*arguments, **options)
    if compiled is None:
        # Interpreted.
        return
    _STARTED[compiled.hash] = compiled
    record = _RECORD.get()
    if record is not None:
        values = dict(zip(kernel.arg_names, arguments, strict=False)) | options
        runner = compiled[(*grid, 1, 1)[:3]]
        record.launches.append(Launch(runner, tuple(values[name] for name in kernel.arg_names)))


def started() -> list[Any]:
    """The Triton kernels of ops that this process has launched: neither Inductor nor torch's artifacts know of them."""
    return list(_STARTED.values())


def call(function: Run, *arguments: Any) -> None:
    """Call a C++ kernel with the addresses of tensors; inside a provider that is remembered, note how."""
    function(*(value.data_ptr() if isinstance(value, torch.Tensor) else value for value in arguments))
    record = _RECORD.get()
    if record is not None:
        record.launches.append(Launch(function, arguments))


def scratch(like: torch.Tensor, *shape: int) -> torch.Tensor:
    """Float32 memory that one launch hands to the next, and nobody else sees."""
    made = like.new_empty(shape, dtype=torch.float32)
    record = _RECORD.get()
    if record is not None:
        record.scratch.append(made)
    return made


@dataclass(frozen=True)
class Address:
    """All that a tensor descriptor asks of its tensor."""

    address: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        return self.address


@dataclass(frozen=True)
class Step:
    """A launch without its addresses: which of the kernel's arguments are those of which tensor."""

    runner: Run
    values: list[Any]
    # (place among the kernel's arguments, number of the input), and the same for what is made anew.
    inputs: list[tuple[int, int]]
    made: list[tuple[int, int]]
    # The same for tensor descriptors of inputs.
    tables: list[tuple[int, int]]

    def launch(self, addresses: Sequence[int], made: Sequence[int]) -> None:
        values = self.values.copy()
        for place, index in self.inputs:
            values[place] = addresses[index]
        for place, index in self.made:
            values[place] = made[index]
        for place, index in self.tables:
            values[place] = replace(values[place], base=Address(addresses[index], values[place].base.dtype))
        self.runner(*values)


@dataclass(frozen=True)
class Plan:
    """The launches of a provider, and what it makes for them: its results first, then memory for itself."""

    steps: list[Step]
    made: list[tuple[torch.Size, tuple[int, ...], torch.dtype]]
    results: int
    single: bool

    def launch(self, addresses: Sequence[int], where: torch.device) -> Any:
        """The results for inputs at some addresses; None where one of the inputs is written to."""
        made = [torch.empty_strided(shape, stride, dtype=dtype, device=where) for shape, stride, dtype in self.made]
        own = [tensor.data_ptr() for tensor in made]
        for step in self.steps:
            step.launch(addresses, own)
        if not self.results:
            return None
        return made[0] if self.single else tuple(made[: self.results])


def remembered(run: Run) -> Run:
    """A provider whose launches are kept for arguments of the same shapes, strides, dtypes and alignment.

    What it gives must depend on the values of its tensors through those launches alone.
    """
    plans: dict[Any, Plan | None] = {}

    @functools.wraps(run)
    def launched(*arguments: Any) -> Any:
        tensors: list[torch.Tensor] = []
        key = signature(arguments, tensors)
        where = tensors[0].device
        addresses = [tensor.data_ptr() for tensor in tensors]
        if where.type == "cuda":
            if where.index != torch.cuda.current_device():
                with torch.cuda.device(where):
                    return launched(*arguments)
            # Triton compiles other code for what is not aligned.
            conditions: tuple[Any, ...] = (where.index, *(address % 16 for address in addresses))
        else:
            conditions = (where.type, torch.get_num_threads())
        # Two inputs that are one tensor now may be two the next time.
        shared = tuple(map(addresses.index, addresses))
        known = (conditions, key, shared)
        plan = plans.get(known)
        if plan is not None:
            return plan.launch(addresses, where)
        if known in plans:
            return run(*arguments)
        record = Record()
        token = _RECORD.set(record)
        try:
            result = run(*arguments)
        finally:
            _RECORD.reset(token)
        if len(plans) >= REMEMBERED:
            plans.clear()
        plans[known] = _planned(record, addresses, result)
        return result

    return launched


def signature(arguments: Sequence[Any], tensors: list[torch.Tensor]) -> tuple[Any, ...]:
    """What must be equal for a plan to hold; the tensors met on the way are appended to `tensors`."""
    key: list[Any] = []
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            tensors.append(argument)
            dtype = argument.dtype
            key += (dtype, argument.shape, argument.stride(), dtype.is_complex and argument.is_conj())
        elif isinstance(argument, (list, tuple)):
            key.append(signature(argument, tensors))
        else:
            key.append(argument)
    return tuple(key)


def _planned(record: Record, addresses: list[int], result: Any) -> Plan | None:
    """The plan of what was launched; None where that was not on inputs, results and memory noted as scratch alone."""
    if not record.launches:
        return None
    out = result if isinstance(result, tuple) else () if result is None else (result,)
    made = [*out, *record.scratch]
    steps = [_step(launch, addresses, [tensor.data_ptr() for tensor in made]) for launch in record.launches]
    known = [step for step in steps if step is not None]
    if len(known) < len(steps):
        return None
    shapes = [(tensor.shape, tensor.stride(), tensor.dtype) for tensor in made]
    return Plan(known, shapes, results=len(out), single=not isinstance(result, tuple))


def _step(launch: Launch, addresses: list[int], made: list[int]) -> Step | None:
    # Without the tensors: a plan would keep their memory.
    values = [None if isinstance(value, torch.Tensor) else value for value in launch.values]
    step = Step(launch.runner, values, inputs=[], made=[], tables=[])
    for place, value in enumerate(launch.values):
        base = getattr(value, "base", None)
        if isinstance(base, torch.Tensor):
            if base.data_ptr() not in addresses:
                return None
            values[place] = replace(value, base=Address(0, base.dtype))
            step.tables.append((place, addresses.index(base.data_ptr())))
        if not isinstance(value, torch.Tensor):
            continue
        if value.data_ptr() in made:
            step.made.append((place, made.index(value.data_ptr())))
        elif value.data_ptr() in addresses:
            step.inputs.append((place, addresses.index(value.data_ptr())))
        else:
            # A copy that the provider made first: it would have to be made again.
            return None
    return step
