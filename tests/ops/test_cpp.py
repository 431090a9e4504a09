"""Building, loading and calling C++ kernels."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tritium import compat, ops
from tritium.errors import ProviderError
from tritium.ops import cpp

pytestmark = pytest.mark.skipif(cpp.cannot_run() is not None, reason=str(cpp.cannot_run()))

ANSWER = 'extern "C" void answer(double* out) {{ *out = {}; }}\n'

THREADS = """
#include <cstdint>
extern "C" int omp_get_num_threads();
extern "C" void count(int64_t threads, int64_t* out) {
#pragma omp parallel num_threads(threads)
#pragma omp single
  *out = omp_get_num_threads();
}
"""

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setattr(compat, "cache_dir", lambda: folder)
    return folder


@pytest.fixture
def source(tmp_path):
    file = tmp_path / "kernel.cpp"
    file.write_text(ANSWER.format(42))
    return file


def answer(source: Path) -> float:
    cpp.function.cache_clear()
    out = torch.zeros(1, dtype=torch.float64)
    cpp.function(source, "answer", (cpp.POINTER,))(out.data_ptr())
    return out.item()


def child(program: str, **environment: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
        cwd=ROOT,
    )


def test_a_kernel_is_built_once(source, cache):
    library = cpp.build(source)
    built = library.stat().st_mtime_ns
    assert library.is_relative_to(cache)
    assert cpp.build(source) == library
    assert library.stat().st_mtime_ns == built
    assert answer(source) == 42


def test_changed_content_is_another_kernel(source, cache):
    assert answer(source) == 42
    source.write_text(ANSWER.format(43))
    assert answer(source) == 43
    assert len(list(cache.rglob("*.so"))) == 2


def test_a_changed_header_is_another_kernel(source, cache):
    header = source.with_name("number.h")
    header.write_text("#define NUMBER 1\n")
    source.write_text('#include "number.h"\n' + ANSWER.format("NUMBER"))
    assert answer(source) == 1
    header.write_text("#define NUMBER 2\n")
    assert answer(source) == 2


def test_a_changed_shared_header_is_another_kernel(source, cache, tmp_path, monkeypatch):
    shared = tmp_path / "shared"
    shared.mkdir()
    monkeypatch.setattr(cpp, "HEADERS", shared)
    source.write_text('#include "number.h"\n' + ANSWER.format("NUMBER"))
    for number in (1, 2):
        (shared / "number.h").write_text(f"#define NUMBER {number}\n")
        assert answer(source) == number


def test_a_struct_is_passed_as_the_values_of_its_fields(source, cache):
    source.write_text("""
#include <cstdint>
struct Given { int64_t first, second; double third; double* out; };
extern "C" void add(const void* packed) {
  const Given& given = *(const Given*)packed;
  *given.out = given.first + given.second + given.third;
}
""")
    cpp.function.cache_clear()
    cpp.packed.cache_clear()
    out = torch.zeros(1, dtype=torch.float64)
    cpp.packed(source, "add", "qqdq")(True, -7, 0.25, out.data_ptr())
    assert out.item() == -5.75


def test_every_source_is_part_of_cache_keys():
    folder = Path(ops.__file__).parent
    sources = {file for kind in ("py", "cpp", "h") for file in folder.rglob(f"*.{kind}")}
    assert {"vector.h", "kernel.cpp", "reference.py"} <= {file.name for file in sources}
    assert sources <= set(ops.files())


def test_other_flags_are_another_kernel(source, cache, monkeypatch):
    source.write_text("#ifndef NUMBER\n#define NUMBER 1\n#endif\n" + ANSWER.format("NUMBER"))
    assert answer(source) == 1
    monkeypatch.setattr(cpp, "FLAGS", (*cpp.FLAGS, "-DNUMBER=2"))
    assert answer(source) == 2


def test_another_processor_is_another_kernel(source, cache, monkeypatch):
    library = cpp.build(source)
    macros = cpp._macros(cpp._compiler(cpp._candidates()))
    monkeypatch.setattr(cpp, "_macros", lambda compiler: macros + "#define __ANOTHER_INSTRUCTION__ 1\n")
    assert cpp.build(source) != library


def test_what_does_not_compile_says_so_and_leaves_nothing(source, cache):
    source.write_text("int main( {")
    with pytest.raises(ProviderError, match=r"kernel\.cpp:1.*error"):
        cpp.build(source)
    assert list((cache / "tritium" / "cpp").iterdir()) == []


def test_nan_and_infinity_are_kept(source, cache):
    source.write_text('extern "C" void answer(double* out) { *out = *out != *out; }')
    out = torch.tensor([float("nan")], dtype=torch.float64)
    cpp.function.cache_clear()
    cpp.function(source, "answer", (cpp.POINTER,))(out.data_ptr())
    assert out.item() == 1


def test_processes_that_build_at_once_share_one_good_file(source, tmp_path):
    program = f"""
