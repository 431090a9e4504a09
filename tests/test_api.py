"""`tritium.optimize`: one call on a live pipeline, and back."""

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, ModelHook, add_hook_to_module
from diffusers.hooks import HookRegistry
from diffusers.hooks import ModelHook as DiffusersHook
from torch import nn

import tritium
from support import small_pipelines
from tritium import Choice, CompilationConfig, Plan
from tritium.errors import ConfigError, PipelineError
from tritium.pipelines import hooks, parts, trial
from tritium.pipelines.part import backend_of

# Rewrites without generating code: what is tested here is the front door.
EAGER = CompilationConfig(engine="eager")
PLAN = Plan(config=EAGER, progress=False)


@pytest.fixture
def pipe():
    return small_pipelines.flux(1, 1)


def attributes(pipe):
    """Every attribute of every module of a pipeline, by identity."""
    return {
        (name, path): {key: id(value) for key, value in module.__dict__.items()}
        for name, component in pipe.components.items()
        if isinstance(component, nn.Module)
        for path, module in component.named_modules()
    }


class TestReversible:
    def test_removing_restores_every_attribute_and_every_bit(self, pipe):
        # The first image leaves traces of its own: diffusers keeps a registry on the transformer.
        image = small_pipelines.generate(pipe)
        before = attributes(pipe)
        handle = tritium.optimize(pipe, PLAN)
        small_pipelines.generate(pipe)
        assert attributes(pipe) != before
        handle.remove()
        assert attributes(pipe) == before
        assert torch.equal(small_pipelines.generate(pipe), image)

    def test_a_context_manager_removes_itself_also_after_an_error(self, pipe):
        before = attributes(pipe)
        with pytest.raises(RuntimeError, match="mine"), tritium.optimize(pipe, PLAN):
            raise RuntimeError("mine")
        assert attributes(pipe) == before

    def test_removing_twice_does_nothing(self, pipe):
        first = tritium.optimize(pipe, PLAN)
        first.remove()
        second = tritium.optimize(pipe, PLAN)
        first.remove()
        assert second.active
        assert attributes(pipe)["transformer", ""].get("_compiled_call_impl")

    def test_layouts_come_back_with_their_strides_and_values(self, pipe):
        weights = list(pipe.vae.decoder.parameters())
        strides, values = [weight.stride() for weight in weights], [weight.clone() for weight in weights]
        image = small_pipelines.generate(pipe)
        handle = tritium.optimize(pipe, PLAN.with_(components={"vae.decode": Choice(how="eager", channels_last=True)}))
        assert pipe.vae.decoder.conv_in.weight.is_contiguous(memory_format=torch.channels_last)
        small_pipelines.generate(pipe)
        handle.remove()
        assert [weight.stride() for weight in weights] == strides
        assert all(map(torch.equal, weights, values))
        assert torch.equal(small_pipelines.generate(pipe), image)

    def test_layouts_are_compiled_apart(self, pipe):
        """torch 2.11 does not guard the strides of weights: what the other layout compiled must not be found."""
        part = tritium.optimize(pipe, PLAN).part("vae.decode")
        plain, other = Choice(), Choice(channels_last=True)
        with torch.inference_mode():
            for choice in (plain, other, plain, other):
                part.use(choice)
                small_pipelines.generate(pipe)
        weight = pipe.vae.decoder.conv_in.weight
        assert not weight.is_inference()
        for how in ("tritium", "inductor"):
            backends = []
            for layout in (True, False):
                part.use(Choice(how=how, channels_last=layout))
                backends.append(backend_of(part._settings))
            assert backends[0] != backends[1]

    def test_weights_that_change_meanwhile_stay_changed(self, pipe):
        handle = tritium.optimize(pipe, PLAN.with_(components={"vae.decode": Choice(how="eager", channels_last=True)}))
        with torch.no_grad():
            pipe.vae.decoder.conv_in.weight.fill_(2.0)
        handle.remove()
        assert bool((pipe.vae.decoder.conv_in.weight == 2).all())

    def test_a_pipeline_that_is_gone_is_gone(self):
        pipe = small_pipelines.flux(1, 1)
        watched = weakref.ref(pipe.transformer)
        handle = tritium.optimize(pipe, PLAN)
        small_pipelines.generate(pipe, steps=1)
        del pipe, handle
        for _ in range(3):
            gc.collect()
        assert watched() is None


