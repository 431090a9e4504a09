"""The policy as users reach it: tritium.autofuse, the tritium backend, pins, its place in cache keys, and its latch."""

import json
import shutil
import textwrap
import threading
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import sympy
import torch
import torch.nn.functional as F

import tritium
from tiling.generated import generate, triton_on_cpu
from tiling.patterns import ALL
from tritium import compat
from tritium.errors import ConfigError
from tritium.passes import Decline
from tritium.report.ledger import LEDGER
from tritium.tiling import choose, session
from tritium.tiling.policy import OFF, TilingPolicy, policy_of

PAD = "triton_poi_fused_constant_pad_nd_0"


def owners():
    wrapped = [hook for hook in compat.tiling.hooks() if hook.wrapper is not None]
    return [(hook.owner, hook.attribute, vars(hook.owner)[hook.attribute]) for hook in wrapped]


def owner_of(attribute):
    """Inductor's class or module that has a function which the policy uses."""
    return next(hook.owner for hook in compat.tiling.hooks() if hook.attribute == attribute)


@pytest.fixture(autouse=True)
def _nothing_stays_behind():
    yield
    tritium.autofuse.disable()
    assert not compat.tiling.is_wrapped()
    assert session.current() is None


class TestEnable:
    def test_disable_restores_every_function(self):
        before = owners()
        assert tritium.autofuse.enable() is None
        assert session.of_process() is not None
        assert all(vars(owner)[name] is not original for owner, name, original in before)
        tritium.autofuse.disable()
        assert session.of_process() is None
        assert all(vars(owner)[name] is original for owner, name, original in before)

    def test_twice_is_once(self):
        before = owners()
        tritium.autofuse.enable()
        tritium.autofuse.enable(narrow_sizes=False)
        tritium.autofuse.disable()
        assert all(vars(owner)[name] is original for owner, name, original in before)
        tritium.autofuse.disable()

    def test_a_block_brings_back_what_was_there(self):
        before = owners()
        tritium.autofuse.enable(narrow_sizes=False)
        outer = session.of_process()
        assert outer.proves_multiple(8, 4)
        with tritium.autofuse.enabled():
            inner = session.of_process()
            assert inner.policy.narrow_sizes
            with tritium.autofuse.enabled(choose_tiling=False):
                assert not session.of_process().policy.choose_tiling
            assert session.of_process() is inner
            assert tritium.autofuse.decisions()["proofs"] == []
        assert session.of_process() is outer
        assert tritium.autofuse.decisions()["proofs"] == ["(8) / (4)"]
        tritium.autofuse.disable()
        assert all(vars(owner)[name] is original for owner, name, original in before)

    def test_a_block_that_fails_brings_it_back_too(self):
        tritium.autofuse.enable(narrow_sizes=False)
        outer = session.of_process()
        with pytest.raises(ValueError, match="theirs"), tritium.autofuse.enabled():
            raise ValueError("theirs")
        assert session.of_process() is outer
        with pytest.raises(ConfigError), tritium.autofuse.enabled(force_tiling="2d"):
            pass
        assert session.of_process() is outer

    def test_disable_inside_a_block_is_not_undone_by_leaving_it(self):
        before = owners()
        with tritium.autofuse.enabled():
            tritium.autofuse.disable()
            assert session.of_process() is None
            assert all(vars(owner)[name] is original for owner, name, original in before)
        assert session.of_process() is None

    def test_somebody_who_wrapped_it_too_keeps_working(self, monkeypatch):
        tritium.autofuse.enable()
        kernel = owner_of("codegen_kernel")
        ours = kernel.codegen_kernel
        theirs = lambda self, name=None: ours(self, name)  # noqa: E731
        kernel.codegen_kernel = theirs
        tritium.autofuse.disable()
        assert kernel.codegen_kernel is theirs
        assert session.current() is None
        kernel.codegen_kernel = ours.__wrapped__

    def test_an_unknown_torch_is_declined_with_a_reason(self, monkeypatch):
        before = owners()
        reason = compat.tiling.decline_tiling((2, 99))
        monkeypatch.setattr(compat.tiling, "decline_tiling", lambda: reason)
        declined = tritium.autofuse.enable()
        assert declined == Decline("supported on torch 2.11 to 2.15, not on 2.99")
        assert session.of_process() is None
        assert all(vars(owner)[name] is original for owner, name, original in before)

    @pytest.mark.parametrize("version", [(2, 10), (2, 16), (3, 0)])
    def test_an_unsupported_version_declines(self, version):
        assert compat.tiling.decline_tiling(version).endswith(f", not on {version[0]}.{version[1]}")

    def test_this_version_is_known(self):
        assert compat.tiling.decline_tiling() is None

    def test_a_function_that_went_or_changed_is_noticed(self, monkeypatch):
        monkeypatch.setattr(owner_of("reduction_split_factor"), "reduction_split_factor", lambda device: 1)
        assert "takes no reduction_numel_hint" in compat.tiling.decline_tiling()
        monkeypatch.setattr(owner_of("codegen_kernel"), "codegen_kernel", lambda self: "")
        assert "takes no name" in compat.tiling.decline_tiling()
        monkeypatch.delattr(owner_of("create_tiling"), "create_tiling")
        assert "has no SIMDScheduling.create_tiling" in compat.tiling.decline_tiling()

    @pytest.mark.skipif(
        compat.versions.TORCH < (2, 12), reason="torch 2.11 crashes in Dynamo after a thread has compiled"
    )
    def test_it_acts_in_every_thread(self):
        pattern, found = ALL["crop_to_nhwc"], []
        with tritium.autofuse.enabled():
            work = lambda: found.extend(generate(pattern.function, pattern.inputs(), pattern.dynamic))  # noqa: E731
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
        assert [kernel.dims for kernel in found] == [2]

    def test_decisions_have_reasons(self):
        pattern = ALL["crop_to_nhwc"]
        with tritium.autofuse.enabled():
            generate(pattern.function, pattern.inputs(), pattern.dynamic)
            made = tritium.autofuse.decisions()
        assert tritium.autofuse.decisions()["kernels"] == []
        (kernel,) = made["kernels"]
        assert kernel["reason"]
        assert kernel["costs"]
        # Since torch 2.14 Inductor proves products of sums itself.
        assert bool(kernel["proofs"]) == (compat.versions.TORCH < compat.tiling.PROVES_PRODUCTS)
        assert set(kernel["proofs"]) <= set(made["proofs"])
        json.dumps(made)


