"""The shape contract: after `warmup()` nothing compiles, and what is outside of it is named."""

import diffusers
import pytest
import torch

import tritium
from support import small_pipelines
from support.promised import DENOISER, EAGER, Compiles, generate, optimized
from tritium import CompilationConfig, Plan, Shapes
from tritium.errors import ConfigError, PipelineError, ShapeError, ShapeViolation


@pytest.fixture
def pipe():
    return small_pipelines.flux(1, 1)


class TestPromise:
    @pytest.mark.parametrize("graphs", [pytest.param("off", marks=pytest.mark.thorough), "with_compile"])
    def test_nothing_compiles_inside_and_images_are_right(self, pipe, graphs):
        calls = [(32, 32, 1), (32, 48, 2), (32, 48, 1), (32, 32, 2)]
        expected = [generate(pipe, h, w, num_images_per_prompt=n) for h, w, n in calls]
        with optimized(pipe, CompilationConfig(engine="eager", graphs=graphs), batch=[1, 2]) as handle:
            taken = handle.warmup()
            assert list(taken) == [
                "32 x 48, batch 2, 16 text tokens",
                "32 x 32, batch 2, 16 text tokens",
                "32 x 48, batch 1, 16 text tokens",
                "32 x 32, batch 1, 16 text tokens",
            ]
            with Compiles() as compiles:
                found = [generate(pipe, h, w, num_images_per_prompt=n) for h, w, n in calls]
            assert compiles.count == 0
            assert all(map(torch.equal, found, expected))
            assert handle.violations == []
            rows = handle.report.captures
            assert bool(rows) == (graphs != "off")
            assert all(row["declined"] is None and row["hits"] > 1 and row["bytes"] > 0 for row in rows)

    @pytest.mark.thorough
    def test_more_buckets_than_dynamo_keeps_versions(self, pipe):
        sizes = [(16 * side, 32) for side in range(1, 13)]
        assert len(sizes) > torch._dynamo.config.recompile_limit
        with optimized(pipe, sizes=sizes) as handle:
            handle.warmup()
            with Compiles() as compiles:
                for height, width in sizes:
                    generate(pipe, height, width)
            assert compiles.count == 0
            assert not handle.report.limits

    def test_a_range_of_sizes(self):
        assert len(Shapes(sizes=range(512, 1025, 256)).buckets) == 9

    def test_captures_can_be_cleared_and_go_with_the_handle(self, pipe):
        config = CompilationConfig(engine="eager", graphs="only")
        with optimized(pipe, config) as handle:
            handle.warmup()
            assert len(handle.captures) > 0
            assert handle.captures.bytes > 0
            handle.captures.clear()
            assert len(handle.captures) == 0
            with Compiles() as compiles:
                generate(pipe)
            assert compiles.count == 0
            assert len(handle.captures) > 0
            captures = handle.captures
        assert len(captures) == 0

    def test_a_denoiser_as_one_graph(self, pipe):
        expected = generate(pipe)
        config = CompilationConfig(engine="eager", graphs="with_compile")
        plan = Plan(
            config=config,
            progress=False,
            shapes=Shapes(sizes=[(32, 32)], text_tokens=[16]),
            blocks={"transformer": "FluxTransformer2DModel"},
            components={"vae": "eager"},
        )
        with tritium.optimize(pipe, plan) as handle:
            handle.warmup()
            assert torch.equal(generate(pipe), expected)
            assert len(handle.captures) == 1
            assert handle.violations == []

    def test_guidance_by_two_calls_is_bit_equal(self, pipe):
        guided = {"negative_prompt": "a blue square", "true_cfg_scale": 3.0}
        expected = generate(pipe, num_inference_steps=4, **guided)
        config = CompilationConfig(engine="eager", graphs="with_compile")
        with optimized(pipe, config, sizes=[(32, 32)]) as handle:
            handle.warmup(**guided)
            assert torch.equal(generate(pipe, num_inference_steps=4, **guided), expected)


# Arguments of the transformer that have an entry for each image.
BY_PICTURE = ("hidden_states", "encoder_hidden_states", "pooled_projections", "timestep")

# Steps of the table in docs/static-graphs.md that change an argument, with the line that promises them. Another size is
# apart: it changes the VAE's argument too.
STEPS = [
    ({"num_images_per_prompt": 2}, "size 2 at dim 0 (promised: 1)", "Shapes(..., batch=[1, 2])"),
    ({"max_sequence_length": 8}, "encoder_hidden_states has size 8 at dim 1", "Shapes(..., text_tokens=[16, 8])"),
]
OF_SIZES = "Shapes(sizes=[...])"


