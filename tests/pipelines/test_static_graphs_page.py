"""The code of docs/static-graphs.md runs as it is written."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

import tritium
from support import tiny_pipeline
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