class TestPins:
    def dims(self, pin, name="pad_ncdhw"):
        pattern = ALL[name]
        with tritium.autofuse.enabled(force_tiling=pin):
            (kernel,) = generate(pattern.function, pattern.inputs(), pattern.dynamic)
            (decision,) = tritium.autofuse.decisions()["kernels"]
        assert kernel.name == PAD
        return kernel.dims, decision["reason"]

    @pytest.mark.parametrize(("pin", "dims"), [("1d", 1), ("2d", 2), ("3d", 3), ("coalesced", 1)])
    def test_a_kernel_by_its_name(self, pin, dims):
        assert self.dims(f"{PAD}={pin}")[0] == dims
        assert "pinned" in self.dims({PAD: pin})[1]

    def test_other_kernels_are_free(self):
        for other in ("triton_poi_fused_constant_pad_nd_1=1d", "triton_poi_fused_add_0=1d"):
            assert self.dims(other)[0] == 2

    def test_configuration(self, monkeypatch):
        pinned = tritium.CompilationConfig(force_tiling=f"{PAD}=2d, triton_poi_fused_add_3 = 1d")
        assert pinned.tiling_pins() == (("triton_poi_fused_add_3", "1d"), (PAD, "2d"))
        assert pinned == tritium.CompilationConfig(force_tiling={"triton_poi_fused_add_3": "1d", PAD: "2d"})
        assert pinned.identity() != tritium.CompilationConfig().identity()
        assert pinned.with_(enable_freezing=True).tiling_pins() == pinned.tiling_pins()
        hash(pinned)
        monkeypatch.setenv("TRITIUM_FORCE_TILING", f"{PAD}=3d")
        assert tritium.CompilationConfig().tiling_pins() == ((PAD, "3d"),)

    @pytest.mark.parametrize(
        ("value", "message"),
        [
            ("2d", "is not of the form kernel=tiling"),
            (f"{PAD}=4d", "cannot be tiled '4d'; valid: '1d'"),
            ("add=2d", "is not the name of a generated kernel"),
            ({PAD: 2}, "must map kernel names to tilings"),
        ],
    )
    def test_what_cannot_be_honoured_is_an_error(self, value, message):
        with pytest.raises(ConfigError, match=message):
            tritium.CompilationConfig(force_tiling=value)
        with pytest.raises(ConfigError, match=message):
            tritium.autofuse.enable(force_tiling=value)

    def test_an_engine_without_kernels(self):
        with pytest.raises(ConfigError, match="generates none"):
            tritium.CompilationConfig(force_tiling=f"{PAD}=2d", engine="eager")


