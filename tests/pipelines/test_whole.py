"""A denoiser as one program: what Dynamo's guards must see, and what happens where a forward is not one graph."""

import random

import accelerate.hooks
import pytest
import torch
from diffusers.models.attention_processor import AttnProcessor2_0
from diffusers.models.transformers.transformer_flux import FluxAttnProcessor
from torch import nn

import tritium
from support import small_models, small_pipelines, tiny_pipeline
from support.zoo import ZOO
from tritium import CompilationConfig, Plan, compat
from tritium.errors import ConfigError, PipelineError
from tritium.techniques.choice import Choice
from tritium.techniques.graphs import Graphs

EAGER = CompilationConfig(engine="eager")
PLAN = Plan(config=EAGER, progress=False)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return small_models.flux(2, 1).eval().requires_grad_(requires_grad=False)


@pytest.fixture
def inputs():
    return small_models.flux_inputs()


def call(model, inputs):
    with torch.inference_mode():
        return model(**inputs)[0]


def attributes(model):
    return {path: {key: id(value) for key, value in m.__dict__.items()} for path, m in model.named_modules()}


def graphs(handle):
    return len(handle.report.records)


class TestBareModel:
    def test_one_part_in_place_and_back(self, model, inputs):
        expected, before = call(model, inputs), attributes(model)
        handle = tritium.optimize(model, PLAN)
        assert handle.pipe is model
        assert list(handle.choices) == ["model"]
        torch.testing.assert_close(call(model, inputs), expected)
        assert handle.components[0].what == "compiled: FluxTransformer2DModel as one program"
        assert graphs(handle) == 1
        handle.remove()
        assert attributes(model) == before
        assert torch.equal(call(model, inputs), expected)

    def test_a_vae_is_its_decoder(self):
        vae = small_pipelines.autoencoder().eval().requires_grad_(requires_grad=False)
        latent = torch.randn(1, 4, 8, 8)
        with torch.inference_mode():
            expected = vae.decode(latent).sample
            with tritium.optimize(vae, PLAN) as handle:
                torch.testing.assert_close(vae.decode(latent).sample, expected)
                assert {record.function for record in handle.report.records} == {"Decoder.forward"}
        assert [component.name for component in handle.components] == ["model"]

    def test_a_second_handle_is_refused(self, model):
        with tritium.optimize(model, PLAN), pytest.raises(PipelineError, match="optimized already"):
            tritium.optimize(model, PLAN)

    def test_what_concerns_pipelines_is_refused(self, model):
        before = attributes(model)
        with pytest.raises(ConfigError, match=r"a bare model is called with tensors"):
            tritium.optimize(model, PLAN.with_(shapes=tritium.Shapes(sizes=[(32, 32)])))
        with pytest.raises(PipelineError, match=r"Plan\.components names 'transformer'"):
            tritium.optimize(model, PLAN.with_(components={"transformer": "eager"}))
        assert attributes(model) == before

    def test_it_can_be_left_alone_and_switched(self, model, inputs):
        with tritium.optimize(model, PLAN.with_(components={"model": "eager"})) as handle:
            call(model, inputs)
            assert graphs(handle) == 0
            handle.use({"model": Choice()})
            call(model, inputs)
            assert graphs(handle) == 1


class Halved(FluxAttnProcessor):
    def __call__(self, *args, **kwargs):
        return tuple(part * 0.5 for part in super().__call__(*args, **kwargs))


def replace_forward(model):
    block = model.single_transformer_blocks[0]
    own = block.forward
    block.forward = lambda *args, **kwargs: tuple(part * 0.5 for part in own(*args, **kwargs))


def assign_weights(model):
    model.load_state_dict({name: value * 1.5 for name, value in model.state_dict().items()}, assign=True)
    model.requires_grad_(requires_grad=False)


# What a user changes on a model that is compiled already, and the number of graphs afterwards.
CHANGES = {
    "a pre-hook": (
        lambda model: model.norm_out.register_forward_pre_hook(lambda module, args: (args[0] * 0.5, *args[1:])),
        None,
    ),
    "a hook on the model": (lambda model: model.register_forward_hook(lambda module, args, out: (out[0] * 3,)), None),
    "a replaced forward": (replace_forward, 2),
    "a dropped block": (lambda model: model.transformer_blocks.pop(1), 2),
    "an added block": (lambda model: model.transformer_blocks.append(model.transformer_blocks[0]), 2),
    "weights in place": (lambda model: model.proj_out.weight.mul_(2), 1),
    "assigned weights": (assign_weights, None),
    "a processor": (lambda model: model.transformer_blocks[0].attn.set_processor(Halved()), 2),
    "eps": (lambda model: setattr(model.norm_out.norm, "eps", 0.5), 2),
}


