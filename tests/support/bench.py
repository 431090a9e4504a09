"""A measured row, and settings under which benchmarks take milliseconds and generate no code."""

from tritium import CompilationConfig
from tritium.bench.results import Row
from tritium.bench.settings import Settings

ROW = Row(
    workload="flux",
    variant="tritium",
    mode="default",
    dtype="float32",
    shrunk=True,
    note="2 blocks",
    shapes={"pixels": [1, 3, 512, 768]},
    median_ms=10.0,
    lower_quartile_ms=9.0,
    upper_quartile_ms=11.0,
    samples=5,
    ratio=1.25,
    first_call_s=1.0,
    first_call_cold=True,
    peak_memory_bytes=2**30,
    relative_l2=0.0,
    disturbed=False,
    recompiles=0,
)


def settings(**fields):
    eager = CompilationConfig(engine="eager")
    return Settings(**{"seconds": 0.0, "against": ("eager",), "cold": False, "config": eager, **fields})
