"""Rows, settings and a workload with which benchmarks take milliseconds and generate no code."""

import torch

from tritium import CompilationConfig
from tritium.bench.results import Row
from tritium.bench.settings import Settings
from tritium.bench.workload import Built
from tritium.pipelines.generation import Job

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


class Block(torch.nn.Module):
    """Stands in for a transformer: two linear maps and a norm."""

    def __init__(self):
        super().__init__()
        self.up = torch.nn.Linear(16, 32)
        self.norm = torch.nn.RMSNorm(32, eps=1e-6)
        self.down = torch.nn.Linear(32, 16)

    def forward(self, hidden_states, return_dict=True):
        return (self.down(self.norm(self.up(hidden_states))),)


class Tiny:
    """A workload of one block."""

    name, dynamic = "tiny", (False,)

    def build(self, device, dtype, *, small):
        torch.manual_seed(0)
        model = Block().to(device, dtype).eval()
        inputs = {"hidden_states": torch.randn(1, 7, 16).to(device, dtype), "return_dict": False}
        return Built(model, inputs, "7 tokens", small)


def job(seed=0):
    """Return one small step of a small FLUX pipeline."""
    return Job(prompt="a red circle", width=32, height=32, steps=1, seed=seed, extra={"max_sequence_length": 16})


def is_a_share(what, share):
    """Take progress, and check it."""
    assert 0 <= share <= 1, what