class TestRefusals:
    def test_twice_is_an_error_that_says_so(self, pipe):
        with tritium.optimize(pipe, PLAN), pytest.raises(PipelineError, match="optimized already; call remove"):
            tritium.optimize(pipe, PLAN)

    def test_a_plan_is_a_plan(self, pipe):
        with pytest.raises(ConfigError, match="takes a Plan or the path of a recipe, got dict"):
            tritium.optimize(pipe, {})

    @pytest.mark.parametrize(
        ("plan", "message"),
        [
            ({"components": {"transfomer": "eager"}}, "did you mean 'transformer'"),
            ({"blocks": {"transformr": ("Block",)}}, "did you mean 'transformer'"),
            ({"blocks": {"transformer": ("FluxTransformerBloc",)}}, "did you mean 'FluxTransformerBlock'"),
        ],
    )
    def test_names_that_mean_nothing(self, pipe, plan, message):
        with pytest.raises(PipelineError, match=message):
            tritium.optimize(pipe, Plan(**plan))

    def test_what_is_valid_is_listed_once(self, pipe):
        with pytest.raises(PipelineError) as error:
            tritium.optimize(pipe, Plan(components={"nonsense": "eager"}))
        assert str(error.value).count("'transformer'") == 1

    @pytest.mark.parametrize("components", [{"vae": "fast"}, {"vae": 1}, {"vae": None}])
    def test_choices_that_mean_nothing(self, components):
        with pytest.raises(ConfigError):
            Plan(components=components)

    def test_a_compiled_pipeline(self, pipe):
        pipe.transformer.compile_repeated_blocks(backend="eager")
        with pytest.raises(PipelineError, match=r"transformer\.transformer_blocks\.0 has a compiled call already"):
            tritium.optimize(pipe, PLAN)

    @pytest.mark.parametrize("how", ["in place", "wrapped", "a block wrapped", "beside the blocks"])
    def test_a_compiled_component(self, pipe, how):
        compiled = COMPILED[how](pipe)
        with pytest.raises(
            PipelineError, match=rf"transformer{compiled} has a compiled call already.*or leave it alone"
        ):
            tritium.optimize(pipe, PLAN)

    def test_a_wrapped_model_of_unlike_blocks(self, pipe):
        wrapped = torch.compile(nn.Sequential(nn.Linear(2, 2), nn.Conv2d(1, 1, 1)), backend="eager")
        with pytest.raises(PipelineError, match="transformer has a compiled call already"):
            hooks.check(parts.denoiser("transformer", wrapped))

    def test_a_codec_inside_torch_compile_is_recognised(self, pipe):
        plain = tritium.optimize(pipe, PLAN)
        expected = plain.part("vae.decode").spec.varying
        plain.remove()
        pipe.vae = torch.compile(pipe.vae, backend="eager")
        with tritium.optimize(pipe, PLAN) as handle:
            part = handle.part("vae.decode")
            assert part.spec.varying == expected
            assert part.spec.varying
            assert part.module is pipe.vae.decoder

    def test_a_compiled_decoder(self, pipe):
        pipe.vae.decoder.compile(backend="eager")
        with pytest.raises(PipelineError, match=r"vae\.decode has a compiled call already"):
            tritium.optimize(pipe, PLAN)

    def test_hooks_inside_are_named_and_can_be_left_alone(self, pipe):
        add_hook_to_module(pipe.transformer.transformer_blocks[0].attn.to_q, AlignDevicesHook())
        with pytest.raises(PipelineError, match=r"blocks\.0\.attn\.to_q has an accelerate hook \(AlignDevicesHook\)"):
            tritium.optimize(pipe, PLAN)
        with tritium.optimize(pipe, PLAN.with_(components={"transformer": "eager"})) as handle:
            assert handle.choices["transformer"].how == "eager"
            small_pipelines.generate(pipe)

    def test_diffusers_hooks_are_named(self, pipe):
        HookRegistry.check_if_exists_or_initialize(pipe.transformer.transformer_blocks[0]).register_hook(
            DiffusersHook(), "group_offloading"
        )
        with pytest.raises(PipelineError, match=r"transformer_blocks\.0 has a diffusers hook \(group_offloading\)"):
            tritium.optimize(pipe, PLAN)

    def test_a_hook_on_a_whole_component_works(self, pipe):
        image = small_pipelines.generate(pipe)
        add_hook_to_module(pipe.transformer, ModelHook())
        with tritium.optimize(pipe, PLAN) as handle:
            assert torch.equal(small_pipelines.generate(pipe), image)
            assert handle.report.records


