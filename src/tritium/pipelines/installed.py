"""A part on which something is installed: how to switch it between eager, torch.compile and Tritium, and how to undo it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Container, Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import fx, nn

from tritium import compat
from tritium.compiler import collector
from tritium.compiler.backend import Backend
from tritium.config import CompilationConfig
from tritium.errors import PipelineError
from tritium.pipelines import hooks, strides
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

# What `nn.Module.__call__` asks before it runs the module: a class attribute that is None until an instance has its own.
_SLOT = "_compiled_call_impl"


class _Apart(Backend):
    """A backend that differs from one of the same configuration, so that Dynamo keeps what the two compiled apart."""

    def __init__(self, config: CompilationConfig, kind: Hashable) -> None:
        self._kind = kind
        super().__init__(config)

    def _identity(self) -> tuple[Any, ...]:
        return (*super()._identity(), self._kind)


def _inductor_channels_last(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    """torch.compile's own backend by another name, for the same reason."""
    return compat.compile_fx(gm, example_inputs)


class Installed:
    """One part on which something is installed, for one pipeline or for several that share it."""

    def __init__(self, part: Part, choice: Choice, plan: Plan, progress: Progress) -> None:
        self.choice = choice
        # Why this choice, in words, and the milliseconds of each way where they were measured.
        self.why = ""
        self.measured: dict[str, float] = {}
        self.claims = Claims()
        self.entry = Entry(part.entry)
        self.entry.installed = self
        self._inner = self.entry.inner
        # The calls that were in the slots before.
        self._before: dict[nn.Module, Any] = {}
        # The strides that parameters had before their layout was changed.
        self._strides: dict[nn.Parameter, tuple[int, ...]] = {}
        self._removed = False
        # What is in the slots now, by module.
        self._placed: dict[nn.Module, Any] = {}
        self._configure(part, plan, progress)

    def _configure(self, part: Part, plan: Plan, progress: Progress) -> None:
        """Compile from now on as a plan says."""
        self.part, self.plan = part, plan
        for module in (part.entry, *(target.module for target in part.targets)):
            call = module.__dict__.get(_SLOT)
            if _SLOT in module.__dict__ and module not in self._placed:
                self._before.setdefault(module, call)
        # Shapes that are promised are compiled one by one: code for one size is the fastest for it.
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
        """Return what is installed on a module and claimed by a live handle, or None."""
        call = module._compiled_call_impl
        if not isinstance(call, Entry):
            return None
        if not call.installed.claims.handles:
            # The handles were dropped, together with their pipelines.
            call.installed.remove()
            return None
        found: Installed = call.installed
        return found

    def fits(self, part: Part, plan: Plan) -> bool:
        """Whether a plan compiles the part in the same way as the plan that it is installed with."""
        names = ("config", "captures", "dynamic", "shapes", "check_memory")
        alike = all(getattr(self.plan, name) == getattr(plan, name) for name in names)
        return alike and [one.module for one in part.targets] == [one.module for one in self.part.targets]

    def refusal(self, part: Part, choice: Choice, plan: Plan, handle: Any = None) -> str | None:
        """Why another handle's claim rules a choice out, or None."""
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
        """Run the part for a handle, too, with a choice that `refusal` has let through."""
        theirs = self.claims.active(but=handle)
        self.claims.add(handle, choice, strongly=part.name in KEPT)
        if theirs is not None or (choice == PASSIVE and self.choice == PASSIVE):
            return
        if not self.fits(part, handle.plan):
            self.use(PASSIVE)
            self._configure(part, handle.plan, handle.progress)
        self.use(choice)

    def release(self, handle: Any) -> None:
        """Give up a handle's claim; the last one puts the part back."""
        self.claims.drop(handle)
        if not self.claims.handles:
            self.remove()
        elif self.claims.active() is None:
            self.use(PASSIVE)

    def install(self) -> None:
        self.use(self.choice)
        # Around everything, so that what compiles inside of the call is told as this part's.
        self.entry.inner = self.run

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """A call of the part that is not counted."""
        if compat.is_compiling():
            # Part of a graph of the caller's, which is compiled as one.
            return self._inner(*args, **kwargs)
        # The first call in a way is the one that compiles.
        rest = collector.paused() if self.entry.times.calls <= 1 and self.choice.how != "eager" else nullcontext()
        with rest:
            if self.part.guard is not None and self._checks_memory:
                self.part.guard.check(args, kwargs)
            with self._progress.during(self.part.name):
                if self.contract is None or self.choice.how == "eager":
                    return self._inner(*args, **kwargs)
                return self.contract.call(self._inner, args, kwargs)

    def switch(self, handle: Any, choice: Choice) -> None:
        """Change a handle's choice; where another handle runs the part, the part stays as it is."""
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
        """Switch to another way of running; what was compiled before is kept for the next time.

        Given some modules, only the targets among them are compiled, and the others are left alone.
        """
        self._refuse_removed()
        if choice.how != "eager" and (self._before or is_wrapped(self.part.entry)):
            # It was left alone until now, with what somebody else had compiled.
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
        """Compile the targets one by one from now on; back to the whole if the call inside raises."""
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
        """The call of the entry as it was before."""
        return self.entry.before or self.part.entry._call_impl

    @property
    def decides_captures(self) -> bool:
        """Whether its first calls show if its captures pay."""
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
            # Past nn.Module.__setattr__, which would look for parameters first; switching happens between timed calls.
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
        """Modules whose call was replaced since, as by `module.compile()`: what is there stays there."""
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
        # Without a contract there is nothing to follow.
        return prepare(compiled) if self.contract is None else Gate(module, function, compiled, prepare)

    def _prepared(self, choice: Choice, module: nn.Module, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """Let calls of equal sizes look equal to Dynamo: in their strides, and in the sizes that vary."""
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
        """The backend for one way of running; `hooks` are those inside a module that is compiled as a whole."""
        if choice.how == "inductor":
            return _inductor_channels_last if choice.channels_last else "inductor"
        graphs = choice.graphs if choice.graphs is not None else self.plan.captures
        config = self.plan.config
        config = config.with_(graphs=graphs, reuse_blocks=config.reuse_blocks or reuse_blocks)
        # torch 2.11 does not look at the strides of weights again, and would run what it compiled for the other layout.
        kind = (choice.channels_last, hooks)
        return _Apart(config, kind) if any(kind) else Backend(config)

    # In inference mode new storage would make inference tensors of the parameters, for good.
    @torch.inference_mode(mode=False)
    @torch.no_grad()
    def _lay_out(self, *, channels_last: bool) -> None:
        """Give the weights of convolutions another layout, or their own back. Values stay: weights may have changed since."""
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
        """Why the part is compiled block by block and not as one program."""
        whole = self._wholes.get(self.choice)
        return whole.refused if whole is not None else None

    @property
    def what(self) -> str:
        """What is compiled, in words."""
        if self.part.whole and self.choice.how == "tritium" and self.refused is None:
            return f"{type(self.part.entry).__name__} as one program"
        return self.part.what

    @property
    def notes(self) -> list[str]:
        """What a reader of the summary should know of the calls so far."""
        slivers = sum(call.slivers for call in self._any_size)
        found = [f"block by block: its forward is not one program ({self.refused})"] if self.refused else []
        found += [f"{slivers} calls of one row or column ran eagerly"] if slivers else []
        return found + ([self.part.guard.unknown] if self.part.guard is not None and self.part.guard.unknown else [])

    @contextmanager
    def using(self, choice: Choice) -> Iterator[None]:
        before = self.choice
        self.use(choice)
        try:
            yield
        finally:
            self.use(before)
