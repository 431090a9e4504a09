"""The compile cache stays warm, and misses exactly when something that matters changed. Two real processes each time."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from torch import fx

import tritium
from tritium.artifacts import digest, observations
from tritium.report.observation import Fallback, Kernel, KernelTiling, LoweredOp, Observation, Pair, ReductionChoice

OP = """
import torch
from torch import Tensor
import tritium

@tritium.plugins.custom_op("cache_test::halve", outputs=lambda x: x.new_empty(x.shape))
def halve(x: Tensor) -> Tensor:
    return x / 2
"""

PASS = """
import tritium
PASS = tritium.plugins.Pass("look", lambda graph, context: None)
"""

FUSION = """
import tritium
from tritium.ops import gated_residual

def spelling(x, gate, y):
    return x - gate * y

FUSION = tritium.plugins.Fusion("minus", ("minus",), (spelling,), gated_residual.OP)
"""

PROGRAM = """
import json, sys, torch, tritium
sys.path.insert(0, sys.argv[1])
from mine.op import halve
from mine.look import PASS
from mine.minus import FUSION
from torch._dynamo.utils import counters

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.RMSNorm(16, eps=1e-6)
    def forward(self, x):
        return halve(self.norm(x)) + x

model, x = Model(), torch.randn(4, 16)
config = tritium.CompilationConfig(**json.loads(sys.argv[2]))
with torch.inference_mode():
    compiled = torch.compile(model, backend=tritium.Backend(config, passes=[PASS], fusions=[FUSION]))
    torch.testing.assert_close(compiled(x), model(x))
report = tritium.explain(compiled)
print(json.dumps({
    "hits": counters["inductor"]["fxgraph_cache_hit"], "misses": counters["inductor"]["fxgraph_cache_miss"],
    "bypasses": counters["inductor"]["fxgraph_cache_bypass"], "report": report.to_dict(),
}))
"""


@pytest.fixture
def project(tmp_path):
    package = tmp_path / "project" / "mine"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    for name, text in {"op": OP, "look": PASS, "minus": FUSION}.items():
        (package / f"{name}.py").write_text(text)
    return package.parent


@pytest.mark.codegen
def test_warm_cold_and_moved(project, tmp_path, in_process):
    cache = tmp_path / "cache"

    def run(folder: Path = project, **config) -> dict:
        program = f"import sys; sys.argv = ['x', {str(folder)!r}, {json.dumps(json.dumps(config))}]\n{PROGRAM}"
        return json.loads(in_process(program, cache=cache, loaded=True))

    def kind(found: dict) -> str:
        assert found["bypasses"] == 0
        return "hit" if found["hits"] and not found["misses"] else "miss"

    cold = run()
    assert kind(cold) == "miss"
    assert cold["report"]["graphs"][0]["kernels_from"] == "codegen"

    warm = run()
    assert kind(warm) == "hit"
    # What only code generation knows is found again.
    assert warm["report"]["graphs"][0]["kernels_from"] == "store"
    assert warm["report"]["kernels"] == cold["report"]["kernels"] != []
    assert warm["report"]["fallbacks"] == cold["report"]["fallbacks"]
    assert [entry["op"] for entry in cold["report"]["fallbacks"]] == ["cache_test.halve.default"]
    assert warm["report"]["sites"] == cold["report"]["sites"]
    assert warm["report"]["sites"]["rms_norm"]["inductor"] == 1

    moved = tmp_path / "elsewhere"
    shutil.copytree(project, moved)
    assert kind(run(moved, graph_log_url=str(tmp_path / "logs"))) == "hit"

    for name in ("op", "look", "minus"):
        file = project / "mine" / f"{name}.py"
        file.write_text(file.read_text() + "\n# edited\n")
        assert kind(run()) == "miss", name
    assert kind(run()) == "hit"


class TestIdentity:
    """Each ingredient of the key, one at a time."""

    def key(self, config=None, passes=(), fusions=()) -> bytes:
        graph = fx.Graph()
        graph.output(graph.placeholder("x"))
        return digest.identity(graph, config or tritium.CompilationConfig(), passes, fusions)

    def test_configuration(self):
        base = tritium.CompilationConfig()
        assert self.key(base.with_(enable_freezing=True)) != self.key()
        assert self.key(base.with_(force_provider="inductor")) != self.key()
        assert self.key(base.with_(graph_log_url="somewhere")) == self.key()

    def test_inductor_s_settings_and_our_identity(self):
        graph = fx.Graph()
        graph.output(graph.placeholder("x"))
        before = observations.store_key(graph, b"")
        assert observations.store_key(graph, b"other") != before
        with torch._inductor.config.patch({"triton.max_tiles": 2}):
            assert observations.store_key(graph, b"") != before


OBSERVATION = Observation(
    kernels=[
        Kernel(name="k", kind="generated", ops=[], source_lines=[], bytes_read=1, bytes_written=2, ideal_bytes=3),
        Kernel(
            name="t",
            kind="generated",
            ops=["aten.mul"],
            source_lines=["model.py:7"],
            bytes_read=1,
            bytes_written=2,
            ideal_bytes=3,
            region=1,
            why_not_fused=["k: no"],
            tiling=KernelTiling({"x": "8"}, "2d", "cheaper", reduction=ReductionChoice("split", "looped", "rows")),
        ),
    ],
    fallbacks=[Fallback("aten.sort", 2, "no lowering", {"float32[2]": 2})],
    lowered=[LoweredOp("aten.mul", 3)],
    not_fused=[Pair("k", "t", 1, 8, 0, "no")],
    sources="packed",
)


def test_a_damaged_store_is_ignored(tmp_path):
    store = observations.Store(tmp_path)
    store.save("abc", OBSERVATION)
    assert store.load("abc") == OBSERVATION
    whole = store.path("abc").read_text()
    for text in ("", "[]", '{"kernels": [], "fallbacks": []}', "{", whole.replace("bytes_read", "read")):
        store.path("abc").write_text(text)
        assert store.load("abc") is None
    assert store.load("missing") is None


NAMES = """
import torch, tritium

class Normed(torch.nn.Module):
    def __init__(self, name):
        super().__init__()
        self.name = name
        self.add_module(name, torch.nn.LayerNorm(8))

    def forward(self, x):
        return torch.relu(getattr(self, self.name)(x))

for name in ("first", "second"):
    model = torch.compile(Normed(name), backend="tritium")
    with torch.no_grad():
        model(torch.ones(4, 8))
    (record,) = tritium.explain(model).records
    print(record.kernels_from, *(kernel.name for kernel in record.kernels))
    torch._dynamo.reset()
"""


@pytest.mark.codegen
def test_a_graph_of_other_names_finds_what_was_seen_of_its_code(tmp_path, in_process):
    """Inductor takes the two for one: the second is served by the first one's code."""
    first, second = (line.split() for line in in_process(NAMES, cache=tmp_path, loaded=True).splitlines()[-2:])
    assert (first[0], second[0]) == ("codegen", "store")
    assert first[1:] == second[1:] != []


def test_a_link_leads_to_an_observation_or_to_none(tmp_path):
    store = observations.Store(tmp_path)
    store.save("aa11", OBSERVATION)
    store.link("bb22", "aa11")
    store.link("cc33", "dd44")
    assert store.load("aa11") == store.linked("bb22") == OBSERVATION
    # Only an observation is one, and only a link leads to another.
    assert store.load("bb22") is store.linked("aa11") is store.linked("cc33") is store.linked("ee55") is None
