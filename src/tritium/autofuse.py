"""The tiling policy alone, for all code that plain `torch.compile` generates.

    tritium.autofuse.enable()
    fast = torch.compile(model)          # Inductor, with better kernels where sizes are dynamic
    tritium.autofuse.disable()           # unmodified Inductor

`backend="tritium"` applies the policy by `PassConfig.enable_tiling_policy`. Code compiled before does not change.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from tritium import compat
from tritium.config import CompilationConfig
from tritium.passes import Decline
from tritium.tiling import session
from tritium.tiling.policy import OFF, TilingPolicy


def enable(
    *,
    prove_divisibility: bool = True,
    narrow_sizes: bool = True,
    choose_tiling: bool = True,
    choose_reduction: bool = True,
    retry_analysis: bool = True,
    force_tiling: str | Mapping[str, str] | None = None,
) -> Decline | None:
    """Apply the policy to all kernels compiled from now on; each part can be disabled.

    On a torch version with unknown tiling code, change nothing and return the reason.
    """
    pins = CompilationConfig(force_tiling=force_tiling).tiling_pins()
    policy = TilingPolicy(
        prove_divisibility=prove_divisibility,
        narrow_sizes=narrow_sizes,
        choose_tiling=choose_tiling,
        choose_reduction=choose_reduction,
        retry_analysis=retry_analysis,
        pins=pins,
    )
    reason = compat.tiling.decline_tiling()
    if reason is not None:
        return Decline(reason)
    session.set_for_process(session.Session(policy))
    return None


def disable() -> None:
    """Restore Inductor's functions. Without `enable` this does nothing."""
    session.set_for_process(None)


@contextlib.contextmanager
def enabled(**parts: Any) -> Iterator[Decline | None]:
    """Run `enable` inside; afterwards, also after an error, restore the earlier policy and decisions."""
    earlier = session.of_process()
    declined = enable(**parts)
    try:
        yield declined
    finally:
        session.set_for_process(earlier)


def decisions() -> dict[str, Any]:
    """Return the decisions since `enable`: kernels, proofs, and survived errors of Inductor's analysis."""
    log = session.of_process() or session.Session(OFF)
    return {
        "kernels": [kernel.to_dict() for kernel in log.kernels],
        "proofs": log.proofs,
        "retries": list(log.retries),
    }