def compiled_in_place(pipe):
    pipe.transformer.compile(backend="eager")
    return ""


def compiled_and_wrapped(pipe):
    pipe.transformer = torch.compile(pipe.transformer, backend="eager")
    return ""


def compiled_block(pipe):
    pipe.transformer.transformer_blocks[0] = torch.compile(pipe.transformer.transformer_blocks[0], backend="eager")
    return r"\.transformer_blocks\.0"


def compiled_beside(pipe):
    pipe.transformer.time_text_embed.compile(backend="eager")
    return r"\.time_text_embed"


COMPILED = {
    "in place": compiled_in_place,
    "wrapped": compiled_and_wrapped,
    "a block wrapped": compiled_block,
    "beside the blocks": compiled_beside,
}


class Counting:
    """A backend that counts the calls of what it compiled."""

    def __init__(self):
        self.calls = 0

    def __call__(self, gm, example_inputs):
        def run(*args):
            self.calls += 1
            return gm(*args)

        return run


class TestCompiledBefore:
    """What a user compiled and the plan leaves alone."""

    LEFT = PLAN.with_(components={"transformer": "eager", "vae": "eager"})

    @pytest.mark.parametrize(
        "compile_",
        [
            lambda pipe, backend: pipe.transformer.compile(backend=backend),
            lambda pipe, backend: pipe.transformer.compile_repeated_blocks(backend=backend),
            lambda pipe, backend: pipe.vae.decoder.compile(backend=backend),
            lambda pipe, backend: pipe.text_encoder.compile(backend=backend),
            lambda pipe, backend: setattr(pipe, "transformer", torch.compile(pipe.transformer, backend=backend)),
        ],
        ids=["denoiser", "blocks", "decoder", "text encoder", "wrapped"],
    )
    def test_it_runs_on_and_comes_back(self, pipe, compile_):
        backend = Counting()
        compile_(pipe, backend)
        image = small_pipelines.generate(pipe)
        before, calls = attributes(pipe), backend.calls
        assert calls
        with tritium.optimize(pipe, self.LEFT) as handle:
            assert torch.equal(small_pipelines.generate(pipe), image)
            assert backend.calls == 2 * calls
            assert handle.part("transformer").times.calls
        assert attributes(pipe) == before
        small_pipelines.generate(pipe)
        assert backend.calls == 3 * calls

    @pytest.mark.parametrize("how", ["in place", "wrapped"])
    def test_switching_it_is_refused(self, pipe, how):
        COMPILED[how](pipe)
        with tritium.optimize(pipe, self.LEFT) as handle:
            with pytest.raises(PipelineError, match="transformer has a compiled call already"):
                handle.use({"transformer": Choice()})
            assert handle.choices["transformer"].how == "eager"


class TestSwapped:
    def test_the_summary_says_that_another_module_runs_as_it_is(self, pipe):
        with tritium.optimize(pipe, PLAN) as handle:
            small_pipelines.generate(pipe)
            pipe.transformer, pipe.vae = small_pipelines.flux().transformer, small_pipelines.autoencoder()
            rows = {component.name: component.what for component in handle.components}
        said = "the pipeline has another module there now, which runs as it is"
        assert rows["transformer"] == f"{said}; the figures are of the one before"
        assert rows["vae.encode"] == said
        assert rows["text_encoder"].startswith("left alone")

    def test_a_module_that_is_gone(self, pipe):
        with tritium.optimize(pipe, PLAN) as handle:
            pipe.text_encoder = None
            rows = {component.name: component.what for component in handle.components}
        assert rows["text_encoder"] == "the pipeline has no module there any more"


