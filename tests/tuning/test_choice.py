"""Which provider is chosen, and that only `tritium tune` measures."""

import subprocess

import pytest
import torch

import tritium
from tritium import compat, fusions, measure, tuning
from tritium.compiler.passes.fuse import fuse
from tritium.ops import linear_gelu, rms_norm, rope
from tritium.passes import PassContext
from tritium.tuning import Machine, Verdict, choice, compare


def context(device_type="cpu", **settings):
    return PassContext(tritium.CompilationConfig(**settings), device_type)


def complex_rope(tokens=14000):
    table = torch.randn(tokens, 1, 4, dtype=torch.complex64)
    return {"x": torch.randn(1, tokens, 24, 8), "table": table, "sin": None, "mode": "complex", "merge_heads": False}


def choose(op, arguments, device_type="cpu", **settings):
    return tuning.choose(op, arguments, tritium.CompilationConfig(**settings), device_type)


def key_of(op, arguments):
    return tuning.key_of(op, op.bind(**arguments))


@pytest.fixture
def table(tmp_path, monkeypatch):
    """Returns a function that writes a row about this machine's CPU, and about a GPU of the same name."""
    here = Machine("machine", "9.0", 132)
    monkeypatch.setattr(tuning.tables, "user_folder", lambda: tmp_path)
    monkeypatch.setattr(tuning.tables, "_machine", lambda where: here)

    def add(op, arguments, **ms):
        row = Verdict(key_of(op, arguments), "inductor", ms, versions={"torch": compat.versions.version_text()})
        tuning.store(tmp_path / here.file_name, here, [row])

    return add


class TestChoice:
    def test_a_gpu_gets_what_near_shapes_say_and_a_cpu_does_not(self, table):
        table(rope.OP, complex_rope(2000), inductor=1.0, aten=0.5)
        provider, why = choose(rope.OP, complex_rope(), "cuda")
        assert provider == "aten"
        assert why.startswith("predicted 2.0")
        provider, why = choose(rope.OP, complex_rope())
        assert provider == "inductor"
        assert why.startswith("left to Inductor: nothing was measured for rope")

    @pytest.mark.parametrize("graphs", ["with_compile", "auto"])
    def test_replayed_graphs_do_not_wait_for_the_host(self, table, graphs):
        table(rope.OP, complex_rope(), inductor=0.004, aten=0.003)
        assert choose(rope.OP, complex_rope(), "cuda")[0] == "inductor"
        assert choose(rope.OP, complex_rope(), "cuda", graphs=graphs)[0] == "aten"

    def test_inductor_s_rule_or_the_tiling_policy_holds_rows(self, monkeypatch):
        """The limits that decide are those of the device, unless the policy is off."""
        monkeypatch.setattr(tuning.tables, "_machine", lambda where: Machine("NVIDIA H200", "9.0", 132))
        limits = []
        monkeypatch.setattr(choice, "decide", lambda machine, key, able, found, **options: limits.append(found))
        for switches in ({}, {"enable_reduction_choice": False}, {"enable_tiling_policy": False}):
            config = tritium.CompilationConfig(pass_config=tritium.PassConfig(**switches))
            tuning.choose(rope.OP, complex_rope(), config, "cuda")
        held = [(found.holds(1024, 99), found.holds(5120, 5), found.holds(5121, 5)) for found in limits]
        assert held == [(True, True, False), (True, False, False), (True, False, False)]

    def test_an_op_that_is_never_compared_is_left_to_inductor(self):
        provider, why = choose(rms_norm.OP, {"x": torch.randn(2, 8), "weight": None, "eps": 1e-6})
        assert provider == "inductor"
        assert "runs on cpu" in why

    @pytest.mark.parametrize(("ms", "provider"), [(0.5, "aten"), (0.99, "inductor")])
    def test_a_measurement_decides(self, table, ms, provider):
        table(rope.OP, complex_rope(), inductor=1.0, aten=ms)
        chosen, why = choose(rope.OP, complex_rope())
        assert chosen == provider
        assert f"{1 / ms:.2f}x against Inductor in a block" in why
        assert why.endswith("on this machine")
        # A pin and the engine come before a table.
        pinned = choose(rope.OP, complex_rope(), force_provider={"rope": "inductor"})
        assert pinned == ("inductor", "pinned by force_provider='inductor'")
        assert choose(rope.OP, complex_rope(), engine="eager")[0] == "reference"

    def test_a_provider_that_declines_is_not_chosen(self, table):
        arguments = {"x": torch.randn(2, 8), "weight": torch.randn(8, 8), "bias": None, "approximate": "tanh"}
        table(linear_gelu.OP, arguments, inductor=1.0, aten=0.5)
        provider, why = choose(linear_gelu.OP, arguments)
        assert provider == "inductor"
        assert "only CUDA" in why


def test_symbolic_sizes_are_looked_up_at_their_present_size():
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    mode = FakeTensorMode(shape_env=ShapeEnv())
    torch._dynamo.mark_dynamic(x := torch.randn(1, 4608, 3, 8), 1)
    fake = {**complex_rope(), "x": mode.from_tensor(x, static_shapes=False)}
    assert key_of(rope.OP, fake).sizes()["tokens"] == 16384
    assert not mode.shape_env.guards


def attention(x, table):
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * table).flatten(3).type_as(x)


@pytest.fixture
def untimed(monkeypatch):
    """Fail on anything that takes a time or starts another Python."""

    def refuse(*arguments, **options):
        raise AssertionError(f"a compilation started {arguments} {options}")

    for owner, name in (
        (subprocess, "run"),
        (measure, "interleave"),
        (measure, "first_call"),
        (compare, "compare_in_block"),
        (compare, "measure_keys"),
    ):
        monkeypatch.setattr(owner, name, refuse)


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
@pytest.mark.parametrize("known", [False, True], ids=["without a table", "with a table"])
def test_a_first_call_measures_nothing(table, untimed, known, device_type):
    """The pass on Dynamo's graph: the shape is large, a provider can take it, and the device's table may lack it."""
    del untimed
    x, freqs = torch.randn(2, 14000, 24, 8), torch.randn(14000, 1, 4, dtype=torch.complex64)
    if known:
        table(rope.OP, complex_rope(), inductor=1.0, aten=0.5)
    found = context(device_type)

    def backend(gm, example_inputs):
        found.example_inputs = example_inputs
        fuse(gm.graph, found, fusions.catalog().values())
        gm.recompile()
        return gm.forward

    with torch.inference_mode():
        compiled = torch.compile(attention, backend=backend, fullgraph=True)
        torch.testing.assert_close(compiled(x, freqs), attention(x, freqs))
    (site,) = found.sites
    assert (site.fusion, site.outcome) == ("rope", "inductor")
    assert ("2.00x against Inductor" in site.reason) == known
    assert site.reason.startswith("left to Inductor: no") != known
    assert site.provider == ("aten" if known else "")


def test_generated_code_has_what_was_chosen(table):
    """Spelled in real numbers by the chosen provider: nothing falls back to ATen."""
    x, freqs = torch.randn(2, 14000, 24, 8), torch.randn(14000, 1, 4, dtype=torch.complex64)
    table(rope.OP, complex_rope(), inductor=1.0, aten=0.5)
    with torch.inference_mode():
        compiled = torch.compile(attention, backend=tritium.Backend(), fullgraph=True)
        torch.testing.assert_close(compiled(x, freqs), attention(x, freqs))
    report = tritium.explain(compiled)
    assert not any("view_as_complex" in entry["op"] or "mul" in entry["op"] for entry in report.fallbacks)
