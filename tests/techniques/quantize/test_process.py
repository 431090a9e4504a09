"""A quantized model in compiled code: its result, its speed counters, and a second process."""

import functools
import json

import pytest

PROGRAM = """
import hashlib, json, torch, tritium
from torch import nn
from torch._dynamo.utils import counters

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)
    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x)), approximate="tanh"))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x

torch.manual_seed(0)
model, x = Model().eval(), torch.randn(2, 40, 64)
with torch.no_grad():
    plain = model(x)
    with tritium.optimize(model, tritium.Plan(quantize="int8", progress=False)) as handle:
        found = model(x)
        formats = handle.components[0].techniques["quantize"]["formats"]
error = float((found - plain).norm() / plain.norm())
print(json.dumps({
    "hits": counters["inductor"]["fxgraph_cache_hit"], "misses": counters["inductor"]["fxgraph_cache_miss"],
    "result": hashlib.sha256(found.contiguous().numpy().tobytes()).hexdigest(), "error": error, "formats": formats,
}))
"""


@pytest.mark.codegen
def test_a_second_process_compiles_nothing(tmp_path, in_process):
    run = functools.partial(in_process, PROGRAM, cache=tmp_path / "cache", loaded=True)
    first, second = json.loads(run()), json.loads(run())
    assert first["misses"] > 0
    assert first["formats"] == {"int8": 4}
    assert 0 < first["error"] < 0.02
    assert second["misses"] == 0
    assert second["hits"] == first["misses"]
    assert second["result"] == first["result"]
