"""How workloads are measured: what is compiled, when, and which fields its rows have."""

from __future__ import annotations

import pytest
import torch

import tritium
from support.bench import Block, Tiny, settings
from tritium import CompilationConfig, compat, measure
from tritium.bench import comparison, workloads
from tritium.bench.comparison import compiled, twin
from tritium.bench.decoders import WAN_DECODE
from tritium.bench.dynamic_kernels import DYNAMIC_KERNELS
from tritium.bench.profile import operator_time
from tritium.errors import ConfigError, TritiumError

TINY = Tiny()


@pytest.fixture
def kept(monkeypatch):
    """Keeps what `run` compiles, by variant."""
    original, kept = comparison.compiled, {}

    def compiled(built, variant, *options, **more):
        kept.setdefault(variant, original(built, variant, *options, **more))
        return kept[variant]

    monkeypatch.setattr(workloads, "compiled", compiled)
    return kept


def test_rows_of_eager_and_tritium(kept):
    eager, ours = workloads.run(TINY, settings())
    assert (eager.variant, ours.variant) == ("eager", "tritium")
    assert (eager.mode, ours.mode) == (None, "default")
    assert eager.relative_l2 == 0.0
    assert ours.relative_l2 < 1e-6
    assert ours.shapes == {"hidden_states": [1, 7, 16]}
    assert (ours.shrunk, ours.dtype) == (True, "float32")
    assert ours.samples >= measure.MINIMUM_ROUNDS
    # Without torch.compile there is nothing for a ratio to be against.
    assert ours.ratio is None
    assert ours.first_call_s > 0
    (model,) = kept["tritium"].parts
    assert tritium.explain(model).sites["rms_norm"].fused == 1
    # Built under inference mode they would have no version counter, unlike those of every user.
    assert not any(parameter.is_inference() for parameter in model.parameters())


class Both(Tiny):
    dynamic = (False, True)


@pytest.mark.parametrize(
    ("dynamic", "measured"), [(None, ["tiny", "tiny dynamic"]), (False, ["tiny"]), (True, ["tiny dynamic"])]
)
def test_static_sizes_or_dynamic_ones_or_both(dynamic, measured):
    told = []
    rows = workloads.run(Both(), settings(dynamic=dynamic), lambda what, share: told.append((what, share)))
    assert list(dict.fromkeys(row.workload for row in rows)) == measured
    shares = [share for _, share in told]
    assert shares == sorted(shares)
    assert any("first call, tritium" in what for what, _ in told)


def test_exact_shows_what_bit_equality_costs():
    rows = {row.variant: row for row in workloads.run(TINY, settings(exact=True))}
    assert list(rows) == ["eager", "tritium", "tritium exact"]
    assert (rows["tritium exact"].relative_l2, rows["tritium exact"].mode) == (0.0, None)


def test_errors_against_float64_come_after_timing():
    kept = []
    rows = workloads.run(TINY, settings(errors=True, on_rows=kept.append))
    before, after = kept
    assert [row.error_f64 for row in before] == [None, None]
    assert after == rows
    assert [row.key for row in before] == [row.key for row in after]
    assert all(0 < row.error_f64 < 1e-5 for row in after)


def test_errors_of_what_is_called_by_another_name():
    pytest.importorskip("diffusers")
    # `AutoencoderKLWan.decode`, which is not its `forward`.
    eager, ours = workloads.run(WAN_DECODE, settings(errors=True, dynamic=False))
    assert 0 < ours.error_f64 < 2 * eager.error_f64 + 16 * torch.finfo(torch.float32).eps


def test_a_function_has_no_errors_to_measure():
    with pytest.raises(ConfigError, match="is a function"):
        workloads.run(DYNAMIC_KERNELS[0], settings(errors=True))


def test_graphs_are_measured_with_their_host_time(kept):
    rows = workloads.run(TINY, settings(graphs=True))
    assert [row.variant for row in rows] == ["eager", "tritium", "tritium graphs"]
    assert rows[2].relative_l2 < 1e-6
    assert all(row.host_us > 0 for row in rows)
    assert any(entry["hits"] for entry in tritium.explain(*kept["tritium graphs"].parts).captures)
    # On a GPU they are compared with Inductor's.
    asked = settings(graphs=True, against=("inductor",))
    assert asked.variants == ["inductor", "tritium", "tritium graphs", "inductor reduce-overhead"]


def test_a_wrong_answer_is_seen(monkeypatch):
    original = workloads.compiled

    def off_by_a_tenth(built, variant, *options, **more):
        made = original(built, variant, *options, **more)
        if variant != "tritium":
            return made
        return comparison.Compiled(lambda **inputs: (made.call(**inputs)[0] * 1.1,), made.parts)

    monkeypatch.setattr(workloads, "compiled", off_by_a_tenth)
    assert workloads.run(TINY, settings())[-1].relative_l2 == pytest.approx(0.1, rel=1e-3)


