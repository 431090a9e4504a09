"""The backend as users meet it. Engine `eager` throughout: no code is generated, everything else is real."""

import pytest
import torch
from torch import nn

import tritium
from support.fidelity import assert_no_worse
from support.recognition import EAGER, Counting
from support.small_models import Block, Stack, block_inputs, flux, flux_inputs
from tritium.errors import ProviderError, ReportError


def eager_backend(**fields) -> tritium.Backend:
    return tritium.Backend(EAGER.with_(**fields))


class TestEntryStyles:
    def test_by_name_without_importing_tritium(self, in_process):
        program = """
import sys, torch
assert not any(name.startswith("tritium") for name in sys.modules)
f = torch.compile(lambda x: torch.nn.functional.rms_norm(x, (8,)), backend="tritium")
with torch.inference_mode():
    f(torch.ones(2, 8))
import tritium
print(tritium.explain(f).sites["rms_norm"].fused, torch._dynamo.list_backends().count("tritium"))
"""
        assert in_process(program, env={"TRITIUM_ENGINE": "eager"}).split() == ["1", "1"]

    def test_whole_module(self):
        model, inputs = Block(), block_inputs()
        with torch.inference_mode():
            compiled = torch.compile(model, backend=eager_backend())
            torch.testing.assert_close(compiled(*inputs), model(*inputs))
        assert tritium.explain(compiled).sites["rms_norm"].fused == 1

    def test_module_compiled_in_place(self):
        model, inputs = Block(), block_inputs()
        with torch.inference_mode():
            expected = model(*inputs)
            model.compile(backend=eager_backend())
            torch.testing.assert_close(model(*inputs), expected)
        assert tritium.explain(model).sites["rms_norm"].fused == 1

    def test_decorator_on_a_module_class(self):
        @torch.compile(backend=eager_backend())
        class Decorated(Block):
            pass

        plain = Block()
        model = Decorated()
        model.load_state_dict(plain.state_dict())
        inputs = block_inputs()
        with torch.inference_mode():
            torch.testing.assert_close(model(*inputs), plain(*inputs))
        assert tritium.explain(model).sites["mul_add"].fused == 1

    def test_decorator_on_a_forward_function(self):
        class Decorated(Block):
            @torch.compile(backend=eager_backend())
            def forward(self, x, gate):
                return super().forward(x, gate)

        model, inputs = Decorated(), block_inputs()
        with torch.inference_mode():
            torch.testing.assert_close(model(*inputs), Block.forward(model, *inputs))
        assert tritium.explain(model).sites["rms_norm"].fused == 1

    def test_repeated_blocks_of_a_stock_model(self):
        model, backend = flux(2, 2), Counting()
        with torch.inference_mode():
            inputs = flux_inputs()
            expected = model(**inputs)[0]
            model.compile_repeated_blocks(backend=backend, fullgraph=True)
            actual = model(**inputs)[0]
        torch.testing.assert_close(actual, expected)
        # Equal blocks share a graph. The first single block gets a fresh tensor and the second a slice with other
        # strides, which Dynamo guards on: one more, and the report names it.
        report = tritium.explain(model)
        assert backend.compiled == 3
        assert [entry["argument"] for entry in report.recompiles] == ["hidden_states"]
        assert "stride" in report.recompiles[0]["was"]
        assert report.sites["rms_norm"].fused == 4 + 2 + 2
        assert tritium.explain(model.transformer_blocks[1]).sites["rms_norm"].fused == 4


class TestEquality:
    def test_equal_configurations_make_equal_backends(self):
        assert tritium.Backend(EAGER) == tritium.Backend(tritium.CompilationConfig(engine="eager"))
        assert hash(tritium.Backend(EAGER)) == hash(tritium.Backend(EAGER))
        assert tritium.Backend(EAGER) != tritium.Backend()
        assert tritium.Backend(EAGER) != "tritium"

    def test_wrapping_twice_compiles_once_and_both_explain(self):
        model, inputs = Block(), block_inputs()
        with torch.inference_mode():
            first = torch.compile(model, backend=(a := Counting()))
            first(*inputs)
            second = torch.compile(model, backend=(b := Counting()))
            second(*inputs)
        assert a == b
        assert (a.compiled, b.compiled) == (1, 0)
        assert tritium.explain(first).to_dict() == tritium.explain(second).to_dict()

    def test_another_configuration_compiles_again(self):
        model, inputs = Block(), block_inputs()
        with torch.inference_mode():
            torch.compile(model, backend=(a := Counting()))(*inputs)
            off = tritium.FusionPatterns(enable_rms_norm=False)
            torch.compile(model, backend=(b := Counting(EAGER.with_(fusion_patterns=off))))(*inputs)
        assert (a.compiled, b.compiled) == (1, 1)


