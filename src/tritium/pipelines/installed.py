"""Switch an installed part between eager, torch.compile and Tritium, and undo the installation."""

from __future__ import annotations

import functools
from collections.abc import Callable, Container, Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import fx, nn

from tritium import compat
from tritium.compiler.backend import Backend
from tritium.config import CompilationConfig
from tritium.errors import PipelineError
from tritium.pipelines import collector, hooks, strides
from tritium.pipelines.claims import PASSIVE, Claims
from tritium.pipelines.contract import Contract
from tritium.pipelines.gate import Gate
from tritium.pipelines.own_code import call_with_own_code
from tritium.pipelines.parts import KEPT, Part, is_wrapped
from tritium.pipelines.plan import Choice, Plan
from tritium.pipelines.progress import Progress
from tritium.pipelines.sizes import AnySize
from tritium.pipelines.watch import Entry
from tritium.pipelines.whole import Whole

# The attribute that `nn.Module.__call__` reads first: None on the class, set on instances.
_SLOT = "_compiled_call_impl"


class _Apart(Backend):
    """A backend unequal to one of the same configuration: Dynamo then keeps their compiled code apart."""

    def __init__(self, config: CompilationConfig, kind: Hashable) -> None:
        self._kind = kind
        super().__init__(config)

    def _identity(self) -> tuple[Any, ...]:
        return (*super()._identity(), self._kind)


