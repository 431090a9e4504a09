"""Fixtures for all tests. Imports nothing of torch before the environment is right for this machine."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path

import hypothesis
import pytest

from support import checkout

# The time of an example must never decide a test.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")


def _bf16_matmul_survives() -> bool:
    """Return True if a bf16 matrix product works: some virtual machines advertise AMX and then fault on it."""
    program = "import torch; a = torch.ones(32, 32, dtype=torch.bfloat16); torch.nn.functional.linear(a, a)"
    return subprocess.run([sys.executable, "-c", program], capture_output=True, check=False).returncode == 0


def pytest_configure(config: pytest.Config) -> None:
    # oneDNN reads this once, when torch is imported.
    if "ONEDNN_MAX_CPU_ISA" not in os.environ and "torch" not in sys.modules and not _bf16_matmul_survives():
        os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX512_CORE_BF16"
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    # Inherited by every process that a test, or Tritium in a test, starts.
    os.environ["PYTHONPATH"] = checkout.environment()["PYTHONPATH"]
    # Compilers create millions of objects and little garbage: with the default thresholds, collecting takes a tenth of the time.
    gc.set_threshold(100_000, 50, 100)


# Files that take longest, longest first: a worker that starts one of them last would run alone at the end.
LONG = (
    *("census/test_census.py", "compiler/passes/test_channels_last.py", "ops/test_contract.py", "test_api.py"),
    *("pipelines/test_whole.py", "test_docs_code.py", "census/test_numbers.py", "tiling/test_codegen.py"),
    *("pipelines/test_sizes.py", "compiler/blocks/test_reuse.py", "examples/test_examples.py"),
    *("techniques/quantize/test_state.py", "techniques/quantize/test_technique.py", "pipelines/test_shapes.py"),
    *("techniques/parallel/test_sequence.py", "techniques/parallel/test_ranks.py", "pipelines/test_calibration.py"),
    *("cli/test_pipelines.py", "report/test_inductor.py", "techniques/quantize/test_scales.py"),
    *("ops/test_generated.py", "ops/test_generated_runs.py", "pipelines/test_static_graphs_page.py"),
    *("report/test_kernel_dump.py", "artifacts/test_cache.py", "bench/test_bisect.py"),
)


TURNS = {Path(__file__).parent / name: turn for turn, name in enumerate(LONG)}


def _turn_of(item: pytest.Item) -> int:
    return TURNS.get(item.path, len(LONG))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    import torch

    items.sort(key=_turn_of)
    if not torch.cuda.is_available():
        absent = pytest.mark.skip(reason="no NVIDIA GPU on this machine")
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(absent)


@pytest.fixture(scope="module", autouse=True)
def _earlier_objects_are_frozen():
    """Hide earlier files' objects from the garbage collector.

    There are millions of them, and each full collection, as benchmarks make between their workloads, would visit all.
    """
    if "torch" in sys.modules:
        sys.modules["torch"].compiler.reset()
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _clean_slate(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
):
    """No test sees another's compiled code or environment, and none leaves Inductor's configuration changed."""
    if isinstance(request.node, pytest.DoctestItem):
        yield
        return
    import torch

    from tritium import compat, tuning
    from tritium.report.ledger import LEDGER

    # Tests do not use the tables that the user of this machine has measured.
    monkeypatch.setattr(tuning.tables, "user_folder", lambda: tmp_path_factory.getbasetemp() / "tuned")
    tuning.forget()

    for name in [name for name in os.environ if name.startswith("TRITIUM_")]:
        monkeypatch.delenv(name)
    torch._dynamo.reset()
    LEDGER.clear()
    before = compat.inductor.inductor_settings()
    yield
    after = compat.inductor.inductor_settings()
    changed = [name for name in before if repr(before[name]) != repr(after[name])]
    assert not changed, f"Inductor settings changed without a request: {changed}"


@pytest.fixture(scope="session")
def forks():
    from support.forks import Forks

    forks = Forks()
    yield forks
    forks.close()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory):
    """Return groups of processes: `ranks(2)(function, *arguments)` returns the function's result on each rank."""
    from support.ranks import Pool

    pool = Pool(tmp_path_factory.mktemp("ranks"))
    yield pool
    pool.close()


@pytest.fixture
def in_process(tmp_path: Path, forks):
    """Run a program in a separate process, with a separate Inductor cache, and return what it printed.

    `loaded` starts it with torch and its compiler imported, so `env` cannot have variables that these read on import.
    `instructions` spares a process that is not `loaded` the compiler's tests of this machine's instructions, which take 4 s
    of a core in an empty cache.
    """

    from support.forks import copy_tests_of_instructions

    def run(
        program: str,
        *,
        cache: Path | None = None,
        env: dict[str, str] | None = None,
        loaded: bool = False,
        instructions: bool = False,
    ) -> str:
        cache = cache or tmp_path / "inductor"
        if instructions:
            copy_tests_of_instructions(cache)
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache), **(env or {})}
        if loaded:
            return forks.run(program, environment, tmp_path)
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=False, env=environment
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run
