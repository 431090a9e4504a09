"""Quantizing a part of a pipeline: what it computes, which steps, what stands in the summary, and what it refuses."""

import pytest
import torch

from support import small_pipelines
from support.promised import Compiles
from support.small_pipelines import generate
from tritium import Choice, CompilationConfig, Plan, Quantize, Shapes, Steps, optimize, quality
from tritium.errors import PipelineError
from tritium.techniques.quantize import storage

EAGER = CompilationConfig(engine="eager")


def note(handle, part="transformer"):
    return next(entry for entry in handle.components if entry.name == part).techniques.get("quantize")


@pytest.mark.parametrize(
    "format_",
    [
        *("fp8", "int4-weights"),
        *(pytest.param(name, marks=pytest.mark.thorough) for name in ("int8", "int8-rotated", "int8-weights")),
    ],
)
def test_places_of_weights_give_the_same_image(pipe, quantized, format_):
    images = {}
    # Named layers are quantized for the few text tokens too.
    layers = dict.fromkeys(["transformer_blocks", "single_transformer_blocks"], format_)
    for keep in ("device", "cpu"):
        handle = quantized(pipe, Quantize(None, layers=layers, keep=keep, group=32))
        images[keep] = generate(pipe)
        assert note(handle)["formats"]
        handle.remove()
    torch.testing.assert_close(images["device"], images["cpu"], rtol=1e-5, atol=1e-5)


def test_formats_are_near_the_original_by_their_bits(pipe, quantized):
    plain = generate(pipe)
    found = {}
    for format_ in ("fp8", "int8", "int8-weights"):
        handle = quantized(pipe, Quantize(format_, keep="device"))
        found[format_] = quality.psnr(generate(pipe), plain)
        handle.remove()
    assert 20 < found["fp8"] < found["int8"] < found["int8-weights"]


def test_blocks_with_other_policies_do_not_share_code(quantized):
    """Blocks are equal in all but their policy, compiled one by one: the code of one must not serve another."""
    layers = {"transformer_blocks.1": None, "single_transformer_blocks.1": None}
    pipe = small_pipelines.flux(3, 2)
    blocks = {"transformer": ("FluxTransformerBlock", "FluxSingleTransformerBlock")}
    handle = quantized(pipe, Quantize("int8", layers=layers), blocks=blocks)
    by_block = generate(pipe)
    found = note(handle)["layers"]
    assert found["transformer_blocks.0.attn.to_q"]["precision"] == "int8"
    assert found["transformer_blocks.1.attn.to_q"]["precision"] is None
    assert found["transformer_blocks.2.attn.to_q"]["precision"] == "int8"
    handle.remove()
    handle = quantized(pipe, Quantize("int8", layers=layers))
    torch.testing.assert_close(generate(pipe), by_block)
    handle.remove()
    quantized(pipe, Quantize("int8"))
    assert not torch.equal(generate(pipe), by_block)


class TestSteps:
    @pytest.fixture
    def precisions(self, monkeypatch):
        """Which program ran each call of the transformer: quantized or not."""
        ran = []

        def recorded(self, step, steps):
            ran.append("plain" if original(self, step, steps) else "quantized")
            return original(self, step, steps)

        original = Steps.names
        monkeypatch.setattr(Steps, "names", recorded)
        return ran

    def test_first_and_last_ones_are_not_quantized(self, pipe, quantized, precisions):
        quantized(pipe, Quantize("int8", steps=Steps(first=2, last=1)))
        generate(pipe, steps=6)
        golden = ["plain", "plain", "quantized", "quantized", "quantized", "plain"]
        assert precisions == golden
        generate(pipe, steps=6)
        assert precisions == golden * 2, "the next image begins at step 0"
        with Compiles() as compiles:
            generate(pipe, steps=50)
        assert compiles.count == 0

    def test_guidance_calls_twice_a_step(self, pipe, quantized, precisions):
        quantized(pipe, Quantize("int8", steps=Steps(first=1)))
        small_pipelines.guided(pipe, steps=3)
        assert precisions == ["plain"] * 2 + ["quantized"] * 4

    def test_a_warm_up_runs_both_programs(self, pipe, quantized, precisions):
        shapes = Shapes(sizes=32, text_tokens=16, on_violation="error")
        handle = quantized(pipe, Quantize("int8", steps=Steps(first=2, last=1)), shapes=shapes)
        handle.warmup()
        assert {"plain", "quantized"} == set(precisions)
        with Compiles() as compiles:
            generate(pipe, steps=6)
        assert compiles.count == 0

    def test_all_steps_plain_is_the_unquantized_image(self, pipe, quantized):
        with optimize(pipe, Plan(config=EAGER, progress=False)):
            plain = generate(pipe)
        quantized(pipe, Quantize("int8", steps=Steps(first=2)))
        assert torch.equal(generate(pipe), plain)
        assert not torch.equal(generate(pipe, steps=4), plain)

    def test_a_model_without_a_scheduler_is_refused(self, pipe):
        plan = Plan(components={"model": Choice(quantize=Quantize(steps=Steps(first=1)))})
        with pytest.raises(PipelineError, match="steps need the scheduler"):
            optimize(pipe.transformer, plan)

    def test_text_encoders_have_no_steps(self, pipe):
        choice = Choice(quantize=Quantize(steps=Steps(first=1)))
        with pytest.raises(PipelineError, match="runs once an image"):
            optimize(pipe, Plan(components={"text_encoder_2": choice}))