class TestGuards:
    def changed(self, model, inputs, change):
        """A call before and after a change, compiled and eagerly; returns the handle's graphs."""
        with tritium.optimize(model, PLAN) as handle:
            before = call(model, inputs)
            with torch.no_grad():
                change(model)
            found = call(model, inputs)
            count = graphs(handle)
            assert handle.part("model").refused is None
        expected = call(model, inputs)
        torch.testing.assert_close(found, expected)
        return not torch.allclose(found, before), count

    def test_hooks_come_and_go(self, model, inputs):
        expected = call(model, inputs)
        with tritium.optimize(model, PLAN) as handle:
            call(model, inputs)
            seen = []
            hook = model.transformer_blocks[1].attn.register_forward_hook(lambda *args: seen.append(1))
            doubled = model.proj_out.register_forward_hook(lambda module, args, out: out * 2)
            torch.testing.assert_close(call(model, inputs), expected * 2)
            doubled.remove()
            torch.testing.assert_close(call(model, inputs), expected)
            assert seen
            hook.remove()
            count, compiled = len(seen), graphs(handle)
            torch.testing.assert_close(call(model, inputs), expected)
            assert (len(seen), graphs(handle)) == (count, compiled), "the first program fits again"

    @pytest.mark.parametrize(
        # "a dropped block" changes the same list.
        "change",
        [pytest.param(change, marks=[pytest.mark.thorough] * (change == "an added block")) for change in CHANGES],
    )
    def test_a_change_is_seen(self, model, inputs, change):
        apply, graphs = CHANGES[change]
        differs, count = self.changed(model, inputs, apply)
        assert differs
        assert graphs in (None, count)

    @pytest.mark.thorough
    def test_a_u_net_and_its_processors(self):
        entry = ZOO["sdxl_unet"]
        model, inputs = entry.build(torch.float32), entry.inputs(torch.float32)
        with torch.inference_mode():
            expected = model(**inputs)[0]
            with tritium.optimize(model, PLAN) as handle:
                torch.testing.assert_close(model(**inputs)[0], expected)
                model.set_attn_processor(AttnProcessor2_0())
                torch.testing.assert_close(model(**inputs)[0], expected)
                assert handle.part("model").refused is None


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x):
        return self.linear(self.norm(x))