def _inductor_channels_last(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    """Compile with Inductor under another name: Dynamo keeps its code apart from the other layout's."""
    return compat.inductor.compile_fx(gm, example_inputs)


class Installed:
    """The installation on one part, for one pipeline or several that share it."""

    def __init__(self, part: Part, choice: Choice, plan: Plan, progress: Progress) -> None:
        self.choice = choice
        # The reason for this choice, and the milliseconds of each way of running that was measured.
        self.why = ""
        self.measured: dict[str, float] = {}
        self.claims = Claims()
        self.entry = Entry(part.entry)
        self.entry.installed = self
        self._inner = self.entry.inner
        # The values of the slots before the installation.
        self._before: dict[nn.Module, Any] = {}
        # The strides of parameters before their layout was changed.
        self._strides: dict[nn.Parameter, tuple[int, ...]] = {}
        self._removed = False
        # The values that this class put into the slots, by module.
        self._placed: dict[nn.Module, Any] = {}
        self._configure(part, plan, progress)

    def _configure(self, part: Part, plan: Plan, progress: Progress) -> None:
        """Set how the part is compiled from now on."""
        self.part, self.plan = part, plan
        for module in (part.entry, *(target.module for target in part.targets)):
            call = module.__dict__.get(_SLOT)
            if _SLOT in module.__dict__ and module not in self._placed:
                self._before.setdefault(module, call)
        # Compile promised shapes one by one: code for a single size is the fastest for it.
        self._dynamic = False if plan.dynamic is None and plan.shapes is not None else plan.dynamic
        self.contract = (
            Contract(part.name, part.entry, plan.shapes.on_violation, len(plan.shapes.buckets))
            if plan.shapes is not None
            else None
        )
        self._checks_memory = plan.check_memory
        self._progress = progress
        self._wholes: dict[Choice, Whole] = {}
        self._calls: dict[tuple[Choice, nn.Module], Callable[..., Any]] = {}
        self._any_size: list[AnySize] = []

    @classmethod
    def on(cls, module: nn.Module) -> Installed | None:
        """Return the installation on a module if a live handle claims it, else None."""
        call = module._compiled_call_impl
        if not isinstance(call, Entry):
            return None
        if not call.installed.claims.handles:
            # The handles were dropped together with their pipelines.
            call.installed.remove()
            return None
        found: Installed = call.installed
        return found

    def fits(self, part: Part, plan: Plan) -> bool:
        """Return True if a plan compiles the part in the same way as the current plan."""
        names = ("config", "captures", "dynamic", "shapes", "check_memory")
        alike = all(getattr(self.plan, name) == getattr(plan, name) for name in names)
        return alike and [one.module for one in part.targets] == [one.module for one in self.part.targets]

    def refusal(self, part: Part, choice: Choice, plan: Plan, handle: Any = None) -> str | None:
        """Return why another handle's claim rules out a choice, or None."""
        theirs = self.claims.active(but=handle)
        if theirs is None or choice == PASSIVE or (choice == theirs and self.fits(part, plan)):
            return None
        other = type(next(one.pipe for one in self.claims.handles if one is not handle)).__name__
        return (
            f"{part.name} is shared with another pipeline ({other}) that is optimized already and runs it with {theirs}: "
            f"give both the same Plan, leave it alone here with Plan(components={{{part.name!r}: 'eager'}}), or call "
            "remove() on that one's handle first"
        )

    def claim(self, handle: Any, part: Part, choice: Choice) -> None:
        """Add a handle's claim, and run the part with its choice; call only if `refusal` returned None."""
        theirs = self.claims.active(but=handle)
        self.claims.add(handle, choice, strongly=part.name in KEPT)
        if theirs is not None or (choice == PASSIVE and self.choice == PASSIVE):
            return
        if not self.fits(part, handle.plan):
            self.use(PASSIVE)
            self._configure(part, handle.plan, handle.progress)
        self.use(choice)

    def release(self, handle: Any) -> None:
        """Drop a handle's claim; restore the part if it was the last one."""
        self.claims.drop(handle)
        if not self.claims.handles:
            self.remove()
        elif self.claims.active() is None:
            self.use(PASSIVE)

    def install(self) -> None:
        self.use(self.choice)
        # `run` wraps everything, so that compilation inside the call is reported for this part.
        self.entry.inner = self.run

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run a call of the part without counting it."""
        if compat.dynamo.is_compiling():
            # The caller compiles a larger graph that includes this part.
            return (self._plain if isinstance(self._inner, Whole) else self._inner)(*args, **kwargs)
        # The first call after a switch compiles.
        rest = collector.paused() if self.entry.times.calls <= 1 and self.choice.how != "eager" else nullcontext()
        with rest:
            if self.part.guard is not None and self._checks_memory:
                self.part.guard.check(args, kwargs)
            with self._progress.during(self.part.name):
                if self.contract is None or self.choice.how == "eager":
                    return self._inner(*args, **kwargs)
                return self.contract.call(self._inner, args, kwargs)

    def switch(self, handle: Any, choice: Choice) -> None:
        """Change a handle's choice; if another handle runs the part, its choice stays in effect."""
        self._refuse_removed()
        self.claim(handle, self.part, choice)
        if self.claims.active() is None:
            self.use(PASSIVE)

    def _refuse_removed(self) -> None:
        if self._removed:
            raise PipelineError(
                f"{self.part.name} cannot be switched: its handle is removed; call tritium.optimize on the pipeline again"
            )

    def use(self, choice: Choice, among: Container[nn.Module] | None = None) -> None:
        """Switch to another way of running; keep earlier compiled code for the next switch.

        With `among`, compile only the targets among those modules.
        """
        self._refuse_removed()
        if choice.how != "eager" and (self._before or is_wrapped(self.part.entry)):
            # The part was eager until now and may have been compiled by other code.
            hooks.check(self.part)
        self.choice = choice
        self.entry.switch(choice)
        if self.part.whole and choice.how == "tritium" and among is None:
            self._use_whole(choice)
        else:
            self._use_targets(choice, among)
        self._put(self.part.entry, self.entry)
        self._lay_out(channels_last=choice.channels_last)

    def _use_whole(self, choice: Choice) -> None:
        for target in self.part.targets:
            if target.module is not self.part.entry:
                self._put_back(target.module)
        if choice not in self._wholes:

            def compile_for(hooks: Hashable) -> Callable[..., Any]:
                backend = self._backend(choice, hooks, reuse_blocks=True)
                return self._compiled(self.part.entry, choice, backend, fullgraph=True)

            self._wholes[choice] = Whole(self.part.entry, compile_for, lambda: self._by_blocks(choice))
        self._inner = self._wholes[choice]

    @contextmanager
    def _by_blocks(self, choice: Choice) -> Iterator[Callable[..., Any]]:
        """Compile the targets one by one from now on; go back to the whole if the call inside raises."""
        self._use_targets(choice)
        try:
            yield self._inner
        except BaseException:
            self._use_whole(choice)
            raise

    def _use_targets(self, choice: Choice, among: Container[nn.Module] | None = None) -> None:
        for target in self.part.targets:
            call = self._call(choice, target.module) if among is None or target.module in among else None
            if target.module is self.part.entry:
                self._inner = call or self._plain
            elif call is not None:
                self._put(target.module, call)
            else:
                self._put_back(target.module)
        if all(target.module is not self.part.entry for target in self.part.targets):
            self._inner = self._plain

    @property
    def _plain(self) -> Callable[..., Any]:
        """Return the entry's call as it was before the installation."""
        return self.entry.before or self.part.entry._call_impl

    @property
    def decides_captures(self) -> bool:
        """Return True if the part's first calls decide about captures."""
        graphs = self.choice.graphs if self.choice.graphs is not None else self.plan.captures
        on_gpu = any(parameter.is_cuda for parameter in self.part.entry.parameters())
        return self.choice.how == "tritium" and graphs == "auto" and on_gpu

    def remove(self) -> None:
        self._removed = True
        for target in self.part.targets:
            self._put_back(target.module)
        self._put_back(self.part.entry)
        self._lay_out(channels_last=False)

    def _put(self, module: nn.Module, call: Callable[..., Any] | None) -> None:
        if module not in self.replaced:
            # Write to `__dict__`: nn.Module.__setattr__ searches the parameters, and trials switch between timed calls.
            module.__dict__[_SLOT] = call
            self._placed[module] = call

    def _put_back(self, module: nn.Module) -> None:
        if module in self.replaced or module not in self._placed:
            return
        del self._placed[module]
        if module in self._before:
            module.__dict__[_SLOT] = self._before[module]
        else:
            module.__dict__.pop(_SLOT, None)

    @property
    def replaced(self) -> list[nn.Module]:
        """Return modules whose call was replaced after the installation, as by `module.compile()`; it stays."""
        return [module for module, call in self._placed.items() if module.__dict__.get(_SLOT) is not call]

    def _call(self, choice: Choice, module: nn.Module) -> Callable[..., Any] | None:
        if choice.how == "eager":
            return None
        key = (choice, module)
        if key not in self._calls:
            self._calls[key] = self._compiled(module, choice, self._backend(choice))
        return self._calls[key]

    def _compiled(
        self, module: nn.Module, choice: Choice, backend: Any, *, fullgraph: bool = False
    ) -> Callable[..., Any]:
        function = call_with_own_code(module) if module is self.part.entry else module._call_impl
        compiled: Callable[..., Any] = torch.compile(
            function, backend=backend, dynamic=self._dynamic, fullgraph=fullgraph
        )
        prepare = functools.partial(self._prepared, choice, module)
        # Without a contract there are no decisions to follow.
        return prepare(compiled) if self.contract is None else Gate(module, function, compiled, prepare)

    def _prepared(self, choice: Choice, module: nn.Module, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a compiled call so that calls of equal sizes look equal to Dynamo.

        Strides are made equal, and the sizes that vary are marked.
        """
        if module is self.part.entry:
            compiled = functools.partial(compiled, module)
        if choice.how == "tritium":
            compiled = strides.evened(compiled)
        if not self.part.varying or self._dynamic is False:
            return compiled
        any_size = AnySize(module, compiled, self.part.varying)
        self._any_size.append(any_size)
        return any_size

    def _backend(self, choice: Choice, hooks: Hashable = None, *, reuse_blocks: bool = False) -> Any:
        """Return the backend for one way of running; `hooks` are those of a module compiled as a whole."""
        if choice.how == "inductor":
            return _inductor_channels_last if choice.channels_last else "inductor"
        graphs = choice.graphs if choice.graphs is not None else self.plan.captures
        config = self.plan.config
        config = config.with_(graphs=graphs, reuse_blocks=config.reuse_blocks or reuse_blocks)
        # torch 2.11 does not guard on strides of weights and would reuse code that was compiled for the other layout.
        kind = (choice.channels_last, hooks)
        return _Apart(config, kind) if any(kind) else Backend(config)

    # In inference mode, new storage would turn the parameters into inference tensors permanently.
    @torch.inference_mode(mode=False)
    @torch.no_grad()
    def _lay_out(self, *, channels_last: bool) -> None:
        """Convert convolution weights to channels-last, or back to their strides; keep their current values."""
        if not channels_last:
            for parameter, strides in self._strides.items():
                own = torch.empty_strided(parameter.shape, strides, dtype=parameter.dtype, device=parameter.device)
                parameter.data = own.copy_(parameter.data)
            self._strides.clear()
            return
        for parameter in self.part.entry.parameters():
            layout = {4: torch.channels_last, 5: torch.channels_last_3d}.get(parameter.dim())
            if layout is not None and parameter not in self._strides:
                self._strides[parameter] = parameter.stride()
                parameter.data = parameter.data.contiguous(memory_format=layout)

    @property
    def refused(self) -> str | None:
        """Return why the part is compiled block by block and not as one program, or None."""
        whole = self._wholes.get(self.choice)
        return whole.refused if whole is not None else None

    @property
    def what(self) -> str:
        """Describe what is compiled."""
        if self.part.whole and self.choice.how == "tritium" and self.refused is None:
            return f"{type(self.part.entry).__name__} as one program"
        return self.part.what

    @property
    def notes(self) -> list[str]:
        """Return notes on the calls so far, for the summary."""
        slivers = sum(call.slivers for call in self._any_size)
        found = [f"block by block: its forward is not one program ({self.refused})"] if self.refused else []
        found += [f"{slivers} calls of one row or column ran eagerly"] if slivers else []
        return found + ([self.part.guard.unknown] if self.part.guard is not None and self.part.guard.unknown else [])

    @contextmanager
    def using(self, choice: Choice, among: Container[nn.Module] | None = None) -> Iterator[None]:
        before = self.choice
        self.use(choice, among)
        try:
            yield
        finally:
            self.use(before)