class TestViolations:
    def test_a_size_outside_compiles_and_is_named(self, pipe):
        expected = generate(pipe, 64, 32)
        with optimized(pipe) as handle:
            handle.warmup()
            with Compiles() as compiles:
                assert torch.equal(generate(pipe, 64, 32), expected)
            assert compiles.count > 0
            found = {violation.part: violation for violation in handle.violations}
            assert "hidden_states has size 128 at dim 1 (promised: 64, 96)" in found["transformer"].what
            assert found["transformer"].done == "compiled"
            assert found["transformer"].times == 1
            assert OF_SIZES in found["transformer"].suggestion
            assert "vae.decode" in found
            with Compiles() as compiles:
                generate(pipe, 64, 32)
            assert compiles.count == 0
            assert "outside of the promised shapes" in str(handle.report)
            assert OF_SIZES in str(handle.report)
            assert OF_SIZES in handle.report.to_dict()["violations"][0]["suggestion"]

    def test_a_size_outside_runs_eagerly_and_is_named(self, pipe):
        expected = generate(pipe, 64, 32)
        with optimized(pipe, components=DENOISER, on_violation="eager") as handle:
            handle.warmup()
            with Compiles() as compiles:
                assert torch.equal(generate(pipe, 64, 32), expected)
            assert compiles.count == 0
            assert {violation.done for violation in handle.violations} == {"ran eagerly"}
            assert max(violation.times for violation in handle.violations) == 2
            assert OF_SIZES in str(handle.report)

    def test_a_size_outside_is_an_error(self, pipe):
        with optimized(pipe, components=DENOISER, on_violation="error") as handle:
            handle.warmup()
            generate(pipe, 32, 48)
            with pytest.raises(
                ShapeViolation,
                match=r"transformer: outside of Plan\(shapes=\.\.\.\): hidden_states has size 128 at dim 1",
            ) as raised:
                generate(pipe, 64, 32)
            assert OF_SIZES in str(raised.value)
            assert [violation.done for violation in handle.violations] == ["refused"]
            generate(pipe, 32, 32)

    def test_a_dtype_a_none_and_a_scalar_are_named(self, pipe):
        seen, transformer = [], pipe.transformer
        hook = transformer.register_forward_pre_hook(lambda m, a, k: seen.append(k), with_kwargs=True)
        generate(pipe)
        hook.remove()
        call = seen[0]
        with optimized(pipe, components=DENOISER, on_violation="error", sizes=[(32, 32)]) as handle:
            handle.warmup()
            with torch.no_grad():
                transformer(**call)
                for name, value, message in (
                    (
                        "hidden_states",
                        call["hidden_states"].double(),
                        "dtype torch.float64, promised was torch.float32",
                    ),
                    ("guidance", torch.ones(1), "guidance is a tensor of shape .*, promised was None"),
                    ("return_dict", True, "return_dict is True, promised was False"),
                ):
                    with pytest.raises(ShapeViolation, match=message):
                        transformer(**{**call, name: value})
                # As a pipeline calls it that doubles the batch for guidance.
                doubled = {name: torch.cat([t, t]) for name, t in call.items() if name in BY_PICTURE}
                with pytest.raises(ShapeViolation, match=r"size 2 at dim 0 \(promised: 1\)"):
                    transformer(**{**call, **doubled})
            with pytest.raises(ShapeViolation, match="mode is gradients, promised was no_grad"):
                transformer(**call)

    def test_a_part_that_was_not_warmed_up(self, pipe):
        with optimized(pipe, on_violation="error", sizes=[(32, 32)]) as handle:
            handle.warmup()
            with pytest.raises(ShapeViolation, match=r"vae\.encode: .*warmup\(\) did not call it"), torch.no_grad():
                pipe.vae.encode(torch.rand(1, 3, 32, 32))

    def test_the_recompile_limit_is_an_error(self, pipe, monkeypatch):
        monkeypatch.setattr("tritium.pipelines.contract._SPARE_VERSIONS", -100)
        limit, message = torch._dynamo.config.patch(recompile_limit=1), r"reached Dynamo's recompile_limit \(1\)"
        with limit, optimized(pipe, components=DENOISER) as handle, pytest.raises(ShapeError, match=message):
            handle.warmup()

    @pytest.mark.parametrize(("call", "what", "line"), STEPS)
    def test_each_step_follows_what_was_asked_for(self, pipe, call, what, line):
        expected = generate(pipe, **call)
        for on_violation, done in (("compile", "compiled"), ("eager", "ran eagerly")):
            with optimized(pipe, components=DENOISER, on_violation=on_violation, sizes=[(32, 32)]) as handle:
                handle.warmup()
                with Compiles() as compiles:
                    assert torch.equal(generate(pipe, **call), expected)
                assert (compiles.count > 0) == (on_violation == "compile")
                found = next(violation for violation in handle.violations if violation.part == "transformer")
                assert (found.done, what in found.what, line in found.suggestion) == (done, True, True)
                assert line in str(handle.report)
                assert line in handle.report.to_dict()["violations"][0]["suggestion"]

    @pytest.mark.parametrize(("call", "what", "line"), STEPS)
    def test_each_step_is_refused_under_error(self, pipe, call, what, line):
        with optimized(pipe, components=DENOISER, on_violation="error", sizes=[(32, 32)]) as handle:
            handle.warmup()
            with pytest.raises(ShapeViolation) as raised:
                generate(pipe, **call)
            assert what in str(raised.value)
            assert line in str(raised.value)
            assert [violation.done for violation in handle.violations] == ["refused"]
            generate(pipe)

    @pytest.mark.parametrize(
        "on_violation", ["error", *(pytest.param(mode, marks=pytest.mark.thorough) for mode in ("compile", "eager"))]
    )
    def test_what_compiles_nothing_is_no_violation(self, pipe, on_violation):
        """Another prompt, more steps, guidance in a second call, another scheduler."""
        guided = {"negative_prompt": "a blue square", "true_cfg_scale": 3.0}
        calls = [{"prompt": "a blue square"}, {"num_inference_steps": 3}, guided, {**guided, "true_cfg_scale": 2.0}]
        with optimized(pipe, components=DENOISER, on_violation=on_violation, sizes=[(32, 32)]) as handle:
            handle.warmup()
            with Compiles() as compiles:
                for call in calls:
                    generate(pipe, **call)
                pipe.scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)
                generate(pipe)
            assert compiles.count == 0
            assert handle.violations == []

    @pytest.mark.parametrize(
        ("shapes", "message"),
        [
            ({"sizes": [512]}, "pairs of height and width"),
            ({"sizes": [(512, 512)], "batch": [0]}, r"Shapes\.batch takes an integer above 0"),
            ({"sizes": [(512, 512)], "on_violation": "eagr"}, "did you mean 'eager'"),
        ],
    )
    def test_shapes_that_mean_nothing(self, shapes, message):
        with pytest.raises(ConfigError, match=message):
            Shapes(**shapes)

    def test_refusals(self, pipe):
        with (
            tritium.optimize(pipe, Plan(config=EAGER)) as handle,
            pytest.raises(PipelineError, match="nothing to warm"),
        ):
            handle.warmup()
        with pytest.raises(ConfigError, match="takes a Shapes, got dict"):
            Plan(shapes={"sizes": [(1, 1)]})


