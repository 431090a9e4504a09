"""Keep ranks together: an exception on one is raised on all, and ranks that have gone separate ways are stopped.

A separate small group carries numbers between the hosts: before each call of a denoiser the ranks exchange whether one
has failed, and which call this is. A rank that fails joins the next exchange. If the others do not come to it, they wait
in a collective for this rank: it destroys the groups of the mesh, and the others raise. Then all create the groups again.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import platform
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from tritium import compat, device
from tritium.compiler import together
from tritium.errors import RankError, brief
from tritium.techniques.parallel import mesh as meshes

# Seconds that a rank which has failed waits for the others, before it destroys the groups in which they may wait.
_GRACE = 0.5

# Seconds that a rank waits while another one compiles the same graph; then it compiles too.
_COMPILING = 600

# The numbers of exchanges that belong to no call.
_CAPTURE, _END, START = -1, -2, -3


@dataclass(frozen=True)
class _Report:
    """What a rank tells the others after a failure."""

    # Empty if the rank did not fail.
    error: str
    # True if it failed because another rank left a collective.
    is_left: bool
    # True if the groups have to be created again.
    renews: bool


class Control:
    """The exchange of numbers and small objects between the hosts of all ranks."""

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._group = dist.new_group(backend="gloo", group_desc="tritium control")
        # True while a guard outside of the parts reports failures.
        self.is_guarded = False
        # The calls of parts since the outermost guard began.
        self.calls = 0
        # In the order in which they came, which is equal on all ranks.
        self._watchers: list[weakref.ref[Any]] = []

    def watch(self, watcher: Any) -> None:
        """Call `watcher.after_failure(renewed)` on all ranks after a failure."""
        self._watchers = [*(one for one in self._watchers if one() is not None), weakref.ref(watcher)]

    # --- exchange ---

    def step(self, place: int) -> None:
        """Raise if another rank has failed, or is at another place."""
        _, first, last, _ = self._exchange(place)
        if first != last:
            raise self._strayed()

    def all(self, own: bool) -> bool:
        """Return True if the argument is true on all ranks, which call it alike."""
        return not self._exchange(_CAPTURE, is_unable=not own)[3]

    def gather(self, value: Any) -> list[Any]:
        """Return the value of each rank."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self._group)
        return values

    def _exchange(self, place: int, *, is_unable: bool = False) -> tuple[int, int, int, int]:
        """Return whether a rank has failed, the least and the greatest place, and whether one is unable."""
        numbers = torch.tensor([0, -place, place, int(is_unable)])
        dist.all_reduce(numbers, dist.ReduceOp.MAX, group=self._group)
        has_failed, least, greatest, unable = numbers.tolist()
        if has_failed:
            raise self._settled(_Report("", is_left=False, renews=False))
        return has_failed, -least, greatest, unable

    def _strayed(self) -> RankError:
        self._tell_watchers(renewed=False)
        return RankError(
            "the ranks have made different calls, so they cannot exchange results; give all of them the same arguments"
        )

    # --- failures ---

    def failed(self, error: BaseException) -> BaseException:
        """Tell the other ranks; return the error to raise, which is this one if it was not caused by another rank."""
        if isinstance(error, RankError):
            # Raised on all ranks.
            return error
        is_left = compat.collectives.was_left_by_others(error)
        try:
            renews = self._join(is_left=is_left)
            raised = self._settled(_Report(brief(error), is_left=is_left, renews=renews))
        except RuntimeError:
            # The other ranks have ended.
            return error
        return raised if is_left else error

    def _join(self, *, is_left: bool) -> bool:
        """Take part in the exchange in which the others learn of a failure; return True if the groups were destroyed."""
        work = dist.all_reduce(torch.tensor([1, 0, 0, 0]), dist.ReduceOp.MAX, group=self._group, async_op=True)
        deadline = time.monotonic() + (0.0 if is_left else _GRACE)
        while not work.is_completed() and time.monotonic() < deadline:
            time.sleep(0.005)
        renews = not work.is_completed()
        if renews:
            meshes.abandon()
        work.wait()
        return renews

    def _settled(self, report: _Report) -> RankError:
        """Exchange reports, create groups again where needed, and return the error of the rank that failed first."""
        reports: list[_Report] = self.gather(report)
        renews = any(one.renews for one in reports)
        if renews:
            meshes.renew()
        self._tell_watchers(renewed=renews)
        failed = [rank for rank, one in enumerate(reports) if one.error]
        first = next((rank for rank in failed if not reports[rank].is_left), failed[0])
        return RankError(f"rank {first} raised {reports[first].error}")

    def _tell_watchers(self, *, renewed: bool) -> None:
        for reference in list(self._watchers):
            watcher = reference()
            if watcher is not None:
                watcher.after_failure(renewed=renewed)

    # --- guards ---

    @contextlib.contextmanager
    def guarded(self) -> Iterator[None]:
        """Raise on all ranks what one raises inside; contexts inside of this one do nothing."""
        if self.is_guarded:
            yield
            return
        self.is_guarded, self.calls = True, 0
        try:
            yield
            self.step(_END)
        except BaseException as error:
            raised = self.failed(error)
            if raised is error:
                raise
            raise raised from error
        finally:
            self.is_guarded = False

    def around_call(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call of a part between exchanges."""
        if compat.dynamo.is_compiling() or device.is_capturing():
            return call(*args, **kwargs)
        with self.guarded():
            self.step(self.calls)
            return call(*args, **kwargs)

    def count_call(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Count a call of a part, also one that is left out."""
        self.calls += 1
        return call(*args, **kwargs)

    # --- compiling ---

    @contextlib.contextmanager
    def turn(self, key: str) -> Iterator[None]:
        """Let one rank of a machine compile a graph first; the others wait, and load what it stored."""
        store, name = compat.collectives.store(), f"tritium/{platform.node()}/{key}"
        if store.add(name, 1) > 1:
            with contextlib.suppress(RuntimeError):
                store.wait([f"{name}/done"], datetime.timedelta(seconds=_COMPILING))
            yield
            return
        try:
            yield
        finally:
            store.set(f"{name}/done", "1")


def control() -> Control | None:
    """Return the exchange with the other ranks, or None if there are none; all ranks must call it alike."""
    if not dist.is_initialized() or dist.get_world_size() == 1 or dist.get_backend() == "fake":
        return None
    return _control(dist.group.WORLD)


@functools.cache
def _control(_world: Any) -> Control:
    together.RANKS[:] = [Control()]
    return together.RANKS[0]  # type: ignore[return-value]
