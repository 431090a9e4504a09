"""The summary and the progress say what runs: compiled only where something is."""

import threading
from types import SimpleNamespace

import diffusers
import pytest
import torch
from torch import nn

import tritium
from support import small_pipelines, tiny_pipeline
from tritium import CompilationConfig, Plan
from tritium.compiler import lower
from tritium.errors import PipelineError
from tritium.pipelines import parts

PLAN = Plan(config=CompilationConfig(engine="eager"), progress=False)


def what(handle, name="transformer"):
    return next(component.what for component in handle.components if component.name == name)


def draw(pipe):
    return pipe(height=32, width=32, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def pipe():
    return tiny_pipeline.Pipeline()


class TestTruth:
    def test_compiled_and_compiled_for_an_equal_pipeline_before(self, pipe):
        other = tiny_pipeline.Pipeline()
        with tritium.optimize(pipe, PLAN) as first, tritium.optimize(other, PLAN) as second:
            assert what(first) == "not called yet; to be compiled: Denoiser as one program"
            draw(pipe)
            draw(other)
            assert what(first) == what(second) == "compiled: Denoiser as one program"

    @pytest.mark.parametrize("how", ["tritium", "inductor"])
    def test_nothing_was_compiled(self, pipe, how):
        with (
            tritium.optimize(pipe, PLAN.with_(components={"transformer": how})) as handle,
            torch.compiler.set_stance("force_eager"),
        ):
            draw(pipe)
            assert what(handle) == "runs eagerly: nothing was compiled"

    def test_every_lowering_failed(self, pipe, monkeypatch, capsys):
        def fails(*_, is_late):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(lower, "_compiled", fails)
        expected = draw(pipe)
        with (
            pytest.warns(RuntimeWarning, match="No space left"),
            tritium.optimize(pipe, Plan(progress=True)) as handle,
        ):
            assert torch.equal(draw(pipe), expected)
            assert (
                what(handle) == "runs eagerly: none of its 1 graphs could be compiled, see the failures in the report"
            )
        told = capsys.readouterr().err
        assert "transformer: could not compile Denoiser.forward in" in told
        assert "transformer: compiled" not in told

    def test_the_recompile_limit_was_reached(self, pipe):
        with torch._dynamo.config.patch(recompile_limit=1), tritium.optimize(pipe, PLAN.with_(dynamic=False)) as handle:
            for tokens in (3, 4, 5):
                with torch.no_grad():
                    pipe.transformer(torch.ones(1, tokens, tiny_pipeline.WIDTH))
            assert "recompile_limit (1) reached in forward: it runs eagerly where no" in what(handle)

    def test_progress_tells_of_its_own_thread(self, pipe, capsys):
        other = torch.compile(lambda x: x + 1, backend=tritium.Backend(PLAN.config))
        hook = pipe.transformer.embedder.register_forward_pre_hook(lambda *_: run(lambda: other(torch.ones(2))))

        def run(function):
            thread = threading.Thread(target=function)
            thread.start()
            thread.join()

        with tritium.optimize(pipe, PLAN.with_(progress=True)):
            draw(pipe)
        hook.remove()
        told = [line for line in capsys.readouterr().err.splitlines() if "compiled" in line]
        assert len(told) == 1
        assert "Block.forward" in told[0]


class TestCompiledAfterwards:
    def test_a_users_compile_is_seen_and_stays(self, pipe):
        expected = draw(pipe)
        handle = tritium.optimize(pipe, PLAN)
        draw(pipe)
        pipe.transformer.compile(backend="eager")
        theirs = pipe.transformer._compiled_call_impl
        torch.testing.assert_close(draw(pipe), expected)
        assert what(handle) == "compiled by its own compile() since, which runs instead; remove() leaves it there"
        handle.use({"transformer": "eager"})
        handle.remove()
        assert pipe.transformer._compiled_call_impl is theirs
        assert not any("_compiled_call_impl" in block.__dict__ for block in pipe.transformer.blocks)
        torch.testing.assert_close(draw(pipe), expected)

    def test_a_users_compile_of_a_block(self, pipe):
        handle = tritium.optimize(pipe, PLAN.with_(blocks={"transformer": "Block"}))
        pipe.transformer.blocks[1].compile(backend="eager")
        draw(pipe)
        assert what(handle).endswith("(1 blocks were compiled by their own compile() since, which runs instead)")
        handle.remove()
        assert "_compiled_call_impl" not in pipe.transformer.blocks[0].__dict__
        assert pipe.transformer.blocks[1].__dict__["_compiled_call_impl"] is not None


class TestNothingToCompile:
    def test_a_part_without_blocks_is_refused(self):
        pipe = tiny_pipeline.Pipeline(checker=nn.Sequential(tiny_pipeline.Block()))
        with pytest.raises(
            PipelineError, match=r"checker cannot be compiled: its repeated blocks cannot be found.*Plan\(blocks"
        ):
            tritium.optimize(pipe, PLAN.with_(components={"checker": "tritium"}))
        with tritium.optimize(pipe, PLAN) as handle, pytest.raises(PipelineError, match="checker cannot be compiled"):
            handle.use({"checker": "inductor"})
        with tritium.optimize(
            pipe, PLAN.with_(components={"checker": "tritium"}, blocks={"checker": "Block"})
        ) as handle:
            with torch.no_grad():
                pipe.components["checker"](torch.ones(2, tiny_pipeline.WIDTH))
            assert what(handle, "checker") == "compiled: Block"

    def test_blocks_of_another_component_are_checked(self):
        pipe = tiny_pipeline.Pipeline(checker=nn.Linear(2, 2))
        with pytest.raises(PipelineError, match="'checker' has no block of class 'Block'"):
            tritium.optimize(pipe, PLAN.with_(blocks={"checker": "Block"}))


def flux_controlnet():
    torch.manual_seed(0)
    return diffusers.FluxControlNetModel(
        patch_size=1,
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=16,
        pooled_projection_dim=16,
        axes_dims_rope=(4, 6, 6),
    ).eval()


class TestControlNets:
    def test_one_is_part_of_the_loop_and_compiled(self):
        pipe = small_pipelines.flux(1, 0)
        components = {k: v for k, v in pipe.components.items() if k not in ("image_encoder", "feature_extractor")}
        pipe = diffusers.FluxControlNetPipeline(**components, controlnet=flux_controlnet())
        pipe.set_progress_bar_config(disable=True)
        sizes = {
            "height": 32,
            "width": 32,
            "num_inference_steps": 1,
            "max_sequence_length": 16,
            "output_type": "latent",
        }

        def draw_controlled():
            call = {"control_image": torch.ones(1, 3, 32, 32), "generator": torch.Generator().manual_seed(0), **sizes}
            return pipe("a red circle", **call).images

        expected = draw_controlled()
        with tritium.optimize(pipe, PLAN.with_(components={"vae": "eager"})) as handle:
            torch.testing.assert_close(draw_controlled(), expected)
            assert what(handle, "controlnet") == "compiled: FluxControlNetModel as one program"
            assert what(handle, "controlnet").startswith("compiled: ")
            assert handle.part("controlnet").times.calls == 1
            functions = {r.function for r in handle.report.records if r.belongs_to(pipe.controlnet)}
            assert functions

    def test_each_net_of_several_is_a_part(self):
        nets = diffusers.FluxMultiControlNetModel([flux_controlnet(), flux_controlnet()])
        pipe = tiny_pipeline.Pipeline(controlnet=nets)
        with tritium.optimize(pipe, PLAN.with_(components={"controlnet.1": "eager"})) as handle:
            assert handle.choices["controlnet.0"].how == "tritium"
            assert handle.choices["controlnet.1"].how == "eager"
            assert handle.part("controlnet.0").call.before is None
            assert handle.part("controlnet.0").module is nets.nets[0]
        with tritium.optimize(pipe, PLAN.with_(components={"controlnet": "eager"})) as handle:
            assert {handle.choices[f"controlnet.{place}"].how for place in (0, 1)} == {"eager"}

    def test_a_u_nets_controlnet_is_one_graph(self):
        net = diffusers.ControlNetModel(
            block_out_channels=(8, 16),
            layers_per_block=1,
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
            cross_attention_dim=8,
            attention_head_dim=2,
            norm_num_groups=4,
            conditioning_embedding_out_channels=(4, 8),
        )
        (part, *_) = [p for p in parts.find(tiny_pipeline.Pipeline(controlnet=net), PLAN) if p.name == "controlnet"]
        assert part.what == "ControlNetModel as a whole"
        assert part.default.how == "tritium"

    def test_one_whose_blocks_are_unknown_is_compiled_as_a_whole(self):
        net = nn.Sequential(nn.Linear(2, 2), nn.SiLU())
        pipe = SimpleNamespace(components={"transformer": tiny_pipeline.Denoiser(), "controlnet": net})
        (part,) = [part for part in parts.find(pipe, PLAN) if part.name == "controlnet"]
        assert (part.what, part.blocks[0].module) == ("Sequential as a whole", net)