class TestGuardsStay:
    """Each change must give eager's answer; the reference is the uncompiled class function on the same module."""

    @pytest.fixture
    def pair(self):
        model = Block()
        with torch.inference_mode():
            yield model, torch.compile(model, backend=eager_backend()), block_inputs()

    @pytest.mark.parametrize(
        ("name", "values"),
        [
            ("flag", (True, False, True)),
            ("bias", (None, torch.ones(16), None, torch.zeros(1))),
            ("scale", (1.0, 2.5, 3.5, 4, 1.0)),
        ],
    )
    def test_changed_argument(self, pair, name, values):
        model, compiled, inputs = pair
        for value in values:
            torch.testing.assert_close(compiled(*inputs, **{name: value}), model(*inputs, **{name: value}))

    def test_changed_module_attribute(self, pair):
        model, compiled, inputs = pair
        torch.testing.assert_close(compiled(*inputs), model(*inputs))
        model.norm.eps = 0.5
        expected = model(*inputs)
        torch.testing.assert_close(compiled(*inputs), expected)

    def test_dtype_rank_and_shape(self, pair):
        model, compiled, (x, gate) = pair
        torch.testing.assert_close(compiled(x, gate), model(x, gate))
        torch.testing.assert_close(compiled(x[:, :3], gate), model(x[:, :3], gate))
        torch.testing.assert_close(compiled(x[:, :, None], gate[:, None]), model(x[:, :, None], gate[:, None]))
        model.double()
        torch.testing.assert_close(compiled(x.double(), gate.double()), model(x.double(), gate.double()))

    def test_weights(self, pair):
        model, compiled, inputs = pair
        compiled(*inputs)
        changes = [
            lambda: model.linear.weight.mul_(2),
            lambda: model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()}),
            lambda: setattr(model.linear, "weight", nn.Parameter(torch.randn(16, 16))),
            lambda: model.linear.weight.data.add_(1),
            lambda: setattr(model.linear.weight, "data", torch.randn(16, 16)),
        ]
        before = model(*inputs)
        for change in changes:
            change()
            expected = model(*inputs)
            assert not torch.equal(expected, before)
            torch.testing.assert_close(compiled(*inputs), expected)
            before = expected

    def test_equal_blocks_share_a_graph_and_keep_their_weights(self):
        model, backend = Stack(3), Counting()
        with torch.inference_mode():
            # Made here: the first block would otherwise get a normal tensor and the others inference tensors.
            inputs = block_inputs()
            expected = model(*inputs)
            for block in model.blocks:
                block.compile(backend=backend)
            torch.testing.assert_close(model(*inputs), expected)
        assert backend.compiled == 1

    def test_results_do_not_alias_inputs(self):
        inputs = (torch.ones(3),)
        for function in (lambda x: x.clone(), lambda x: x.clone().view(-1), lambda x: x.contiguous() * 1):
            with torch.inference_mode():
                result = torch.compile(function, backend=eager_backend())(*inputs)
            assert result.data_ptr() != inputs[0].data_ptr()
        with torch.inference_mode():
            view = torch.compile(lambda x: x.view(3, 1), backend=eager_backend())(*inputs)
        assert view.data_ptr() == inputs[0].data_ptr()


