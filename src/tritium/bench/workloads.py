"""All workloads by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tritium.bench.decoders import DECODERS
from tritium.bench.dynamic_kernels import DYNAMIC_KERNELS
from tritium.bench.transformers import EXAMPLE, TRANSFORMERS
from tritium.bench.workload import Workload
from tritium.errors import ConfigError, nearest

# A name may stand for several workloads.
WORKLOADS: Mapping[str, Sequence[Workload]] = {
    **{workload.name: (workload,) for workload in (*TRANSFORMERS, EXAMPLE, *DECODERS)},
    "dynamic-kernels": DYNAMIC_KERNELS,
}


def find(name: str, others: Sequence[str] = ()) -> Sequence[Workload]:
    """Return the workloads of a name; `others` are further names that the caller accepts."""
    if name not in WORKLOADS:
        hint = nearest(name, (*WORKLOADS, *others))
        raise ConfigError(f"there is no workload {name!r}, and no folder of that name holds a pipeline; {hint}")
    return WORKLOADS[name]
