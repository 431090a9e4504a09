"""Compile artifacts: a second process starts warm from one moved file, and no damaged or foreign file is ever used."""

import importlib
import json
import os
import pickle
import shutil
import stat
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.compiler._cache import CacheArtifactManager

from tritium import compat, device
from tritium.artifacts import files as artifacts
from tritium.artifacts import libraries, observations
from tritium.artifacts.files import Section, decode, encode
from tritium.artifacts.fingerprint import Fingerprint
from tritium.errors import ArtifactError, ArtifactMismatch

HERE = Fingerprint(
    device="AMD EPYC",
    capability="AVX512",
    instructions=("avx2",),
    threads=2,
    torch="2.13.0",
    triton=None,
    tritium="ab" * 32,
    diffusers="0.36.0",
    python="3.11",
    models=(("transformer", "1"),),
)

PROGRAM = """
import hashlib, json, sys
from pathlib import Path
import torch, tritium
from torch._dynamo.utils import counters
from tritium.artifacts import files as artifacts
from tritium.artifacts.fingerprint import Fingerprint

arguments = json.loads(sys.argv[1])
here = Fingerprint.current({"block": {"width": 16}}, "cpu")
loaded = artifacts.load(arguments["load"], here) if "load" in arguments else None

class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.RMSNorm(16, eps=1e-6)
        self.linear = torch.nn.Linear(16, 16)
    def forward(self, x, gate):
        return x + gate[:, None] * self.linear(self.norm(x))

def second(x):
    return torch.softmax(x.sin(), -1) * 3

torch.manual_seed(0)
model, x, gate = Block(), torch.randn(2, 7, 16), torch.randn(2, 16)
results = []
with torch.inference_mode():
    compiled = torch.compile(model, backend="tritium")
    results.append(compiled(x, gate))
    # The first save must not make the second one forget what the first one had.
    first = artifacts.save(arguments["save"], here) if "save" in arguments else None
    results.append(torch.compile(second, backend="tritium")(x))
saved = artifacts.save(arguments["save"], here) if "save" in arguments else None
report = tritium.explain(compiled).to_dict()
print(json.dumps({
    "hits": counters["inductor"]["fxgraph_cache_hit"], "misses": counters["inductor"]["fxgraph_cache_miss"],
    "bypasses": counters["inductor"]["fxgraph_cache_bypass"], "kernels": report["kernels"],
    "kernels_from": [graph["kernels_from"] for graph in report["graphs"]],
    "results": [hashlib.sha256(result.contiguous().numpy().tobytes()).hexdigest() for result in results],
    "graphs": [summary and summary.graphs for summary in (loaded, first, saved)],
    "libraries": saved and saved.libraries, "missing": saved and saved.missing,
}))
"""


@pytest.fixture
def counted_compiler(tmp_path):
    """A g++ that notes each call in a file, in front of the real one."""
    log, folder = tmp_path / "compiler-calls", tmp_path / "bin"
    folder.mkdir()
    wrapper = folder / "g++"
    wrapper.write_text(f'#!/bin/sh\necho "$*" >> {log}\nexec {shutil.which("g++")} "$@"\n')
    wrapper.chmod(wrapper.stat().st_mode | stat.S_IXUSR)

    def calls() -> list[str]:
        """What was compiled since the last time; asking for macros or the version compiles nothing."""
        lines = log.read_text().splitlines() if log.exists() else []
        log.unlink(missing_ok=True)
        return [line for line in lines if "-dM" not in line and line != "-v" and "--version" not in line]

    return {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}, calls