class TestModesOfAutograd:
    def test_inference_mode_and_no_grad_compile_each_their_own(self):
        model, inputs = Block(), block_inputs()
        backend = Counting()
        compiled = torch.compile(model, backend=backend)
        for context in (torch.inference_mode(), torch.no_grad()):
            with context:
                torch.testing.assert_close(compiled(*inputs), model(*inputs))
        assert backend.compiled == 2

    @pytest.mark.parametrize("engine", ["eager", pytest.param("inductor", marks=pytest.mark.codegen)])
    def test_a_graph_that_needs_gradients_is_left_alone_and_counted(self, engine):
        model, (x, gate) = Block(), block_inputs()
        compiled = torch.compile(model, backend=eager_backend(engine=engine))
        compiled(x, gate).sum().backward()
        gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
        model.zero_grad()
        model(x, gate).sum().backward()
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(gradients[name], parameter.grad)
        counts = tritium.explain(compiled).sites
        assert (counts["rms_norm"].declined, counts["mul_add"].declined) == (1, 1)
        assert counts["rms_norm"].fused == counts["rms_norm"].inductor == 0
        assert "needs gradients" in next(iter(counts["rms_norm"].reasons))
        assert "needs gradients" in str(tritium.explain(compiled))


class TestProviders:
    def test_pinned_inductor_changes_nothing(self):
        model, inputs = Block(), block_inputs()
        with torch.inference_mode():
            compiled = torch.compile(model, backend=eager_backend(force_provider="inductor"))
            assert torch.equal(compiled(*inputs), model(*inputs))
        report = tritium.explain(compiled)
        assert (report.sites["rms_norm"].inductor, report.sites["rms_norm"].fused) == (1, 0)
        assert not any(entry["changed"] for entry in report.passes)

    def test_a_pin_that_cannot_be_honoured_is_an_error(self):
        model, inputs = Block(), block_inputs()
        message = "Triton kernels run on a GPU, this graph runs on cpu"
        with torch.inference_mode(), pytest.raises(Exception, match=message) as error:
            torch.compile(model, backend=eager_backend(force_provider={"rms_norm": "triton"}))(*inputs)
        assert isinstance(getattr(error.value, "inner_exception", error.value), ProviderError)

    @pytest.mark.parametrize(
        ("pin", "message"),
        [
            ("trition", "no op has 'trition'; did you mean 'triton'"),
            ({"rms_norm": "cuda"}, "op 'rms_norm' has no provider 'cuda'; it has inductor, reference, triton"),
            ({"rms_nrom": "triton"}, "there is no op 'rms_nrom'; did you mean 'rms_norm'"),
        ],
    )
    def test_a_pin_that_names_nothing_is_an_error_at_once(self, pin, message):
        with pytest.raises(ProviderError, match=message):
            eager_backend(force_provider=pin)

    def test_a_pin_for_every_op_skips_what_it_cannot_take(self):
        model, inputs = Block(), block_inputs()
        with torch.inference_mode():
            compiled = torch.compile(model, backend=eager_backend(force_provider="triton"))
            torch.testing.assert_close(compiled(*inputs), model(*inputs))
        counts = tritium.explain(compiled).sites["rms_norm"]
        assert counts.inductor == 1
        assert "cannot take it: Triton kernels run on a GPU" in next(iter(counts.reasons))


class TestArguments:
    def test_options_and_mode_need_inductor(self):
        with torch.inference_mode(), pytest.raises(Exception, match="engine is 'eager'"):
            torch.compile(lambda x: x + 1, backend=eager_backend(), mode="max-autotune")(torch.ones(2))

    def test_an_unknown_option_names_the_nearest(self):
        with torch.inference_mode(), pytest.raises(Exception, match=r"did you mean 'triton\.max_tiles'"):
            torch.compile(lambda x: x + 1, backend=tritium.Backend(), options={"triton.max_tile": 3})(torch.ones(2))


