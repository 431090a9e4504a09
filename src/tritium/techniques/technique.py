"""The type of this folder's declarations: one way to make a part of a pipeline faster or smaller.

A technique is one file or folder that declares one value `TECHNIQUE`. `tritium.techniques.catalog()` finds it, and so
does the entry point group `tritium.techniques` for plug-ins. `Plan`, `Choice`, recipes, trials, the summary, the report
and the command line iterate over the catalogue, so adding a technique edits no other file.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from torch import nn

from tritium.config import CompilationConfig
from tritium.errors import CatalogError
from tritium.passes import Pass

if TYPE_CHECKING:
    from tritium.techniques.choice import Choice

C = TypeVar("C")
S = TypeVar("S")

# Wraps a call: gets the call inside it with its arguments, and returns the result.
Around = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


class Part(Protocol):
    """A part of a pipeline, as its techniques see it: a denoiser, one direction of a VAE, a text encoder.

    The properties may be read at any time. `around` and `compile_with` may be called in `apply` alone. The part drops
    their effects when the technique is removed, so `remove` restores only what `apply` changed elsewhere, such as
    weights and hooks.
    """

    @property
    def name(self) -> str:
        """Return the name of the part in the plan, such as `transformer` or `vae.decode`."""

    @property
    def module(self) -> nn.Module:
        """Return the module whose calls are the calls of the part."""

    @property
    def component(self) -> nn.Module:
        """Return the pipeline's component that contains the module: the VAE of a decoder, else the module itself."""

    @property
    def blocks(self) -> tuple[nn.Module, ...]:
        """Return the modules whose calls `around_blocks` can wrap, or the module itself if it has none."""

    @property
    def components(self) -> tuple[nn.Module, ...]:
        """Return the modules of the pipelines that run the part."""

    @property
    def how(self) -> str:
        """Return what runs the part: `tritium`, `inductor` or `eager`."""

    @property
    def config(self) -> CompilationConfig:
        """Return how Tritium compiles the part, with the changes of the techniques applied so far."""

    @property
    def schedulers(self) -> tuple[Any, ...]:
        """Return the schedulers of the pipelines that run the part, as they are now: users may replace them."""

    def around(self, function: Around, *, outside: bool = False) -> None:
        """Run a function around every call of the part, outside of compiled and captured code.

        It runs inside the techniques applied before. With `outside`, it also runs outside of timing, memory checks and
        the shape contract, so a call that it answers itself is not counted.
        """

    def compile_with(self, *, passes: Iterable[Pass] = (), apart: Hashable = None, **settings: Any) -> None:
        """Change how the part is compiled: fields of `CompilationConfig`, more passes, and what keeps its code apart.

        Compiled code is shared between choices that compile alike. `apart` is anything else that compiled code depends
        on and that Dynamo does not guard on, such as the strides of weights.
        """

    def around_blocks(self, choose: Callable[[nn.Module], Around | None]) -> None:
        """Run functions around the calls of blocks: `choose` returns the one for a block, or None.

        The part is then compiled block by block: in one program, blocks have no calls to run anything around.
        """

    def compiled(self, *, passes: Iterable[Pass] = (), apart: Hashable = None, **settings: Any) -> Callable[..., Any]:
        """Return the part's call as compiled up to now, to run some steps with it and others with later changes.

        The arguments are those of `compile_with`, for this call alone.
        """


@dataclass(frozen=True)
class Note:
    """A technique's entry in the report: a few words for the summary, and data for the JSON."""

    text: str
    data: Mapping[str, Any] = field(default_factory=dict)


def _no_conflict(_config: Any, _choice: Choice) -> str | None:
    return None


def _no_variants(_part: Part) -> Sequence[Any]:
    return ()


def _one_call(_part: Part, _config: Any) -> int:
    return 1


def _unchanged(config: Any, _compilation: CompilationConfig) -> Any:
    return config


@dataclass(frozen=True, kw_only=True)
class Technique(Generic[C, S]):
    """One way to make a part faster or smaller.

    Args:
        name: The keyword in `Plan(<name>=...)` and `Choice(<name>=...)`, and the key in recipes and reports.
        config: A frozen, hashable dataclass whose fields are JSON values, tuples of them, or frozen dataclasses. It
            checks its fields when it is created and raises a `ConfigError`. A user's `True` becomes `config()`, a
            string `config(string)`, a mapping `config(**mapping)`; JSON lists arrive as tuples.
        applies_to: Called before anything is changed, for each part and config. Returns None, or the reason why the
            part cannot have the technique: an error if a `Choice` names it, a note if the plan has it for all parts.
        apply: Called when a part switches to a choice with this technique, in the order of the catalogue. Changes the
            part and returns the state that `remove` and `report` get. If it raises, it must have undone its own
            changes; the techniques applied before it in this switch are then removed.
        remove: Called when a part switches to a choice without this technique, and when the last handle on the part is
            removed; in reverse order. Restores what `apply` changed, bit for bit.
        conflicts: Called when a `Choice` or `Plan` is created. Returns None, or why this config cannot be combined
            with the rest of the choice: its engine (`choice.how`) or its other techniques (`choice.get(OtherConfig)`).
        variants: Called by `Plan(measure=True)` and `tritium tune`. Returns the configs to try on a part; lossy ones
            only if `part.config.fidelity` is "fast". The plan's own config is not tried again.
        report: Called for the summary and the report. Returns a note for a part that has the technique, or None.
        default: The config of parts for which neither the plan nor a choice has one; None leaves the technique out.
        reconcile: Called when a `Plan` is created, with the plan's config of this technique and its
            `CompilationConfig`. Returns the config that applies, or raises a `ConfigError` if they contradict.
        after: Names of techniques that are applied before this one.
        needs_scheduler: True if it reads the scheduler: parts without one are then declined with a reason.
        is_lossy: True if it changes images. A plan that names it keeps it where it is slower, with a warning; a search
            chooses it only if it saves 3 %.
        is_required: True if a conflict with another technique of a part is an error also where the plan has it for all
            parts.
        settles_after: Returns how many calls of one shape it takes until later calls behave alike; `warmup()` makes
            as many.
    """

    name: str
    config: type[C]
    applies_to: Callable[[Part, C], str | None]
    apply: Callable[[Part, C], S]
    remove: Callable[[Part, S], None]
    conflicts: Callable[[C, Choice], str | None] = _no_conflict
    variants: Callable[[Part], Sequence[C]] = _no_variants
    report: Callable[[Part, C, S], Note | None]
    default: C | None = None
    reconcile: Callable[[C, CompilationConfig], C] = _unchanged
    after: tuple[str, ...] = ()
    needs_scheduler: bool = False
    is_lossy: bool = False
    is_required: bool = False
    settles_after: Callable[[Part, C], int] = _one_call

    def __post_init__(self) -> None:
        if not self.name.isidentifier():
            raise CatalogError(f"technique {self.name!r} cannot be a keyword of Plan; name it by an identifier")
        options: Any = getattr(self.config, "__dataclass_params__", None)
        if options is None or not (options.frozen and options.eq):
            raise CatalogError(
                f"technique {self.name!r} has the config {self.config.__name__}, which cannot be compared; "
                "declare it with @dataclass(frozen=True)"
            )

    def why_not(self, part: Part, config: C) -> str | None:
        """Return why a part cannot have this technique, or None."""
        if self.needs_scheduler and not part.schedulers:
            return "it needs the scheduler; pass tritium.optimize(model, plan, scheduler=...)"
        return self.applies_to(part, config)