class Broken(nn.Module):
    """A stack of blocks around something that Dynamo cannot trace."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
            torch._dynamo.graph_break()
        return x


class TestNotOneGraph:
    @pytest.fixture
    def broken(self):
        torch.manual_seed(0)
        return Broken().requires_grad_(requires_grad=False)

    def test_it_runs_block_by_block_and_says_why(self, broken):
        x = torch.randn(2, 8)
        expected = broken(x)
        with torch.inference_mode(), tritium.optimize(broken, PLAN) as handle:
            for _ in range(2):
                torch.testing.assert_close(broken(x), expected)
            (component,) = handle.components
            assert component.what.startswith("compiled: 4 Layer (block by block: its forward is not one program (")
            assert "graph_break" in component.what
            assert "_compiled_call_impl" in broken.blocks[0].__dict__
        assert "_compiled_call_impl" not in broken.blocks[0].__dict__

    def test_tables_of_a_first_call(self):
        """Z-Image computes its tables in the first call, inside a context that Dynamo does not trace."""

        class Tabled(Broken):
            table = None

            def forward(self, x):
                if self.table is None:
                    with torch.device("cpu"):
                        self.table = torch.arange(8.0)
                x = x + self.table
                for block in self.blocks:
                    x = x + block(x)
                return x

        model, x = Tabled().requires_grad_(requires_grad=False), torch.randn(2, 8)
        with torch.inference_mode(), tritium.optimize(model, PLAN) as handle:
            first, second = model(x), model(x)
            assert handle.part("model").refused is None
            (component,) = handle.components
            assert component.what == "compiled: Tabled as one program"
            assert "_compiled_call_impl" not in model.blocks[0].__dict__
            torch.testing.assert_close(second, first)
        torch.testing.assert_close(first, model(x))

    def test_a_callers_mistake_is_the_callers(self, model, inputs):
        with tritium.optimize(model, PLAN) as handle:
            wrong = {**inputs, "hidden_states": inputs["hidden_states"][..., :-1]}
            with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
                call(model, wrong)
            assert handle.part("model").refused is None
            assert not any("_compiled_call_impl" in m.__dict__ for m in model.modules() if m is not model)
            call(model, inputs)
            assert handle.components[0].what == "compiled: FluxTransformer2DModel as one program"

    def test_the_recompile_limit(self, model, inputs):
        with (
            torch._dynamo.config.patch(recompile_limit=1),
            tritium.optimize(model, PLAN.with_(dynamic=False)) as handle,
        ):
            for tokens in (16, 20, 24):
                given = small_models.flux_inputs(tokens)
                expected = call(model, given) if tokens == 16 else None
                found = call(model, given)
                assert expected is None or torch.equal(found, expected)
            assert handle.part("model").refused == "it reached Dynamo's recompile limit"

    def test_models_do_not_share_the_limit(self, model, inputs):
        """diffusers decorates the forward of most denoisers with one function, whose code they share."""
        with torch._dynamo.config.patch(recompile_limit=2):
            for depth in range(1, 4):
                other = small_models.flux(depth, 1).eval().requires_grad_(requires_grad=False)
                with tritium.optimize(other, PLAN) as handle:
                    call(other, inputs)
                    assert handle.part("model").refused is None

    def test_an_offloading_hook(self, model, inputs):
        expected = call(model, inputs)
        accelerate.hooks.add_hook_to_module(model, accelerate.hooks.ModelHook())
        with tritium.optimize(model, PLAN) as handle:
            torch.testing.assert_close(call(model, inputs), expected)
            assert "an accelerate hook (ModelHook) runs around its forward" in handle.components[0].what
            assert graphs(handle) > 1

    def test_blocks_that_the_plan_names_are_compiled_one_by_one(self, model, inputs):
        expected = call(model, inputs)
        blocks = {"model": ("FluxTransformerBlock", "FluxSingleTransformerBlock")}
        with tritium.optimize(model, PLAN.with_(blocks=blocks)) as handle:
            torch.testing.assert_close(call(model, inputs), expected)
            assert "FluxTransformerBlock" in handle.components[0].what
            assert graphs(handle) > 1


# It reads a number off the device in its forward.
NOT_ONE_GRAPH = {"lumina2"}
DENOISERS = [name for name in ZOO if not name.endswith("decoder")]
QUICK = {"flux", "wan", "lumina2", "hidream"}


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.thorough) for name in DENOISERS]
)
def test_stock_denoisers_are_one_program(name):
    entry = ZOO[name]
    model, inputs = entry.build(torch.float32), entry.inputs(torch.float32)
    with torch.inference_mode():
        expected = model(**inputs)
        with tritium.optimize(model, PLAN) as handle:
            found = model(**inputs)
            if name in NOT_ONE_GRAPH:
                # The first call has a second chance.
                assert handle.part("model").refused is None
                found = model(**inputs)
            refused = handle.part("model").refused
    torch.testing.assert_close(found[0], expected[0])
    assert (refused is not None) == (name in NOT_ONE_GRAPH), refused


class TestGraphs:
    def test_auto_is_the_default(self):
        assert Plan().inherited()["graphs"] == Graphs("auto")
        assert Plan(graphs="off").inherited()["graphs"] == Graphs("off")

    def test_the_configuration_counts_where_the_plan_leaves_it(self):
        assert Plan(config=CompilationConfig(graphs="only")).inherited()["graphs"] == Graphs("only")

    @pytest.mark.parametrize("wrong", ["on", None, True, 3])
    def test_a_wrong_value_raises_when_the_plan_is_made(self, wrong):
        with pytest.raises(ConfigError, match=r"Plan\.graphs"):
            Plan(graphs=wrong)

    def test_two_words_for_it(self):
        with pytest.raises(ConfigError, match="'off' and its configuration says 'only'"):
            Plan(graphs="off", config=CompilationConfig(graphs="only"))

    def test_one_capture_for_the_whole_call(self, model, inputs):
        expected = call(model, inputs)
        with tritium.optimize(model, PLAN.with_(graphs="with_compile")) as handle:
            for _ in range(3):
                torch.testing.assert_close(call(model, inputs), expected)
            (capture,) = handle.captures
            assert (capture.declined, capture.hits) == (None, 3)

    def test_a_part_can_have_its_own(self, model, inputs):
        plan = PLAN.with_(components={"model": Choice(graphs="with_compile")})
        with tritium.optimize(model, plan) as handle:
            call(model, inputs)
            assert len(handle.captures) == 1

    def test_five_hundred_mixed_calls_of_24_shapes(self):
        """Captured as a whole, inside a shape contract: no wrong result, no recompile, no input changed."""
        pipe = tiny_pipeline.Pipeline()
        sizes = [(16 * height, 16 * width) for height in range(1, 5) for width in range(1, 4)]
        shapes = tritium.Shapes(sizes=sizes, batch=[1, 2], on_violation="error")
        plan = Plan(config=CompilationConfig(engine="eager"), graphs="with_compile", shapes=shapes, progress=False)
        calls = {
            (batch, height * width // 16): torch.randn(batch, height * width // 16, tiny_pipeline.WIDTH)
            for height, width in sizes
            for batch in (1, 2)
        }

        def called(x):
            with torch.no_grad():
                return pipe.transformer(x, guidance=None, return_dict=False)[0]

        expected = {key: called(x) for key, x in calls.items()}
        before = {key: x.clone() for key, x in calls.items()}
        order, held = random.Random(0), []
        with tritium.optimize(pipe, plan) as handle:
            handle.warmup()
            graphs, rows = compat.dynamo.graphs_compiled(), len(handle.captures)
            for _ in range(500):
                key = order.choice(list(calls))
                held = [*held[-1:], (called(calls[key]), key)]
                assert all(torch.allclose(result, expected[its], atol=1e-6) for result, its in held)
            assert compat.dynamo.graphs_compiled() == graphs
            assert len(handle.captures) == rows == len(calls)
            assert handle.violations == []
        assert all(torch.equal(x, before[key]) for key, x in calls.items())


class TestAround:
    def test_inside_a_graph_of_the_callers(self, model, inputs):
        expected = call(model, inputs)
        with tritium.optimize(model, PLAN):
            around = torch.compile(lambda **given: model(**given)[0] * 2, backend="eager", fullgraph=True)
            with torch.inference_mode():
                torch.testing.assert_close(around(**inputs), expected * 2)

    def test_guidance_in_two_calls_replays_and_keeps_results_apart(self):
        pipe = small_pipelines.flux(1, 1)
        expected = small_pipelines.guided(pipe)
        with tritium.optimize(pipe, PLAN.with_(graphs="with_compile")) as handle:
            for _ in range(2):
                assert torch.equal(small_pipelines.guided(pipe), expected)
            assert handle.components[-1].calls == 8
            assert sum(capture.hits for capture in handle.captures) >= 8

    def test_two_denoisers_are_two_programs(self):
        pipe = tiny_pipeline.Pipeline(transformer_2=tiny_pipeline.Denoiser().eval())
        x = torch.randn(1, 9, tiny_pipeline.WIDTH)
        second = pipe.components["transformer_2"]
        with torch.no_grad():
            expected = [pipe.transformer(x)["sample"], second(x)["sample"]]
            with tritium.optimize(pipe, PLAN.with_(graphs="with_compile")) as handle:
                for _ in range(3):
                    torch.testing.assert_close(pipe.transformer(x)["sample"], expected[0])
                    torch.testing.assert_close(second(x)["sample"], expected[1])
                assert [component.what for component in handle.components] == ["compiled: Denoiser as one program"] * 2
                assert [capture.hits for capture in handle.captures] == [3, 3]

    def test_dynamic_sizes_are_traced_once(self, model):
        with tritium.optimize(model, PLAN.with_(dynamic=True)) as handle:
            for tokens in (16, 24, 36):
                given = small_models.flux_inputs(tokens)
                found = call(model, given)
                handle.use({"model": "eager"})
                torch.testing.assert_close(found, call(model, given))
                handle.use({"model": "tritium"})
            assert graphs(handle) == 1