class TestExplain:
    def test_nothing_compiled_is_an_error(self):
        with pytest.raises(ReportError, match="nothing compiled by tritium belongs to this Block"):
            tritium.explain(Block())

    def test_two_models_have_two_reports(self):
        small, large = Block(), Stack(2)
        inputs = block_inputs()
        with torch.inference_mode():
            a = torch.compile(small, backend=eager_backend())
            b = torch.compile(large, backend=eager_backend())
            a(*inputs)
            b(*inputs)
        assert tritium.explain(a).sites["rms_norm"].fused == 1
        assert tritium.explain(b).sites["rms_norm"].fused == 2
        assert tritium.explain().sites["rms_norm"].fused == 3

    def test_graph_breaks_show_each_graph_and_its_reason(self):
        class Broken(Block):
            def forward(self, x, gate):
                y = super().forward(x, gate)
                torch._dynamo.graph_break()
                return super().forward(y, gate)

        with torch.inference_mode():
            compiled = torch.compile(Broken(), backend=eager_backend())
            compiled(*block_inputs())
        report = tritium.explain(compiled)
        reasons = [graph["break_reason"] for graph in report.to_dict()["graphs"]]
        assert len(reasons) == 2
        assert "graph_break" in reasons[0]
        assert "test_backend.py" in reasons[0]
        assert reasons[1] is None
        assert report.sites["rms_norm"].fused == 2

    @pytest.mark.parametrize(
        ("change", "argument", "was", "now"),
        [
            ({"flag": False}, "flag", "True", "False"),
            ({"bias": torch.ones(16)}, "bias", "None", None),
            ({"scale": 2.0}, "scale", "1.0", "2.0"),
        ],
    )
    def test_a_recompile_names_its_argument(self, change, argument, was, now):
        with torch.inference_mode():
            compiled = torch.compile(Block(), backend=eager_backend())
            compiled(*block_inputs())
            compiled(*block_inputs(), **change)
        entries = tritium.explain(compiled).recompiles
        assert len(entries) == 1
        assert entries[0]["graph"] == "0/1"
        assert entries[0]["argument"] == argument
        if was != "None":
            assert entries[0]["was"] == was
        if now is not None:
            assert entries[0]["now"] == now

    def test_a_recompile_by_shape_and_dtype(self):
        with torch.inference_mode():
            f = torch.compile(lambda x: x * 2, backend=eager_backend())
            f(torch.ones(3, 4))
            f(torch.ones(3, 5))
            f(torch.ones(3, 5).double())
        entries = tritium.explain(f).recompiles
        assert (entries[0]["argument"], entries[0]["was"], entries[0]["now"]) == (
            "x",
            "size 4 at dim 1",
            "size 5 at dim 1",
        )
        assert (entries[1]["argument"], entries[1]["was"], entries[1]["now"]) == ("x", "dtype Float", "dtype Double")

    def test_a_reached_recompile_limit_is_an_entry(self):
        with torch.inference_mode(), torch._dynamo.config.patch(recompile_limit=3):
            f = torch.compile(lambda x: x * 2, backend=eager_backend(), dynamic=False)
            for size in range(3, 9):
                f(torch.ones(size))
        last = tritium.explain(f).recompiles[-1]
        assert "recompile_limit (3) reached" in last["reason"]
        assert last["argument"] == "x"
        assert last["now"].startswith("size ")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_flux_counts_and_numbers(dtype):
    model, inputs = flux().to(dtype), flux_inputs(dtype=dtype)
    exact_inputs = {k: v.double() if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}
    with torch.inference_mode():
        eager = model(**inputs)[0]
        compiled = torch.compile(model, backend=eager_backend(), fullgraph=True)
        actual = compiled(**inputs)[0]
        report = tritium.explain(compiled)
        exact = flux().double()
        exact.load_state_dict(model.state_dict())
        assert_no_worse(actual, eager, exact(**exact_inputs)[0])
    assert report.sites["rms_norm"].fused == 6
    assert report.sites["mul_add"].fused == 5
    assert report.sites["rms_norm"].declined == report.sites["mul_add"].declined == 0


def test_dynamic_shapes_keep_counts_and_numbers():
    model = flux()
    with torch.inference_mode():
        compiled = torch.compile(model, backend=(backend := Counting()), dynamic=True)
        for tokens in (16, 24, 7, 63):
            inputs = flux_inputs(tokens)
            torch.testing.assert_close(compiled(**inputs)[0], model(**inputs)[0], rtol=1e-4, atol=1e-5)
    assert backend.compiled <= 2
    per_graph = len(tritium.explain(compiled).records)
    assert tritium.explain(compiled).sites["rms_norm"].fused == 6 * per_graph


def test_switched_off_families_are_declined_and_said():
    off = tritium.FusionPatterns(enable_rms_norm=False)
    with torch.inference_mode():
        compiled = torch.compile(Block(), backend=eager_backend(fusion_patterns=off))
        compiled(*block_inputs())
    counts = tritium.explain(compiled).sites
    assert (counts["rms_norm"].declined, counts["rms_norm"].fused) == (1, 0)
    assert counts["mul_add"].fused == 1
    assert counts["rms_norm"].reasons == {"switched off: fusion_patterns for rms_norm": 1}