def test_values_that_are_not_finite_are_an_error(monkeypatch):
    monkeypatch.setattr(Block, "forward", lambda self, hidden_states, return_dict: (hidden_states / 0,))
    with pytest.raises(TritiumError, match="not finite"):
        workloads.run(TINY, settings())


class Repeated(Block):
    """A block in a list, so that its linears are quantized by default."""

    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList([Block()])

    def forward(self, hidden_states, return_dict=True):
        return self.blocks[0](hidden_states)


def test_quantized_linears_are_a_variant(monkeypatch):
    monkeypatch.setattr("support.bench.Block", Repeated)
    asked = settings(quantize='{"linear": "int8-weights", "keep": "device"}')
    rows = {row.variant: row for row in workloads.run(Tiny(), asked)}
    assert list(rows) == ["eager", "tritium", asked.quantized]
    assert rows[asked.quantized].mode is None
    assert rows["tritium"].relative_l2 < 1e-5 < 1e-4 < rows[asked.quantized].relative_l2 < 0.05


def test_a_function_has_no_linears_to_quantize():
    with pytest.raises(ConfigError, match="--quantize concerns modules, and kernel pad dynamic is a function"):
        workloads.run(DYNAMIC_KERNELS[0], settings(quantize="int8"))


def test_a_model_without_quantized_linears_is_an_error():
    with pytest.raises(ConfigError, match="no linears in repeated blocks"):
        workloads.run(Tiny(), settings(quantize="int8"))


def test_a_gpu_that_is_not_there_is_refused(monkeypatch):
    monkeypatch.setattr(tritium.device, "cuda_available", lambda: False)
    with pytest.raises(ConfigError, match="no CUDA device"):
        settings(device_type="cuda")


@pytest.mark.codegen
def test_all_variants_live_at_once_and_are_compiled_once(monkeypatch):
    torch.compiler.reset()
    compiled = []
    original = measure.interleave

    def counting(variants, device_type, **options):
        before = compat.dynamo.graphs_compiled()
        timings = original(variants, device_type, **options)
        compiled.append(compat.dynamo.graphs_compiled() - before)
        return timings

    monkeypatch.setattr(measure, "interleave", counting)
    before = compat.dynamo.inductor_seconds()
    rows = workloads.run(TINY, settings(against=("eager", "inductor"), config=CompilationConfig(), cold=True))
    assert compat.dynamo.inductor_seconds() > before
    # Interleaving must not throw away what another variant compiled.
    assert compiled == [0]
    by_variant = {row.variant: row for row in rows}
    assert list(by_variant) == ["eager", "inductor", "tritium"]
    assert by_variant["inductor"].ratio == 1.0
    ours = by_variant["tritium"]
    assert ours.ratio == pytest.approx(by_variant["inductor"].median_ms / ours.median_ms)
    assert ours.first_call_cold
    assert max(row.relative_l2 for row in rows) < 1e-5


def test_the_profile_says_what_fusion_gains():
    eager, ours = workloads.run(TINY, settings(profile=True))
    assert eager.operators_us > 0
    assert eager.fusion_gain is None
    assert ours.fusion_gain == pytest.approx((ours.operators_us - eager.operators_us) / eager.operators_us)


@pytest.mark.codegen
def test_generated_code_counts_as_time_in_operators():
    x = torch.randn(1 << 20)

    def chain(x):
        return x.sin().cos().sin().cos()

    with torch.inference_mode():
        compiled = torch.compile(chain, backend="tritium")
        fused = operator_time(lambda: compiled(x), "cpu")
    # Four passes of sine and cosine over a million numbers take far more than bookkeeping; nothing of it is an operator.
    assert fused > 500


def test_twins_share_weights_and_nothing_else():
    block = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3)).eval()
    copied = twin(block)
    assert copied[0] is not block[0]
    assert copied[0].weight is block[0].weight
    assert copied[1].running_mean is block[1].running_mean
    copied[0].forward = lambda x: x
    assert not torch.equal(block[0](torch.ones(1, 3)), torch.ones(1, 3))


def test_what_dynamo_skips_in_one_variant_is_tried_in_the_next():
    # As plain torch.compile does with Wan's decoder before torch 2.13.
    pytest.importorskip("diffusers")
    built = WAN_DECODE.build("cpu", torch.float32, small=True)
    given_up = torch._dynamo.eval_frame.skip_code
    with torch.inference_mode():
        first, second = (compiled(built, "tritium", settings()) for _ in range(2))
        given_up(type(first.parts[0]._orig_mod).forward.__code__)
        results = [side.call(**built.inputs) for side in (first, second)]
    assert torch.equal(*results)
    assert {record.function for record in tritium.explain(second.parts[0]).records} == {"WanDecoder3d.forward"}
    assert second.parts[0]._orig_mod.conv_in.weight is built.model.decoder.conv_in.weight
