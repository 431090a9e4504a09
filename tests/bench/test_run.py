from __future__ import annotations

import pytest
import torch

from tritium import CompilationConfig, compat, measure
from tritium.bench import run
from tritium.bench.decoders import WAN_DECODE
from tritium.bench.dynamic_kernels import DYNAMIC_KERNELS
from tritium.bench.workload import Built
from tritium.errors import ConfigError, TritiumError

EAGER_ENGINE = CompilationConfig(engine="eager")


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
    name, regimes = "tiny", ("static",)

    def build(self, device, dtype, *, small):
        torch.manual_seed(0)
        model = Block().to(device, dtype).eval()
        inputs = {"hidden_states": torch.randn(1, 7, 16).to(device, dtype), "return_dict": False}
        return Built(model, inputs, "7 tokens", small)


TINY = Tiny()


def settings(**fields):
    return run.Settings(**{"seconds": 0.0, "against": ("eager",), "cold": False, "config": EAGER_ENGINE, **fields})


def test_rows_of_eager_and_tritium():
    outcome = run.run(TINY, settings())
    eager, ours = outcome.rows
    assert (eager.variant, ours.variant) == ("eager", "tritium")
    assert (eager.mode, ours.mode) == (None, "default")
    assert eager.relative_l2 == 0.0
    assert ours.relative_l2 < 1e-6
    assert ours.shapes == {"hidden_states": [1, 7, 16]}
    assert ours.shrunk
    assert ours.dtype == "float32"
    assert ours.samples >= measure.MINIMUM_ROUNDS
    # Without torch.compile there is nothing for a ratio to be against.
    assert ours.ratio is None
    assert ours.first_call_s > 0


class Both(Tiny):
    regimes = ("static", "dynamic")


@pytest.mark.parametrize(
    ("regime", "measured"), [(None, ["tiny", "tiny dynamic"]), ("static", ["tiny"]), ("dynamic", ["tiny dynamic"])]
)
def test_one_regime_of_two(regime, measured):
    told = []
    outcome = run.run(Both(), settings(regime=regime), lambda what, share: told.append(share))
    assert list(dict.fromkeys(row.workload for row in outcome.rows)) == measured
    assert told == sorted(told)


def test_variants_that_tell_what_each_part_is_worth():
    outcome = run.run(TINY, settings(exact=True, without=("rms_norm", "gated_residual")))
    names = ["eager", "tritium", "tritium exact", "tritium without rms_norm", "tritium without gated_residual"]
    assert [row.variant for row in outcome.rows] == names
    rows = dict(zip(names, outcome.rows, strict=True))
    assert rows["tritium exact"].relative_l2 == 0.0
    assert rows["tritium exact"].mode is None


def test_errors_against_float64_come_after_what_was_measured_already():
    kept = []
    outcome = run.run(TINY, settings(errors=True, on_rows=kept.append))
    before, after = kept
    assert [row.error_f64 for row in before] == [None, None]
    assert after == outcome.rows
    assert [row.key for row in before] == [row.key for row in after]
    for row in after:
        assert 0 < row.error_f64 < 1e-5


def test_errors_of_what_is_called_by_another_name():
    pytest.importorskip("diffusers")
    # `AutoencoderKLWan.decode`, which is not its `forward`.
    eager, ours = run.run(WAN_DECODE, settings(errors=True, regime="static")).rows
    assert 0 < ours.error_f64 < 2 * eager.error_f64 + 16 * torch.finfo(torch.float32).eps


def test_a_function_has_no_errors_to_measure():
    workload = DYNAMIC_KERNELS[0]
    with pytest.raises(ConfigError, match="is a function"):
        run.run(workload, settings(errors=True))


def test_graphs_are_measured_and_their_host_time_is_told():
    outcome = run.run(TINY, settings(graphs=True))
    assert [row.variant for row in outcome.rows] == ["eager", "tritium", "tritium graphs"]
    captured = outcome.rows[2]
    assert captured.relative_l2 < 1e-6
    assert all(row.host_us > 0 for row in outcome.rows)
    import tritium

    report = tritium.explain(outcome.models["tritium graphs"])
    assert any(entry["hits"] for entry in report.captures)


def test_inductors_graphs_are_what_graphs_are_compared_with():
    assert settings(graphs=True, against=("inductor",)).variants == [
        "inductor",
        "tritium",
        "tritium graphs",
        "inductor reduce-overhead",
    ]
    with pytest.raises(ConfigError, match="compares with mode 'reduce-overhead' already"):
        settings(graphs=True, mode="reduce-overhead")