class TestSummary:
    def test_what_was_quantized_and_what_not(self, pipe, quantized):
        # Equal passes share code and its outcomes: no other test has this one.
        handle = quantized(pipe, Quantize("int8", layers={"single_transformer_blocks.0.attn.to_v": None}))
        assert "that no compiled code has called" in str(handle)
        generate(pipe)
        text = str(handle)
        found = note(handle)
        count = found["formats"]["int8"]
        assert f"quantized: {count} linears in int8" in text
        assert "kept (its input is one row an image)" in text
        assert sum(layer["precision"] == "int8" for layer in found["layers"].values()) == count
        assert sum(found["kept"].values()) + count == len(found["layers"])
        linears = [
            pipe.transformer.get_submodule(name) for name, layer in found["layers"].items() if layer["precision"]
        ]
        assert found["bytes"]["before"] == sum(4 * linear.weight.numel() for linear in linears)
        assert found["bytes"]["after"] == sum(linear.weight.numel() + 4 * linear.out_features for linear in linears)
        assert "copies of their weights take" in text

    def test_bytes_of_stored_weights_are_those_of_their_tensors(self, pipe, quantized):
        handle = quantized(pipe, Quantize("fp8", keep="cpu", one_row="int4-weights", group=32))
        held = sum(
            tensor.untyped_storage().nbytes()
            for inner in pipe.transformer.modules()
            if isinstance(inner, storage.StoredLinear)
            for tensor in (inner.weight, *inner.buffers())
        )
        packed = sum(hasattr(inner, storage.BYTES) for inner in pipe.transformer.modules())
        assert packed
        # The placeholder of a 4-bit weight has one byte.
        assert note(handle)["bytes"]["after"] == held - packed
        assert "their weights take" in str(handle)

    def test_worst_layers_are_named_after_measuring(self, pipe, quantized):
        handle = quantized(pipe, "int8")
        generate(pipe)
        assert "SQNR" not in str(handle)
        found = handle.sensitivity("a red circle", num_inference_steps=1, height=32, width=32, max_sequence_length=16)
        generate(pipe)
        worst = note(handle)["worst"]
        used = [name for name, layer in note(handle)["layers"].items() if layer["precision"]]
        assert list(worst) == [name for name, _ in found["transformer"].worst("int8", 100) if name in used][:5]
        assert f"worst SQNR {next(iter(worst))}" in str(handle)

    def test_steps_are_named(self, pipe, quantized):
        handle = quantized(pipe, Quantize("int8", steps=Steps(first=2, last=1)))
        assert "first 2 and last 1 steps unquantized" in str(handle)


class TestTextEncoders:
    def test_weights_alone_by_default(self, pipe, quantized):
        handle = quantized(pipe, "int8-weights")
        plain = small_pipelines.flux(1, 1)
        generate(pipe)
        assert note(handle, "text_encoder_2")["formats"]["int8-weights"]
        linear = next(inner for inner in pipe.text_encoder_2.modules() if isinstance(inner, storage.StoredLinear))
        assert linear.weight.dtype == torch.int8
        assert quality.psnr(generate(pipe), generate(plain)) > 30

    def test_products_leave_them_alone(self, pipe, quantized):
        handle = quantized(pipe, "fp8")
        generate(pipe)
        assert note(handle, "text_encoder_2") is None

    @pytest.mark.parametrize("keep", ["device", "cpu"])
    def test_products_of_a_compiled_one(self, pipe, keep):
        # Named layers are quantized for the few tokens of this prompt too.
        choice = Choice(quantize=Quantize("fp8", layers={"encoder": "fp8"}, keep=keep))
        plan = Plan(components={"text_encoder_2": choice, "transformer": "eager"}, config=EAGER, progress=False)
        plain = generate(pipe)
        with optimize(pipe, plan) as handle:
            assert not torch.equal(generate(pipe), plain)
            assert note(handle, "text_encoder_2")["formats"]["fp8"]
        assert torch.equal(generate(pipe), plain)

    @pytest.mark.parametrize("keep", ["device", "cpu"])
    def test_products_of_an_eager_one_are_refused(self, pipe, keep):
        choice = Choice(how="eager", quantize=Quantize("fp8", keep=keep))
        with pytest.raises(PipelineError, match="its weights quantized and not its products"):
            optimize(pipe, Plan(components={"text_encoder": choice}))