class TestParts:
    def test_blocks_are_compiled_once_however_many_there_are(self):
        counts = []
        for double, single in ((1, 2), (3, 3)):
            torch._dynamo.reset()
            pipe = small_pipelines.flux(double, single)
            with tritium.optimize(pipe, PLAN) as handle:
                small_pipelines.generate(pipe)
                counts.append(len(handle.report.records))
        assert counts[0] == counts[1]

    def test_decode_and_encode_are_what_is_compiled(self, pipe):
        with tritium.optimize(pipe, PLAN) as handle:
            latent = pipe.vae.encode(torch.rand(1, 3, 32, 32)).latent_dist.mean
            pipe.vae.decode(latent)
            functions = {record.function for record in handle.report.records}
        assert functions == {"Encoder.forward", "Decoder.forward"}

    def test_what_is_left_alone_is_listed_with_the_reason(self, pipe):
        with tritium.optimize(pipe, PLAN) as handle:
            small_pipelines.generate(pipe)
            rows = {component.name: component for component in handle.components}
        assert rows["text_encoder"].what.startswith("left alone (runs once an image")
        assert rows["transformer"].what == "compiled: FluxTransformer2DModel as one program"
        assert rows["transformer"].calls == 2
        assert rows["transformer"].first_call_seconds > 0
        shares = [component.share for component in rows.values() if component.share is not None]
        assert sum(shares) == pytest.approx(1)

    def test_the_summary_and_the_report(self, pipe, capsys):
        with tritium.optimize(pipe, PLAN) as handle:
            small_pipelines.generate(pipe)
            handle.summary()
            report = handle.report
        printed = capsys.readouterr().out
        assert "transformer" in printed
        assert "vae.decode" in printed
        assert report.sites["rope"].recognised
        assert [row["name"] for row in report.to_dict()["components"]] == [c.name for c in handle.components]
        assert "what was done" in str(report)

    def test_progress_says_what_was_compiled(self, pipe, capsys):
        with tritium.optimize(pipe, PLAN.with_(progress=True)):
            small_pipelines.generate(pipe)
            first = capsys.readouterr().err
            small_pipelines.generate(pipe)
            second = capsys.readouterr().err
        assert "tritium: transformer: compiled FluxTransformer2DModel.forward in" in first
        assert "tritium: vae.decode: compiled Decoder.forward in" in first
        assert "tritium" not in second

    def test_another_size_is_right(self, pipe):
        expected = small_pipelines.generate(pipe, height=48, width=64)
        with tritium.optimize(pipe, PLAN):
            small_pipelines.generate(pipe)
            assert torch.equal(small_pipelines.generate(pipe, height=48, width=64), expected)