def switches(**parts):
    return tritium.PassConfig(**parts)


class TestBackend:
    def compiled(self, name="pad_ncdhw", **config):
        pattern = ALL[name]
        backend = tritium.Backend(tritium.CompilationConfig(**{"pass_config": switches(), **config}))
        kernels = generate(pattern.function, pattern.inputs(), pattern.dynamic, backend=backend)
        (record,) = LEDGER.records()
        policy = next(entry for entry in record.passes if entry.name == "tiling_policy")
        return kernels, record, policy

    def test_every_decision_is_in_the_report(self):
        (kernel,), record, policy = self.compiled()
        assert kernel.dims == 2
        assert policy.changed
        (entry,) = record.kernels
        assert entry.tiling.choice == "2d"
        assert "ps an element" in entry.tiling.reason
        assert entry.tiling.sizes.endswith("index expressions with dynamic sizes in 32 bits")
        json.dumps([kernel.to_dict() for kernel in record.kernels])

    def test_each_part_has_its_switch(self):
        def body(**parts):
            (kernel,), _, _ = self.compiled("crop_to_nhwc", pass_config=switches(**parts))
            LEDGER.clear()
            return kernel.dims, "_i32" in kernel.source

        assert body() == (2, True)
        assert body(enable_narrow_sizes=False) == (2, False)
        unproven = 1 if compat.versions.TORCH < compat.tiling.PROVES_PRODUCTS else 2
        assert body(enable_divisibility_proof=False, enable_nd_tiling_workaround=False) == (unproven, True)
        (kernel,), record, _ = self.compiled(pass_config=switches(enable_nd_tiling_workaround=False))
        assert kernel.dims == 1
        assert record.kernels[0].tiling.reason == "choosing tilings is switched off"

    def test_all_switched_off(self):
        names = ("nd_tiling_workaround", "divisibility_proof", "narrow_sizes", "reduction_choice", "tiling_retry")
        off = switches(**{f"enable_{name}": False for name in names})
        (kernel,), record, policy = self.compiled(pass_config=off)
        assert policy.declined == "switched off"
        assert record.kernels[0].tiling is None
        assert "_i32" not in kernel.source
        assert policy_of(tritium.CompilationConfig(pass_config=off)) == OFF

    def test_it_can_be_switched_off_and_a_pin_acts_alone(self):
        off = tritium.PassConfig(enable_tiling_policy=False)
        (kernel,), record, policy = self.compiled(pass_config=off)
        assert (kernel.dims, policy.declined, record.kernels[0].tiling) == (1, "switched off", None)
        LEDGER.clear()
        (kernel,), _, _ = self.compiled(pass_config=off, force_tiling=f"{PAD}=3d")
        assert kernel.grid == "Grid3D"
        assert "_i32" not in kernel.source

    def test_pins(self):
        (kernel,), _, policy = self.compiled(force_tiling=f"{PAD}=3d")
        assert kernel.grid == "Grid3D"
        assert policy.declined is None

    def test_a_pin_without_a_kernel_is_said(self):
        _, _, policy = self.compiled(force_tiling="triton_poi_fused_add_0=3d")
        assert policy.declined == "force_tiling: this graph has no kernel triton_poi_fused_add_0"

    def test_cpp_kernels_decline(self):
        backend = tritium.Backend()
        with torch.inference_mode():
            compiled = torch.compile(lambda x: x + 1, backend=backend)
            compiled(torch.ones(3))
        policy = next(entry for entry in tritium.explain(compiled).passes if entry["name"] == "tiling_policy")
        assert policy["declined"] == "C++ kernels have no tiles"

    def test_an_unknown_torch_declines(self, monkeypatch):
        monkeypatch.setattr(compat.tiling, "decline_tiling", lambda: "torch 2.99 has no SIMDScheduling.create_tiling")
        (kernel,), _, policy = self.compiled()
        assert policy.declined == "torch 2.99 has no SIMDScheduling.create_tiling"
        assert kernel.dims == 1

    def test_nothing_of_it_is_left_afterwards(self):
        before = owners()
        self.compiled()
        assert all(vars(owner)[name] is original for owner, name, original in before)
        pattern = ALL["pad_ncdhw"]
        assert generate(pattern.function, pattern.inputs(), pattern.dynamic)[0].dims == 1