class TestSuggestions:
    @pytest.mark.parametrize(
        ("argument", "was", "now", "reason", "expected"),
        [
            ("hidden_states", "size 8 at dim 0", "size 16 at dim 0", "", "Shapes(..., batch=[8, 16])"),
            ("hidden_states", "size 8 at dim 1", "size 16 at dim 1", "", "Shapes(sizes=[...])"),
            ("encoder_hidden_states", "size 8 at dim 1", "size 16 at dim 1", "", "text_tokens=[8, 16]"),
            ("x", "dtype torch.float32", "dtype torch.float64", "", "pass x in one dtype"),
            ("n", "3", "4", "n == 3", "pass n as a tensor"),
            (None, None, None, "GLOBAL_STATE changed: grad_mode", "in one mode"),
            ("ff.bias", None, None, "tensor 'self.ff.bias' requires_grad mismatch", "model.requires_grad_(False)"),
            ("x", "stride 4 at dim 0", "stride 8 at dim 0", "", "one memory layout"),
        ],
    )
    def test_a_line_for_each_cause(self, argument, was, now, reason, expected):
        from tritium.report.recompiles import suggest

        assert expected in suggest(argument, was, now, reason)

    def test_the_report_has_the_line(self):
        f = torch.compile(lambda x: x + 1, backend=tritium.Backend(EAGER), dynamic=False)
        f(torch.ones(2, 3))
        f(torch.ones(2, 4))
        (entry,) = tritium.explain(f).recompiles
        assert entry["argument"] == "x"
        assert 'dynamic_dims={"x": [1]}' in entry["suggestion"]
        assert "to prevent it" in str(tritium.explain(f))