class TestMeasuring:
    def test_each_part_is_measured_and_the_report_says_so(self, pipe, monkeypatch):
        monkeypatch.setattr(trial, "SECONDS", 0.0)
        monkeypatch.setattr(trial.decide, "__defaults__", (0.0,))
        decided = dict.fromkeys(("vae", "transformer", "text_encoder_2"), "eager")
        with tritium.optimize(pipe, PLAN.with_(measure=True, components=decided)) as handle:
            image = small_pipelines.generate(pipe)
            assert torch.isfinite(image).all()
            measured = handle.part("text_encoder").measured
            assert set(measured) == {"eager", "inductor", "tritium"}
            assert "eager" in next(row.what for row in handle.components if row.name == "text_encoder")
            assert not handle.part("vae.decode").measured, "the plan had decided already"

    @pytest.mark.parametrize(
        ("eager", "inductor", "ours", "expected"),
        [
            (10.0, 8.0, 7.0, "tritium"),
            (10.0, 8.0, 8.1, "tritium"),
            (10.0, 8.0, 9.0, "inductor"),
            (10.0, 9.8, 9.9, "eager"),
            (10.0, 12.0, 11.0, "eager"),
        ],
    )
    def test_what_loses_is_left_alone(self, eager, inductor, ours, expected):
        taken = {Choice(how="eager"): eager, Choice(how="inductor"): inductor, Choice(how="tritium"): ours}
        choice, why = trial.pick(taken)
        assert choice.how == expected
        assert f"eager {eager:.2f} ms" in why

    def test_a_layout_must_give_something(self):
        plain, other = Choice(), Choice(channels_last=True)
        taken = {Choice(how="eager"): 10.0, plain: 5.0, other: 4.95}
        assert trial.pick(taken)[0] == plain
        assert trial.pick({**taken, other: 4.0})[0] == other

    def test_graphs_are_a_way_of_running_and_must_give_something(self, pipe):
        plain, captured = Choice(), Choice(graphs="auto")
        taken = {Choice(how="eager"): 10.0, plain: 5.0, captured: 4.95}
        assert trial.pick(taken)[0] == plain
        assert trial.pick({**taken, captured: 3.0})[0] == captured
        expected = small_pipelines.generate(pipe)
        with tritium.optimize(pipe, PLAN) as handle:
            handle.part("transformer").use(Choice(graphs="with_compile"))
            assert torch.equal(small_pipelines.generate(pipe), expected)
            assert len(handle.captures) > 0
            assert Choice(graphs="auto") not in trial.ways(handle.part("transformer")), "there is no GPU to wait"
        with pytest.raises(ConfigError, match="is Tritium's"):
            Choice(how="inductor", graphs="auto")
        with pytest.raises(ConfigError, match="did you mean 'auto'"):
            Choice(graphs="aut")


class TestArtifacts:
    def test_a_damaged_file_is_refused_and_the_pipeline_compiles(self, pipe, tmp_path):
        path = tmp_path / "pipe.tritium"
        path.write_bytes(b"not what it says")
        expected = small_pipelines.generate(pipe)
        with pytest.warns(RuntimeWarning, match=r"pipe\.tritium.*compiling as usual"):
            handle = tritium.optimize(pipe, PLAN, artifacts=path)
        with handle:
            assert handle.artifacts is None
            assert torch.equal(small_pipelines.generate(pipe), expected)
            assert handle.report.records

    @pytest.mark.codegen
    def test_another_process_starts_from_a_moved_file(self, in_process, tmp_path):
        program = """
import sys; sys.path[:0] = ["tests"]
import pathlib, torch, tritium
from support import small_pipelines
pipe = small_pipelines.flux(1, 1)
# One small part: each kernel of the transformer takes the C++ compiler half a second.
parts = dict.fromkeys(("transformer", "vae", "text_encoder_2"), "eager") | {"text_encoder": "tritium"}
plan = tritium.Plan(components=parts, progress=False)
handle = tritium.optimize(pipe, plan, artifacts=ARTIFACTS)
image = small_pipelines.generate(pipe, steps=1)
if ARTIFACTS is None:
    handle.save(SAVED)
counters = torch._dynamo.utils.counters["inductor"]
print(counters["fxgraph_cache_miss"], counters["fxgraph_cache_hit"], image.double().sum().item())
"""
        first, moved = tmp_path / "first" / "pipe.tritium", tmp_path / "elsewhere.tritium"
        first.parent.mkdir()
        head = f"ARTIFACTS, SAVED = None, {str(first)!r}\n"
        cold = in_process(head + program, cache=tmp_path / "a", loaded=True).split()
        first.rename(moved)
        head = f"ARTIFACTS = {str(moved)!r}\n"
        warm = in_process(head + program, cache=tmp_path / "b", loaded=True).split()
        assert int(cold[0]) > 0
        assert warm[0] == "0"
        assert int(warm[1]) == int(cold[0]) + int(cold[1])
        assert warm[2] == cold[2]


def test_a_denoiser_without_blocks_is_one_program_or_left_alone():
    odd = nn.Sequential(nn.Linear(4, 4), nn.SiLU())
    pipe = SimpleNamespace(components={"transformer": odd})
    with tritium.optimize(pipe, PLAN) as handle:
        assert "one program" in handle.components[0].what
    with tritium.optimize(pipe, Plan(progress=False, components={"transformer": "eager"})) as handle:
        odd(torch.ones(2, 4))
        (component,) = handle.report.components
        assert (component.calls, component.what) == (1, "left alone")
