"""The policy in the backend: its switches and its report; and errors in Inductor's analysis, which it survives."""

import dataclasses
import json
from types import SimpleNamespace

import pytest
import sympy
import torch

import tritium
from tiling.generated import generate_pattern, hook_owner
from tritium import compat
from tritium.report.ledger import LEDGER
from tritium.tiling import choose, session
from tritium.tiling.policy import OFF, SWITCHES, TilingPolicy, policy_of

PAD = "triton_poi_fused_constant_pad_nd_0"


class TestBackend:
    def compiled(self, name="pad_ncdhw", force_tiling=None, **switches):
        """The one kernel of a pattern, the record of its graph, and that of the policy."""
        LEDGER.clear()
        config = tritium.CompilationConfig(pass_config=tritium.PassConfig(**switches), force_tiling=force_tiling)
        (kernel,), _ = generate_pattern(name, backend=tritium.Backend(config))
        (record,) = LEDGER.records()
        return kernel, record, next(entry for entry in record.passes if entry.name == "tiling_policy")

    def test_every_decision_is_in_the_report(self):
        kernel, record, policy = self.compiled()
        assert kernel.dims == 2
        assert policy.changed
        (entry,) = record.kernels
        assert entry.tiling.choice == "2d"
        assert "ps an element" in entry.tiling.reason
        assert entry.tiling.sizes.endswith("index expressions with dynamic sizes in 32 bits")
        json.dumps([kernel.to_dict() for kernel in record.kernels])
        # Afterwards Inductor is as before.
        assert generate_pattern("pad_ncdhw")[0][0].dims == 1

    def test_each_part_has_a_switch(self):
        def form(**switches):
            kernel, _, _ = self.compiled("crop_to_nhwc", **switches)
            return kernel.dims, "_i32" in kernel.source

        assert form() == (2, True)
        assert form(enable_narrow_sizes=False) == (2, False)
        unproven = 1 if compat.versions.TORCH < compat.tiling.PROVES_PRODUCTS else 2
        assert form(enable_divisibility_proof=False, enable_nd_tiling_workaround=False) == (unproven, True)
        kernel, record, _ = self.compiled(enable_nd_tiling_workaround=False)
        assert kernel.dims == 1
        assert record.kernels[0].tiling.reason == "choosing tilings is switched off"
        for part, switch in SWITCHES.items():
            config = tritium.CompilationConfig(pass_config=tritium.PassConfig(**{switch: False}))
            assert policy_of(config) == dataclasses.replace(TilingPolicy(), **{part: False})

    @pytest.mark.parametrize("switches", [{"enable_tiling_policy": False}, dict.fromkeys(SWITCHES.values(), False)])
    def test_all_switched_off(self, switches):
        kernel, record, policy = self.compiled(**switches)
        assert (kernel.dims, policy.declined, record.kernels[0].tiling) == (1, "switched off", None)
        assert "_i32" not in kernel.source
        config = tritium.CompilationConfig(pass_config=tritium.PassConfig(**switches))
        assert policy_of(config) == OFF

    @pytest.mark.parametrize("is_on", [True, False])
    def test_a_pin_acts_alone_too(self, is_on):
        kernel, _, policy = self.compiled(force_tiling=f"{PAD}=3d", enable_tiling_policy=is_on)
        assert kernel.grid == "Grid3D"
        assert policy.declined is None
        assert ("_i32" in kernel.source) == is_on

    def test_reasons_for_declines(self, monkeypatch):
        _, _, policy = self.compiled(force_tiling="triton_poi_fused_add_0=3d")
        assert policy.declined == "force_tiling: this graph has no kernel triton_poi_fused_add_0"
        monkeypatch.setattr(compat.tiling, "decline_tiling", lambda: "torch 2.99 has no SIMDScheduling.create_tiling")
        kernel, _, policy = self.compiled()
        assert policy.declined == "torch 2.99 has no SIMDScheduling.create_tiling"
        assert kernel.dims == 1

    def test_cpp_kernels_decline(self):
        with torch.inference_mode():
            compiled = torch.compile(lambda x: x + 1, backend=tritium.Backend())
            compiled(torch.ones(3))
        policy = next(entry for entry in tritium.explain(compiled).passes if entry["name"] == "tiling_policy")
        assert policy["declined"] == "C++ kernels have no tiles"


