"""Whole pipelines whose weights another process keeps: `tritium.attach`."""

from __future__ import annotations

from typing import Any

from tritium.errors import ConfigError
from tritium.sharing import attach as attaching
from tritium.sharing.keeper import Keeper
from tritium.sharing.skeleton import Kinds
from tritium.techniques.quantize.files.rebuild import QUANTIZED_LINEAR

# Modules that no configuration makes.
KINDS: Kinds = {"QuantizedLinear": QUANTIZED_LINEAR}


def attach(name: str, *, wait: float = 0.0) -> Any:
    """Return the pipeline that `tritium keep` keeps under a name: its weights are mapped, not loaded.

    Args:
        name: The name of the keeper, as in `tritium keep PIPELINE --name NAME`.
        wait: Seconds to wait for a keeper that is not there yet, or still loading.

    The pipeline is an ordinary one, of the same class and on the keeper's device. It stops with a `KeeperLost` when the
    keeper ends. Functions that write into weights, such as fusing a LoRA, copy the weights first.
    """
    if not isinstance(name, str):
        raise ConfigError(f"attach takes the name of a keeper, got {name!r}")
    return attaching.attach(name, KINDS, wait)


def keeper(name: str) -> Keeper:
    """Return a keeper of pipelines in this process; `keeper.publish(pipe)` makes the weights of one available."""
    return Keeper(name, KINDS)
