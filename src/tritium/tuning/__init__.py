"""CHOICE: the provider of an op at a call, from verdicts: measured, shipped, or predicted.

    choose(op, arguments, config, device_type) -> (provider, why)

A verdict belongs to a key: op, class of shapes, dtype. Tables of verdicts are one JSON file per device: the package ships
those of devices it was tuned on, and the user's cache folder has those of this machine. An op declares in its `Trial` how
its providers are compared:

    in a block     `Trial(shape, alone, block, standard)`: by `tritium tune` alone, inside a compiled block, on device and
                   host. A call measures nothing; costs of other shapes are predicted.
    at first use   `Trial(shape, first_use=FirstUse(...))`: alone, at the first call of a class of shapes on this machine,
                   after a check of each result. Other calls read the verdict; see `first_use`.
"""

from __future__ import annotations

from tritium.tuning import first_use, tables
from tritium.tuning.choice import check_pins, choose, decide
from tritium.tuning.first_use import choose_at_first_use, identity, key_of, once, verdicts
from tritium.tuning.tables import Limit, Machine, ReductionLimits, Table, known, like, load, store
from tritium.tuning.verdict import Key, Verdict

__all__ = [
    "Key",
    "Limit",
    "Machine",
    "ReductionLimits",
    "Table",
    "Verdict",
    "check_pins",
    "choose",
    "choose_at_first_use",
    "decide",
    "forget",
    "identity",
    "key_of",
    "known",
    "like",
    "load",
    "once",
    "store",
    "verdicts",
]


def forget() -> None:
    """Clear verdicts and tables in memory; the files stay."""
    tables.forget()
    first_use.forget()
