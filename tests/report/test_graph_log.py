"""Graphs on disk: readable, and drawn by Netron."""

import onnx
import pytest
import torch

import tritium
from support.small_models import Block, block_inputs


@pytest.fixture
def logged(tmp_path):
    config = tritium.CompilationConfig(engine="eager", graph_log_url=str(tmp_path / "logs"))
    with torch.inference_mode():
        torch.compile(Block(), backend=tritium.Backend(config), dynamic=True)(*block_inputs())
    return tmp_path / "logs" / "Block.forward-0_0"


def test_before_and_after_of_every_pass(logged):
    names = sorted(path.name for path in logged.iterdir())
    passes = ["01-channels_last", "02-quantized_weights", "03-fuse", "04-convolution_bias"]
    assert names == sorted(
        f"{name}-{when}.{kind}" for name in passes for when in ("before", "after") for kind in ("txt", "onnx")
    )
    before, after = ((logged / f"03-fuse-{when}.txt").read_text() for when in ("before", "after"))
    assert "= torch.rms_norm(" in before
    assert "= operator.add(" in before
    assert "tritium.rms_norm.default(" in after
    assert "float32[2, 7, 16]" in after or "float32[s" in after


def test_the_drawing_is_an_onnx_model(logged):
    model = onnx.load(logged / "03-fuse-after.onnx")
    operators = [node.op_type for node in model.graph.node]
    assert "tritium.rms_norm.default" in operators
    assert model.producer_name == "tritium"
    produced = {name for node in model.graph.node for name in node.output} | {value.name for value in model.graph.input}
    assert all(name in produced for node in model.graph.node for name in node.input)
    assert [value.name for value in model.graph.output]
    norm = next(node for node in model.graph.node if node.op_type == "tritium.rms_norm.default")
    assert {a.name: a.s.decode() for a in norm.attribute}["provider"] == "reference"
    types = {value.name: value.type.tensor_type for value in model.graph.value_info}
    assert types[norm.output[0]].elem_type == onnx.TensorProto.FLOAT
    assert len(types[norm.output[0]].shape.dim) == 3


def test_nothing_is_written_unasked(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with torch.inference_mode():
        config = tritium.CompilationConfig(engine="eager")
        torch.compile(Block(), backend=tritium.Backend(config))(*block_inputs())
    assert list(tmp_path.iterdir()) == []