class TestLatch:
    """pytorch#197077 and its like: an assertion in the analysis must cost the analysis, not the graph."""

    def broken(self, *_, **__):
        raise AssertionError("numel mismatch")

    def test_the_analysis_fails(self, monkeypatch):
        owner, name = compat.tiling.coalescing_analysis()
        monkeypatch.setattr(owner, name, self.broken)
        pattern = ALL["crop_to_nhwc"]
        arguments = (pattern.function, pattern.inputs(), pattern.dynamic)
        with pytest.raises(Exception, match="numel mismatch"):
            generate(*arguments)
        with tritium.autofuse.enabled():
            (kernel,) = generate(*arguments)
            made = tritium.autofuse.decisions()
        assert "AssertionError: numel mismatch" in made["retries"][0]
        assert made["kernels"][0]["reason"] == "Inductor could not analyse its accesses"
        assert kernel.source
        with tritium.autofuse.enabled(retry_analysis=False), pytest.raises(Exception, match="numel mismatch"):
            generate(*arguments)

    def test_the_analysis_of_a_node_without_a_name_fails(self, monkeypatch):
        """Since torch 2.14 Inductor also analyses views of several nodes."""
        owner, name = compat.tiling.coalescing_analysis()
        monkeypatch.setattr(owner, name, self.broken)
        view = SimpleNamespace(get_nodes=lambda: [SimpleNamespace(get_name=lambda: "op7")])
        with session.active(TilingPolicy()) as decisions:
            assert getattr(owner, name)(view) is None
        assert list(decisions.retries) == ["op7: AssertionError: numel mismatch"]

    @pytest.mark.skipif(compat.versions.TORCH < (2, 14), reason="the scheduler ranks tilings since torch 2.14")
    def test_the_ranking_that_the_scheduler_asks_for_fails(self, monkeypatch):
        scheduling = owner_of("create_tiling")
        monkeypatch.setattr(scheduling, "compute_tiling_strategy", self.broken)

        def rank(analysis):
            return scheduling.select_tiling_with_memory([], sympy.Integer(64), sympy.Integer(8), analysis)

        with pytest.raises(AssertionError, match="numel mismatch"):
            rank(object())
        expected = rank(None)
        with session.active(TilingPolicy()) as decisions:
            assert rank(object()) == expected
        assert list(decisions.retries) == ["?: AssertionError: numel mismatch"]
        with session.active(TilingPolicy(retry_analysis=False)), pytest.raises(AssertionError, match="numel mismatch"):
            rank(object())

    def test_the_ranking_fails(self, monkeypatch):
        monkeypatch.setattr(owner_of("create_tiling"), "compute_tiling_strategy", self.broken)
        pattern = ALL["crop_to_nhwc"]
        with tritium.autofuse.enabled():
            generate(pattern.function, pattern.inputs(), pattern.dynamic)
            made = tritium.autofuse.decisions()
        assert len(made["retries"]) == 1
        assert "numel mismatch" in made["retries"][0]
        assert made["kernels"][0]["reason"] == "Inductor could not analyse its accesses"

    def test_the_report_says_so(self, monkeypatch):
        owner, name = compat.tiling.coalescing_analysis()
        monkeypatch.setattr(owner, name, self.broken)
        pattern = ALL["crop_to_nhwc"]
        backend = tritium.Backend(tritium.CompilationConfig(pass_config=switches()))
        generate(pattern.function, pattern.inputs(), pattern.dynamic, backend=backend)
        (record,) = LEDGER.records()
        (failure,) = record.failures
        assert failure.part == "tiling analysis of one kernel"
        assert "numel mismatch" in failure.reason
        assert record.engine == "inductor"

    def test_the_whole_graph_is_compiled_once_more_without_it(self, monkeypatch):
        """With the latch for single kernels off, the error ends the lowering: it is tried once more, and reported."""
        owner, name = compat.tiling.coalescing_analysis()
        calls = []

        def broken(*_):
            calls.append(1)
            raise AssertionError("numel mismatch")

        # The traceback must lead through tiling_utils.py or a tiling function, as it does from the real one.
        broken.__code__ = broken.__code__.replace(co_filename="tiling_utils.py")
        monkeypatch.setattr(owner, name, broken)
        config = tritium.CompilationConfig(pass_config=switches(enable_tiling_retry=False))
        pattern = ALL["crop_to_nhwc"]
        with pytest.warns(RuntimeWarning, match="tiling analysis failed"):
            generate(pattern.function, pattern.inputs(), pattern.dynamic, backend=tritium.Backend(config))
        (record,) = LEDGER.records()
        assert [failure.part for failure in record.failures] == ["tiling analysis"]
        assert len(calls) == 1
        assert record.engine == "inductor"
        assert record.kernels

    def test_our_own_mistakes_keep_inductor_s_choice(self, monkeypatch):
        monkeypatch.setattr(choose, "workload_of", self.broken)
        monkeypatch.setattr(session, "narrow", self.broken)
        pattern = ALL["pad_ncdhw"]
        with tritium.autofuse.enabled():
            (kernel,) = generate(pattern.function, pattern.inputs(), pattern.dynamic)
            (decision,) = tritium.autofuse.decisions()["kernels"]
        assert kernel.dims == 1
        assert "the cost model failed: AssertionError: numel mismatch" in decision["reason"]
        assert "all in 64 bits: AssertionError" in decision["sizes"]

    def test_what_dynamo_steers_by_passes_through(self):
        assert compat.dynamo.steers_dynamo(torch._dynamo.exc.SkipFrame("x"))
        assert compat.dynamo.steers_dynamo(torch.OutOfMemoryError("x"))
        assert not compat.dynamo.steers_dynamo(AssertionError("x"))