class TestOffload:
    """accelerate's hooks, with the CPU as the device that weights are moved to."""

    @pytest.fixture(autouse=True)
    def accelerate(self):
        return pytest.importorskip("accelerate")

    @pytest.mark.parametrize("keep", ["device", "cpu"])
    def test_single_weights_that_move_are_refused(self, pipe, accelerate, keep):
        accelerate.cpu_offload(pipe.transformer, execution_device=torch.device("cpu"))
        advice = "write keep='cpu'" if keep == "device" else r"enable_model_cpu_offload\(\)"
        with pytest.raises(PipelineError, match=f"AlignDevicesHook moves .*{advice}"):
            optimize(pipe, Plan(components={"transformer": Choice(quantize=Quantize("int8", keep=keep))}))

    def test_a_model_that_moves_as_a_whole(self, pipe, quantized, accelerate):
        plain = generate(pipe)
        _, hook = accelerate.cpu_offload_with_hook(pipe.transformer, execution_device="cpu")
        with pytest.raises(PipelineError, match="CpuOffload moves its weights"):
            optimize(pipe, Plan(components={"transformer": Choice(quantize="int8")}))
        handle = quantized(pipe, Quantize("int8", keep="cpu"))
        image = generate(pipe)
        hook.offload()
        assert torch.equal(generate(pipe), image)
        assert not torch.equal(image, plain)
        handle.remove()
        assert torch.equal(generate(pipe), plain)

    def test_group_offloading_is_refused(self, pipe):
        pipe.transformer.enable_group_offload(
            onload_device=torch.device("cpu"), offload_type="block_level", num_blocks_per_group=1
        )
        with pytest.raises(PipelineError, match="group_offloading moves"):
            optimize(pipe, Plan(components={"transformer": Choice(quantize=Quantize("int8", keep="cpu"))}))

    def test_a_weight_that_other_code_puts_there_is_used(self, pipe, quantized):
        """Sequential offloading, enabled later, assigns original weights before each call."""
        handle = quantized(pipe, Quantize("int8-weights"))
        linear = pipe.transformer.transformer_blocks[0].attn.to_q
        weight = torch.randn(linear.stored.original.shape)
        linear.weight = torch.nn.Parameter(weight, requires_grad=False)
        x = torch.randn(3, 32)
        assert torch.equal(linear(x), torch.nn.functional.linear(x, weight, linear.bias))
        assert torch.equal(pipe.transformer.state_dict()["transformer_blocks.0.attn.to_q.weight"], weight)
        handle.remove()
        assert torch.equal(linear.weight, weight)


def test_a_part_switches_between_formats(pipe, quantized):
    """The selection is made while the weights of the format before are still stored as bytes."""
    handle = quantized(pipe, Quantize("int8-weights"))
    first = generate(pipe)
    handle.use({"transformer": Choice(quantize="int4-weights")})
    second = generate(pipe)
    assert note(handle)["formats"].keys() == {"int4-weights"}
    handle.use({"transformer": Choice()})
    assert torch.equal(generate(pipe), first)
    assert not torch.equal(second, first)


def test_a_class_of_linear_with_its_own_forward_is_kept(pipe, quantized):
    class Louder(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x) * 2

    pipe.transformer.transformer_blocks[0].attn.to_q.__class__ = Louder
    handle = quantized(pipe, Quantize("int8", keep="cpu"))
    layers = note(handle)["layers"]
    assert "its class is Louder" in layers["transformer_blocks.0.attn.to_q"]["reason"]
    assert layers["transformer_blocks.0.attn.to_k"]["precision"] == "int8"


def test_a_failure_while_storing_leaves_all_as_it_was(pipe, monkeypatch):
    plain, calls = generate(pipe), []

    def fail_later(linear, precision):
        calls.append(linear)
        if len(calls) == 5:
            raise RuntimeError("no memory")
        return original(linear, precision)

    original = storage.store
    monkeypatch.setattr(storage, "store", fail_later)
    with pytest.raises(RuntimeError, match="no memory"):
        optimize(pipe, Plan(quantize=Quantize("int8", keep="cpu"), progress=False))
    assert not any(isinstance(inner, storage.StoredLinear) for inner in pipe.transformer.modules())
    assert torch.equal(generate(pipe), plain)