@pytest.mark.thorough
@pytest.mark.codegen
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_the_next_process_compiles_nothing(tmp_path, in_process, counted_compiler):
    environment, compiled = counted_compiler

    def run(cache: str, **arguments: Path) -> dict:
        given = json.dumps({name: str(path) for name, path in arguments.items()})
        program = f"import sys; sys.argv = ['x', {given!r}]\n{PROGRAM}"
        return json.loads(in_process(program, cache=tmp_path / cache, env=environment))

    def content(path: Path) -> set[tuple[str, str]]:
        sections, _ = decode(path.read_bytes(), Fingerprint.current({"block": {"width": 16}}, "cpu"), path)
        return {(section.kind, section.name) for section in sections}

    cold = run("cold", save=tmp_path / "cold.tritium")
    assert (cold["hits"], cold["misses"]) == (0, 2)
    assert compiled() != []
    assert cold["kernels_from"] == ["codegen"]
    assert cold["graphs"] == [None, 1, 2]
    assert cold["missing"] == 0
    kinds = Counter(kind for kind, _ in content(tmp_path / "cold.tritium"))
    # The block's generated kernels and the second function's one.
    generated = [kernel for kernel in cold["kernels"] if kernel["kind"] == "generated"]
    assert kinds.pop("library") == len(generated) + 1 >= 2
    assert kinds == {"torch": 1, "record": 2}

    # A process that found everything in its local cache saves the same.
    warm = run("cold", save=tmp_path / "warm.tritium")
    assert (warm["hits"], warm["misses"]) == (2, 0)
    assert content(tmp_path / "warm.tritium") == content(tmp_path / "cold.tritium")
    compiled()

    # Another cache folder, and the file elsewhere; the folder it was made in is gone.
    moved = tmp_path / "moved" / "renamed"
    moved.parent.mkdir()
    (tmp_path / "warm.tritium").rename(moved)
    shutil.rmtree(tmp_path / "cold")
    second = run("second", load=moved, save=tmp_path / "again.tritium")
    assert (second["hits"], second["misses"], second["bypasses"]) == (2, 0, 0)
    assert compiled() == []
    assert second["graphs"] == [2, 1, 2]
    assert second["results"] == cold["results"]
    assert second["kernels_from"] == ["store"]
    assert second["kernels"] == cold["kernels"] != []

    # What came out of a file goes into the next one.
    assert content(tmp_path / "again.tritium") == content(tmp_path / "cold.tritium")
    third = run("third", load=tmp_path / "again.tritium")
    assert (third["hits"], third["misses"]) == (2, 0)
    assert compiled() == []
    assert third["results"] == cold["results"]

    # The cache that a file filled serves the next process without it.
    fourth = run("third")
    assert (fourth["hits"], fourth["misses"]) == (2, 0)
    assert compiled() == []


TINY = """
import json, torch, warnings
from tritium.artifacts import libraries
with warnings.catch_warnings(record=True) as caught, torch.inference_mode():
    warnings.simplefilter("always")
    result = torch.compile(lambda x: x.sin() + 1, backend="tritium")(torch.ones(64))
assert torch.allclose(result, torch.ones(64).sin() + 1)
print(json.dumps([sorted(libraries.USED), [str(one.message) for one in caught if "tritium" in str(one.message)]]))
"""


@pytest.mark.thorough
@pytest.mark.codegen
def test_a_library_that_cannot_be_loaded_is_compiled_again(tmp_path, in_process):
    (digest,), quiet = json.loads(in_process(TINY, cache=tmp_path / "cache", loaded=True))
    assert quiet == []
    junk = tmp_path / "cache" / "tritium" / "kernels" / f"{digest}.so"
    junk.parent.mkdir()
    junk.write_bytes(b"no library")
    (again,), said = json.loads(in_process(TINY, cache=tmp_path / "cache", loaded=True))
    assert again == digest
    assert len(said) == 1
    assert "is compiled again" in said[0]


@pytest.mark.codegen
def test_the_next_machine_needs_no_compiler(tmp_path, in_process):
    start = "from tritium.artifacts import files as artifacts\nfrom tritium.artifacts.fingerprint import Fingerprint\n"
    here = f"({str(tmp_path / 'file')!r}, Fingerprint.current({{}}, 'cpu'))\n"
    in_process(f"{TINY}\n{start}artifacts.save{here}", cache=tmp_path / "first", loaded=True)
    (digest,), said = json.loads(
        in_process(f"{start}artifacts.load{here}{TINY}", cache=tmp_path / "second", env={"PATH": str(tmp_path)})
    )
    # A lowering that failed would have said so.
    assert said == []
    assert (tmp_path / "second" / "tritium" / "kernels" / f"{digest}.so").exists()