@pytest.mark.parametrize(("variant", "fused"), [("tritium", 1), ("tritium without rms_norm", 0)])
def test_an_op_that_is_left_out_is_left_to_inductor(variant, fused):
    import tritium

    built = TINY.build("cpu", torch.float32, small=True)
    made = run.compiled(built, variant, settings(without=("rms_norm",)))
    with torch.inference_mode():
        made.call(**built.inputs)
    assert tritium.explain(made.parts[0]).sites["rms_norm"].fused == fused


def test_an_op_that_does_not_exist_cannot_be_left_out():
    with pytest.raises(ConfigError, match="did you mean 'rms_norm'"):
        settings(without=("rms_nrom",))


def test_the_compiled_model_is_handed_out_for_explain():
    import tritium

    outcome = run.run(TINY, settings())
    assert tritium.explain(outcome.models["tritium"]).sites["rms_norm"].fused == 1


def test_a_wrong_answer_is_seen(monkeypatch):
    original = run.compiled

    def off_by_a_tenth(built, variant, *given):
        made = original(built, variant, *given)
        if variant != "tritium":
            return made
        return run.Compiled(lambda **inputs: (made.call(**inputs)[0] * 1.1,), made.parts)

    monkeypatch.setattr(run, "compiled", off_by_a_tenth)
    assert run.run(TINY, settings()).rows[-1].relative_l2 == pytest.approx(0.1, rel=1e-3)


def test_values_that_are_not_finite_are_an_error(monkeypatch):
    monkeypatch.setattr(Block, "forward", lambda self, hidden_states, return_dict: (hidden_states / 0,))
    with pytest.raises(TritiumError, match="not finite"):
        run.run(TINY, settings())


def test_progress_only_grows():
    told = []
    run.run(TINY, settings(), lambda what, share: told.append((what, share)))
    shares = [share for _, share in told]
    assert shares == sorted(shares)
    assert any("compiling with tritium" in what for what, _ in told)


def test_parameters_are_ordinary_tensors():
    # Built under inference mode they would have no version counter, unlike those of every user.
    model = run.run(TINY, settings()).models["eager"]
    assert not any(parameter.is_inference() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"against": ("inductr",)}, "did you mean 'inductor'"),
        ({"mode": "max-autotun"}, "did you mean 'max-autotune'"),
    ],
)
def test_settings_that_mean_nothing_name_the_nearest(fields, message):
    with pytest.raises(ConfigError, match=message):
        settings(**fields)


def test_a_gpu_that_is_not_there_is_refused(monkeypatch):
    monkeypatch.setattr(run.device, "cuda_available", lambda: False)
    with pytest.raises(ConfigError, match="no CUDA device"):
        settings(device_type="cuda")


@pytest.mark.codegen
def test_all_sides_live_at_once_and_are_compiled_once(monkeypatch):
    torch.compiler.reset()
    compiled = []
    original = measure.interleave

    def counting(variants, device_type, **options):
        before = dict(torch._dynamo.utils.counters["stats"])
        timings = original(variants, device_type, **options)
        compiled.append(torch._dynamo.utils.counters["stats"]["unique_graphs"] - before["unique_graphs"])
        return timings

    monkeypatch.setattr(measure, "interleave", counting)
    before = compat.dynamo.inductor_seconds()
    outcome = run.run(TINY, settings(against=("eager", "inductor"), config=CompilationConfig(), cold=True))
    assert compat.dynamo.inductor_seconds() > before
    # Taking turns must not throw away what another side compiled.
    assert compiled == [0]
    by_variant = {row.variant: row for row in outcome.rows}
    assert list(by_variant) == ["eager", "inductor", "tritium"]
    assert by_variant["inductor"].ratio == 1.0
    ours = by_variant["tritium"]
    assert ours.ratio == pytest.approx(by_variant["inductor"].median_ms / ours.median_ms)
    assert ours.first_call_cold
    assert max(row.relative_l2 for row in outcome.rows) < 1e-5


def test_the_profile_says_what_fusion_gains():
    eager, ours = run.run(TINY, settings(profile=True)).rows
    assert eager.operators_us > 0
    assert eager.fusion_gain is None
    assert ours.fusion_gain == pytest.approx((ours.operators_us - eager.operators_us) / eager.operators_us)


def test_a_profile_without_eager_has_nothing_to_be_against():
    with pytest.raises(ConfigError, match="--against needs eager"):
        settings(profile=True, against=("inductor",))


@pytest.mark.codegen
def test_generated_code_counts_as_time_in_operators():
    from tritium.bench.profile import operator_time

    x = torch.randn(1 << 20)

    def chain(x):
        return x.sin().cos().sin().cos()

    with torch.inference_mode():
        compiled = torch.compile(chain, backend="tritium")
        fused = operator_time(lambda: compiled(x), "cpu")
    # Four passes of sine and cosine over a million numbers take far more than bookkeeping; nothing of it is an operator.
    assert fused > 500
