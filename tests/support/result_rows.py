"""A measured row, for tests of how rows are kept and shown."""

from tritium.bench.results import Row

ROW = Row(
    workload="flux-512",
    variant="tritium",
    mode="default",
    dtype="float32",
    shrunk=True,
    note="",
    shapes={},
    median_ms=1.0,
    lower_quartile_ms=1.0,
    upper_quartile_ms=1.0,
    samples=5,
    ratio=None,
    first_call_s=1.0,
    first_call_cold=False,
    peak_memory_bytes=None,
    relative_l2=0.0,
    disturbed=False,
)
