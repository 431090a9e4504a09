"""The code of docs/static-graphs.md runs as it is written."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

import tritium
from support import small_pipelines, tiny_pipeline
from support.promised import DENOISER, Compiles, generate, lora_weights, optimized
from tritium import CompilationConfig
from tritium.errors import ShapeViolation

PAGE = Path(__file__).parents[2] / "docs" / "static-graphs.md"


class Padded(nn.Module):
    def forward(self, hidden_states, encoder_hidden_states, encoder_attention_mask=None):
        return hidden_states + (encoder_hidden_states * encoder_attention_mask[..., None]).sum(1, keepdim=True)


def test_every_block_of_code(monkeypatch, capsys):
    monkeypatch.setenv("TRITIUM_ENGINE", "eager")
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert len(blocks) == 5
    of_captures = next(block for block in blocks if "report.captures" in block)
    assert any("report.limits" in block for block in blocks)
    names = {"tritium": tritium, "torch": torch, "model": nn.Sequential(nn.Linear(8, 8), nn.GELU())}
    names["pipe"] = pipe = tiny_pipeline.Pipeline()
    for block in blocks:
        if "pad_to" in block:
            names["model"] = Padded()
        if block == of_captures:
            with torch.inference_mode():
                names["model"](torch.ones(2, 8))
        exec(block, names)
    handle = names["handle"]
    printed = capsys.readouterr().out
    assert re.search(r"\d+ \d+ None", printed), "a capture, its hits and bytes"
    assert len(handle.plan.shapes.buckets) == 4
    with pytest.raises(ShapeViolation):
        pipe(height=512, width=512)
    handle.remove()


@pytest.fixture
def pipe():
    return small_pipelines.flux(1, 1)


@pytest.fixture(scope="module")
def example():
    pipe = tritium.load_example()
    pipe.set_progress_bar_config(disable=True)
    return pipe


class TestLora:
    """The rows about LoRAs in the table of docs/static-graphs.md, on the example model with captured graphs."""

    CONFIG = CompilationConfig(engine="eager", graphs="with_compile")
    SIDE = 96

    @pytest.fixture
    def handle(self, example):
        shapes = {"sizes": [(self.SIDE, self.SIDE)], "text_tokens": [16]}
        with optimized(example, self.CONFIG, DENOISER, **shapes) as handle:
            handle.warmup()
            yield handle

    def generate(self, pipe, **call):
        return generate(pipe, self.SIDE, self.SIDE, **call)

    def compiles(self, pipe, **call):
        with Compiles() as compiles:
            image = self.generate(pipe, **call)
        return compiles.count, image

    def test_lora(self, handle):
        """Loading one compiles the blocks again, once; its scale and switching it off do so too, and are right."""
        pytest.importorskip("peft")
        pipe = handle.pipe
        before = self.generate(pipe)
        torch.manual_seed(0)
        try:
            pipe.load_lora_weights(lora_weights(pipe), adapter_name="one")
            count, image = self.compiles(pipe)
            assert count > 0
            assert not torch.equal(image, before)
            assert any("as promised, and yet to be compiled again" in violation.what for violation in handle.violations)
            again, same = self.compiles(pipe)
            assert again == 0
            assert torch.equal(same, image)
            pipe.set_adapters("one", 0.5)
            scaled, half = self.compiles(pipe)
            assert not torch.equal(half, image)
            assert scaled == 1, "a scale is a number of the model: the transformer is one program"
            pipe.set_adapters("one", 0.25)
            assert self.compiles(pipe)[0] == 1
            pipe.set_adapters("one", 0.5)
            back, same = self.compiles(pipe)
            assert back == 0
            assert torch.equal(same, half)
            causes = {entry["argument"]: entry["suggestion"] for entry in handle.report.recompiles}
            assert "before handle.warmup()" in causes["transformer_blocks.0.attn.to_q.scaling['one']"]
            handle.remove()
            assert torch.equal(self.generate(pipe), half)
            pipe.set_adapters("one", 1.0)
            assert torch.equal(self.generate(pipe), image)
        finally:
            pipe.unload_lora_weights()
        assert torch.equal(self.generate(pipe), before)

    def test_a_fused_lora_and_the_way_back(self, handle):
        pytest.importorskip("peft")
        pipe = handle.pipe
        pipe.transformer.requires_grad_(requires_grad=False)
        before = self.generate(pipe)
        torch.manual_seed(0)
        try:
            pipe.load_lora_weights(lora_weights(pipe), adapter_name="one")
            image = self.generate(pipe)
            pipe.fuse_lora()
            count, fused = self.compiles(pipe)
            assert count == 1
            torch.testing.assert_close(fused, image, rtol=1e-3, atol=1e-3)
            pipe.unfuse_lora()
        finally:
            pipe.unload_lora_weights()
        count, same = self.compiles(pipe)
        assert count == 0
        torch.testing.assert_close(same, before, rtol=1e-3, atol=1e-3)


class TestLoraUnderTheContract:
    """A change that no argument shows is seen by Dynamo's guards, and follows `on_violation` too."""

    @pytest.fixture
    def loaded(self, pipe):
        def load(on_violation):
            handle = optimized(pipe, CompilationConfig(engine="eager", graphs="only"), on_violation=on_violation)
            handle.warmup()
            torch.manual_seed(0)
            pipe.load_lora_weights(lora_weights(pipe), adapter_name="one")
            return handle

        pytest.importorskip("peft")
        return load

    def test_an_error(self, pipe, loaded):
        with loaded("error"), pytest.raises(ShapeViolation, match=r"as promised, and yet .* to prevent it: ") as raised:
            generate(pipe)
        assert "before" in str(raised.value), "what a LoRA changes is to be changed before warmup()"

    @pytest.fixture
    def promised(self, pipe):
        """Warmed up with a LoRA that is there already."""
        pytest.importorskip("peft")
        torch.manual_seed(0)
        pipe.load_lora_weights(lora_weights(pipe), adapter_name="one")

        def warm(on_violation):
            config = CompilationConfig(engine="eager", graphs="only")
            handle = optimized(pipe, config, DENOISER, on_violation=on_violation, sizes=[(32, 32)])
            handle.warmup()
            generate(pipe)
            assert handle.violations == []
            return handle

        return warm

    AFTER = pytest.mark.parametrize(
        "step", [lambda pipe: pipe.set_adapters("one", 0.5), lambda pipe: pipe.fuse_lora()], ids=["scale", "fuse"]
    )

    @AFTER
    def test_a_change_of_it_is_an_error(self, pipe, promised, step):
        with promised("error"):
            step(pipe)
            with pytest.raises(ShapeViolation, match=r"set their scales before handle\.warmup"):
                generate(pipe)

    @AFTER
    def test_a_change_of_it_runs_eagerly(self, pipe, promised, step):
        with promised("eager") as handle:
            step(pipe)
            with Compiles() as compiles:
                image = generate(pipe)
            assert compiles.count == 0
            assert {violation.done for violation in handle.violations} == {"ran eagerly"}
        assert torch.equal(image, generate(pipe))

    def test_a_promised_scale_is_promised_for_good(self, pipe, promised):
        with promised("error"):
            pipe.set_adapters("one", 0.5)
            with pytest.raises(ShapeViolation, match="scaling"):
                generate(pipe)
            pipe.set_adapters("one", 1.0)
            generate(pipe)

    def test_weights_that_were_frozen_before_compile_less(self, pipe):
        """Loading a LoRA freezes the model; where that changes nothing, blocks without the LoRA keep their code."""
        pytest.importorskip("peft")
        pipe.transformer.requires_grad_(requires_grad=False)
        with optimized(pipe, CompilationConfig(engine="eager", graphs="only"), sizes=[(32, 32)]) as handle:
            handle.warmup()
            torch.manual_seed(0)
            pipe.load_lora_weights(lora_weights(pipe), adapter_name="one")
            with Compiles() as compiles:
                generate(pipe)
            assert compiles.count == 1
            assert {violation.part for violation in handle.violations} == {"transformer"}

    def test_eager(self, pipe, loaded):
        with loaded("eager") as handle:
            with Compiles() as compiles:
                image = generate(pipe)
            assert compiles.count == 0
            assert {violation.done for violation in handle.violations} == {"ran eagerly"}
        assert torch.equal(image, generate(pipe))