import time
from pathlib import Path
from tritium import compat
from tritium.ops import cpp
import torch, os
here = Path({str(tmp_path)!r})
(here / f"ready-{{os.getpid()}}").touch()
while not (here / "go").exists():
    time.sleep(0.001)
out = torch.zeros(1, dtype=torch.float64)
cpp.function(here / "kernel.cpp", "answer", (cpp.POINTER,))(out.data_ptr())
print(out.item())
"""
    cache = tmp_path / "inductor"
    children = [child(program, TORCHINDUCTOR_CACHE_DIR=str(cache)) for _ in range(3)]
    deadline = time.monotonic() + 120
    while len(list(tmp_path.glob("ready-*"))) < len(children) and time.monotonic() < deadline:
        time.sleep(0.01)
    (tmp_path / "go").touch()
    for process in children:
        said, complaint = process.communicate(timeout=120)
        assert (said.strip(), process.returncode) == ("42.0", 0), complaint
    left = list((cache / "tritium" / "cpp").iterdir())
    assert [file.suffix for file in left] == [".so"]


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_kernel_gets_the_threads_it_asks_for(source, cache, threads):
    source.write_text(THREADS)
    out = torch.zeros(1, dtype=torch.int64)
    cpp.function.cache_clear()
    cpp.function(source, "count", (cpp.INTEGER, cpp.POINTER))(threads, out.data_ptr())
    assert out.item() == threads


def test_threads_are_torch_s_own(source, tmp_path):
    """One OpenMP runtime in the process; asked for by no file name, which torch may have changed."""
    source.write_text(THREADS)
    program = f"""
from pathlib import Path
import torch
from tritium.ops import cpp

def runtimes():
    return sorted({{line.split()[-1] for line in open("/proc/self/maps") if "omp" in Path(line.split()[-1]).name}})

torch.ones(100_000).add(1)
before, out = runtimes(), torch.zeros(1, dtype=torch.int64)
cpp.function(Path({str(source)!r}), "count", (cpp.INTEGER, cpp.POINTER))(2, out.data_ptr())
assert out.item() == 2
assert before and runtimes() == before, (before, runtimes())
"""
    process = child(program, TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "inductor"))
    assert process.wait(120) == 0, process.stderr.read()
    (library,) = tmp_path.rglob("*.so")
    assert b"libgomp" not in library.read_bytes()


def test_without_a_compiler_providers_decline(source, cache, monkeypatch):
    def refuse(*arguments, **options):
        raise AssertionError("something was run")

    monkeypatch.setattr(subprocess, "run", refuse)
    with compat.inductor_patched({"cpp.cxx": (None, "no-such-compiler")}):
        reason = "no C++ compiler: no-such-compiler is not on the PATH"
        assert cpp.cannot_run(torch.ones(1)) == reason
        provider = ops.providers(ops.catalog()["group_norm_silu"])["cpu"]
        assert provider.decline(torch.ones(1, 2, 3), 1, None, None, 1e-6, None) == reason
        with pytest.raises(ProviderError, match=re.escape(reason)):
            cpp.build(source)
    assert cpp.cannot_run(torch.ones(1)) is None


def test_tensors_elsewhere_are_declined():
    assert cpp.cannot_run(torch.ones(1), None, torch.ones(1, device="meta")) == (
        "C++ kernels run on a CPU, this graph runs on meta"
    )


def test_importing_builds_nothing(tmp_path):
    process = child("from tritium import ops; ops.catalog()", TORCHINDUCTOR_CACHE_DIR=str(tmp_path))
    assert process.wait(120) == 0, process.stderr.read()
    assert not (tmp_path / "tritium" / "cpp").exists()