@pytest.mark.parametrize(
    ("place", "name", "value"),
    [
        (device, "cpu_name", lambda: "other"),
        (device, "cpu_instructions", lambda: ("other",)),
        (torch, "__version__", "2.99.0"),
    ],
)
def test_a_library_belongs_to_a_source_and_a_machine(place, name, value, monkeypatch):
    libraries._machine.cache_clear()
    before = libraries.digest("a")
    assert libraries.digest("b") != before
    monkeypatch.setattr(place, name, value)
    libraries._machine.cache_clear()
    assert libraries.digest("a") != before
    libraries._machine.cache_clear()


def test_a_library_belongs_to_the_settings_it_was_compiled_with():
    given = {"main_code": "int x;", "submit_fn": object()}
    before = compat.artifacts._library_request(given)
    assert compat.artifacts._library_request({"main_code": "int x;", "submit_fn": object()}) == before
    with torch._inductor.config.patch({"cpp.enable_floating_point_contract_flag": "fast"}):
        assert compat.artifacts._library_request(given) != before


SECTIONS = [Section("torch", "artifacts", b"pickled"), Section("library", "ab12", b""), Section("record", "cd", b"{}")]


@pytest.fixture
def refuse_to_unpickle(monkeypatch):
    """Unpickling raises, and so does handing anything to torch."""

    def refuse(*args, **kwargs):
        raise AssertionError("something was unpickled")

    monkeypatch.setattr(pickle, "loads", refuse)
    monkeypatch.setattr(pickle, "load", refuse)
    monkeypatch.setattr(pickle, "Unpickler", refuse)
    monkeypatch.setattr(torch.compiler, "load_cache_artifacts", refuse)


@pytest.fixture
def no_files(monkeypatch, tmp_path):
    """A cache folder that must stay empty."""
    cache = tmp_path / "cache"
    monkeypatch.setattr(compat.inductor, "cache_dir", lambda: cache)
    yield
    assert not cache.exists()


@pytest.mark.usefixtures("refuse_to_unpickle", "no_files")
class TestRefused:
    def write(self, tmp_path, content: bytes) -> Path:
        path = tmp_path / "file.tritium"
        path.write_bytes(content)
        return path

    def test_cut_off_changed_or_extended(self, tmp_path):
        whole = encode(HERE, SECTIONS, 1)
        flipped = (whole[:at] + bytes([whole[at] ^ 0x81]) + whole[at + 1 :] for at in range(len(whole)))
        for content in (*(whole[:length] for length in range(len(whole))), *flipped, whole + b"x"):
            with pytest.raises(ArtifactError, match=r"incomplete or damaged|no file of compile artifacts"):
                artifacts.load(self.write(tmp_path, content), HERE)

    @pytest.mark.parametrize("content", [b"", b"PK\x03\x04 a zip", pickle.dumps({"a": 1}), b"{}", bytes(64)])
    def test_another_kind_of_file(self, tmp_path, content):
        with pytest.raises(ArtifactError, match="is no file of compile artifacts"):
            artifacts.load(self.write(tmp_path, content), HERE)

    def test_another_fingerprint(self, tmp_path):
        there = replace(HERE, torch="2.11.0", threads=8)
        with pytest.raises(ArtifactMismatch, match=r"was made elsewhere and is not used") as caught:
            artifacts.load(self.write(tmp_path, encode(there, SECTIONS, 1)), HERE)
        assert caught.value.differences == ["threads: 8 there, 2 here", "torch: 2.11.0 there, 2.13.0 here"]
        assert "torch: 2.11.0 there, 2.13.0 here" in str(caught.value)

    def test_another_layout(self, tmp_path, monkeypatch):
        monkeypatch.setattr(artifacts, "VERSION", 9)
        there = encode(HERE, SECTIONS, 1)
        monkeypatch.undo()
        with pytest.raises(ArtifactError, match=f"has layout 9, this version of Tritium reads {artifacts.VERSION}"):
            artifacts.load(self.write(tmp_path, there), HERE)

    def test_a_file_that_is_not_there(self, tmp_path):
        with pytest.raises(ArtifactError, match="cannot be read: No such file"):
            artifacts.load(tmp_path / "missing", HERE)

    @pytest.mark.parametrize("setting", ["fx_graph_cache", "force_disable_caches"])
    def test_with_caches_off(self, tmp_path, setting):
        with torch._inductor.config.patch({setting: setting == "force_disable_caches"}):
            with pytest.raises(ArtifactError, match=f"cannot be used: .*{setting}"):
                artifacts.load(self.write(tmp_path, encode(HERE, SECTIONS, 1)), HERE)
            with pytest.raises(ArtifactError, match=f"cannot be saved: .*{setting}"):
                artifacts.save(tmp_path / "new", HERE)