PROGRAM = """
import json, sys
sys.path.insert(0, {source!r})
import torch, tritium
from torch._dynamo.utils import counters
{before}

@torch.no_grad()
def main():
    x = torch.randn(2, 8, 12, 16)
    torch._dynamo.mark_dynamic(x, [2, 3])
    compiled = torch.compile(lambda x: x[:, :, 1:, 1:] * 2)
    torch.testing.assert_close(compiled(x), x[:, :, 1:, 1:] * 2)

main()
counted = counters["inductor"]
autograd = counters["aot_autograd"]
print(json.dumps({{
    "hits": counted["fxgraph_cache_hit"] + autograd["autograd_cache_hit"],
    "misses": counted["fxgraph_cache_miss"] + autograd["autograd_cache_miss"],
    "bypasses": counted["fxgraph_cache_bypass"],
}}))
"""


class TestIdentity:
    """A patched code generator with an unchanged key would find code that another policy made. Real processes."""

    @pytest.mark.codegen
    def test_every_change_of_the_policy_misses(self, tmp_path, in_process):
        package = tmp_path / "edited"
        shutil.copytree(Path(tritium.__file__).parent, package / "tritium", ignore=shutil.ignore_patterns("weights"))

        def run(before=""):
            program = textwrap.dedent(PROGRAM).format(source=str(package), before=before)
            found = json.loads(in_process(program, cache=tmp_path / "cache", loaded=True))
            assert found["bypasses"] == 0
            return "hit" if found["hits"] and not found["misses"] else "miss"

        on = "assert tritium.autofuse.enable() is None"
        assert run() == "miss"
        assert run(on) == "miss"
        assert run(on) == "hit"
        # Never enabled, and disabled again, are the same.
        assert run(f"{on}; tritium.autofuse.disable()") == "hit"
        assert run("tritium.autofuse.enable(narrow_sizes=False)") == "miss"
        file = package / "tritium" / "tiling" / "cost.py"
        file.write_text(file.read_text() + "\n# edited\n")
        assert run(on) == "miss"

    def test_the_policy_is_in_the_key(self):
        base = TilingPolicy()
        others = [
            TilingPolicy(prove_divisibility=False),
            TilingPolicy(narrow_sizes=False),
            TilingPolicy(choose_tiling=False),
            TilingPolicy(choose_reduction=False),
            TilingPolicy(retry_analysis=False),
            TilingPolicy(pins=((PAD, "2d"),)),
        ]
        assert len({policy.identity for policy in [base, *others]}) == 7
        assert TilingPolicy().identity == base.identity

    def test_every_file_of_the_policy_is_in_it(self, monkeypatch):
        base, original = TilingPolicy().identity, Path.read_bytes
        folder = Path(session.__file__).parent
        for edited in folder.glob("*.py"):
            monkeypatch.setattr(Path, "read_bytes", lambda file, e=edited: b"" if file == e else original(file))
            assert TilingPolicy().identity != base or not edited.stat().st_size, edited.name

    def test_plain_graphs_have_the_key_they_had(self):
        def key():
            key_type = owner_of("__init__")
            details = key_type.__new__(key_type)
            details.__init__(None, [], {}, [])
            return getattr(details, "tritium_tiling", None)

        assert key() is None
        with tritium.autofuse.enabled():
            assert key() == TilingPolicy().identity
        with session.active(TilingPolicy(narrow_sizes=False)):
            assert key() == TilingPolicy(narrow_sizes=False).identity
        assert key() is None