class TestErrorsOfTheAnalysis:
    """As in pytorch#197077: an assertion in the analysis must cost the analysis, not the graph."""

    def broken(self, *_, **__):
        raise AssertionError("numel mismatch")

    @pytest.fixture
    def analysis(self, monkeypatch):
        owner, name = compat.tiling.coalescing_analysis()
        monkeypatch.setattr(owner, name, self.broken)
        return owner, name

    def test_the_analysis_fails(self, analysis):
        with pytest.raises(Exception, match="numel mismatch"):
            generate_pattern("crop_to_nhwc")
        with pytest.raises(Exception, match="numel mismatch"):
            generate_pattern("crop_to_nhwc", policy={"retry_analysis": False})
        (kernel,), decisions = generate_pattern("crop_to_nhwc", policy={})
        assert "AssertionError: numel mismatch" in decisions["retries"][0]
        assert decisions["kernels"][0]["reason"] == "Inductor could not analyse its accesses"
        assert kernel.source

    def test_the_analysis_of_a_node_without_a_name_fails(self, analysis):
        """Since torch 2.14 Inductor also analyses views of several nodes."""
        view = SimpleNamespace(get_nodes=lambda: [SimpleNamespace(get_name=lambda: "op7")])
        with session.active(TilingPolicy()) as decisions:
            assert getattr(*analysis)(view) is None
        assert list(decisions.retries) == ["op7: AssertionError: numel mismatch"]

    def test_the_ranking_fails(self, monkeypatch):
        monkeypatch.setattr(hook_owner("create_tiling"), "compute_tiling_strategy", self.broken)
        _, decisions = generate_pattern("crop_to_nhwc", policy={})
        (retry,) = decisions["retries"]
        assert "numel mismatch" in retry
        assert decisions["kernels"][0]["reason"] == "Inductor could not analyse its accesses"

    @pytest.mark.skipif(compat.versions.TORCH < (2, 14), reason="the scheduler ranks tilings since torch 2.14")
    def test_the_ranking_of_the_scheduler_fails(self, monkeypatch):
        scheduling = hook_owner("create_tiling")
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

    def test_the_report_has_it(self, analysis):
        generate_pattern("crop_to_nhwc", backend=tritium.Backend(tritium.CompilationConfig()))
        (record,) = LEDGER.records()
        (failure,) = record.failures
        assert failure.part == "tiling analysis of one kernel"
        assert "numel mismatch" in failure.reason
        assert record.engine == "inductor"

    def test_the_graph_is_compiled_again_without_the_analysis(self, monkeypatch):
        """Without the retry for single kernels, the error ends the lowering: it is repeated once, and reported."""
        calls = []

        def broken(*_):
            calls.append(1)
            raise AssertionError("numel mismatch")

        # The traceback must lead through tiling_utils.py or a tiling function, as it does from the real one.
        broken.__code__ = broken.__code__.replace(co_filename="tiling_utils.py")
        monkeypatch.setattr(*compat.tiling.coalescing_analysis(), broken)
        config = tritium.CompilationConfig(pass_config=tritium.PassConfig(enable_tiling_retry=False))
        with pytest.warns(RuntimeWarning, match="tiling analysis failed"):
            generate_pattern("crop_to_nhwc", backend=tritium.Backend(config))
        (record,) = LEDGER.records()
        assert [failure.part for failure in record.failures] == ["tiling analysis"]
        assert len(calls) == 1
        assert record.engine == "inductor"
        assert record.kernels

    def test_errors_of_the_policy_keep_inductors_choice(self, monkeypatch):
        monkeypatch.setattr(choose, "workload_of", self.broken)
        monkeypatch.setattr(session, "narrow", self.broken)
        (kernel,), decisions = generate_pattern("pad_ncdhw", policy={})
        (decision,) = decisions["kernels"]
        assert kernel.dims == 1
        assert "the cost model failed: AssertionError: numel mismatch" in decision["reason"]
        assert "all in 64 bits: AssertionError" in decision["sizes"]

    def test_exceptions_that_steer_dynamo_pass_through(self):
        assert compat.dynamo.steers_dynamo(torch._dynamo.exc.SkipFrame("x"))
        assert compat.dynamo.steers_dynamo(torch.OutOfMemoryError("x"))
        assert not compat.dynamo.steers_dynamo(AssertionError("x"))