def test_the_whole_file_does_reach_torch(tmp_path, monkeypatch):
    """So what `TestRefused` forbids would have happened."""
    reached = []
    monkeypatch.setattr(compat.inductor, "cache_dir", lambda: tmp_path / "cache")
    monkeypatch.setattr(torch.compiler, "load_cache_artifacts", lambda content: reached.append(content) or "info")
    path = tmp_path / "file.tritium"
    path.write_bytes(encode(HERE, SECTIONS, 3))
    summary = artifacts.load(path, HERE)
    assert reached == [b"pickled"]
    assert (summary.graphs, summary.libraries, summary.records, summary.size) == (3, 1, 1, path.stat().st_size)
    assert libraries.path("ab12").read_bytes() == b""
    assert observations.store().path("cd").read_bytes() == b"{}"
    assert str(summary).startswith(f"{path}: 3 graphs, 1 libraries")


def test_bytes_that_torch_cannot_read(tmp_path, monkeypatch):
    monkeypatch.setattr(compat.inductor, "cache_dir", lambda: tmp_path / "cache")
    path = tmp_path / "file.tritium"
    path.write_bytes(encode(HERE, SECTIONS, 1))
    with pytest.raises(ArtifactError, match="this torch cannot read the artifacts"):
        artifacts.load(path, HERE)


NAMES = st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,9}", fullmatch=True)


@given(st.lists(st.builds(Section, NAMES, NAMES, st.binary(max_size=20)), max_size=5), st.integers(0, 99), st.text())
def test_round_trip(sections, graphs, name):
    here = replace(HERE, device=name)
    assert decode(encode(here, sections, graphs), here, "file") == (sections, graphs)


class TestSaving:
    @pytest.fixture(autouse=True)
    def artifacts_of_torch(self, monkeypatch):
        monkeypatch.setattr(compat.artifacts, "cache_artifacts", lambda: (b"bytes", 1))

    def test_an_interrupted_save_keeps_the_old_file(self, tmp_path, monkeypatch):
        path = tmp_path / "file.tritium"
        artifacts.save(path, HERE)
        before = path.read_bytes()

        def full(self, content):
            with self.open("wb") as out:
                out.write(content[: len(content) // 2])
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(Path, "write_bytes", full)
        with pytest.raises(ArtifactError, match="cannot be written: No space left"):
            artifacts.save(path, HERE)
        assert path.read_bytes() == before
        assert list(tmp_path.iterdir()) == [path]

    def test_a_new_folder_is_made(self, tmp_path):
        assert artifacts.save(tmp_path / "new" / "file", HERE).path.exists()

    def test_a_file_that_is_gone_is_counted(self, tmp_path, monkeypatch):
        monkeypatch.setattr(libraries, "USED", {"ab": tmp_path / "gone.so"})
        monkeypatch.setattr(observations, "_used", {})
        summary = artifacts.save(tmp_path / "file", HERE)
        assert (summary.libraries, summary.missing) == (0, 1)
        assert "1 files were gone" in str(summary)


def test_saving_leaves_torch_s_own_count_alone(monkeypatch):
    with CacheArtifactManager.with_fresh_cache():
        importlib.import_module("torch._inductor.codecache")
        CacheArtifactManager.record_artifact("inductor", "key", b"content")
        assert compat.artifacts.cache_artifacts() == compat.artifacts.cache_artifacts() is not None
        assert CacheArtifactManager.need_serialize()