def test_a_context_s_policy_goes_before_the_process_s():
    with tritium.autofuse.enabled(narrow_sizes=True), session.active(TilingPolicy(narrow_sizes=False)):
        assert not session.current().policy.narrow_sizes
        seen = []
        thread = threading.Thread(target=lambda: seen.append(session.current().policy.narrow_sizes))
        thread.start()
        thread.join()
        assert seen == [True]


def test_importing_it_loads_no_compiler(in_process):
    program = "import sys, tritium; tritium.autofuse; assert 'torch._inductor.codegen.simd' not in sys.modules"
    in_process(program)


def test_compiled_code_survives_disable():
    """What was compiled stays; what is compiled later is Inductor's own."""
    pattern = ALL["pad_ncdhw"]
    with tritium.autofuse.enabled():
        first = generate(pattern.function, pattern.inputs(), pattern.dynamic)
    second = generate(pattern.function, pattern.inputs(), pattern.dynamic)
    assert [kernel.dims for kernel in first + second] == [2, 1]


def test_no_warning_is_given():
    with warnings.catch_warnings(), triton_on_cpu():
        warnings.simplefilter("error", RuntimeWarning)
        with tritium.autofuse.enabled():
            generate(lambda x: F.pad(x, (1, 1, 1, 1)), [torch.randn(4, 8, 8)], {0: (1, 2)})
