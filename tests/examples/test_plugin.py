"""The example plug-in, installed as a user would install it, in a process that sees it."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support import checkout, scripts

PLUGIN = scripts.ROOT / "examples" / "plugin"

PROGRAM = """
import json, torch, tritium

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.RMSNorm(8, eps=1e-6)
    def forward(self, x, gate):
        y = self.norm(x) * 1.0
        return (y + gate * y) * 1.0

config = tritium.CompilationConfig(engine="eager", force_provider={"rms_norm": "plain"})
model, x, gate = Model(), torch.randn(2, 3, 8), torch.randn(2, 1, 8)
with torch.inference_mode():
    compiled = torch.compile(model, backend=tritium.Backend(config))
    torch.testing.assert_close(compiled(x, gate), model(x, gate))
report = tritium.explain(compiled).to_dict()
print(json.dumps({"sites": report["sites"], "passes": report["passes"]}))
"""

SWITCHES = """
import dataclasses, json, torch, tritium

def sites(gate, **switches):
    torch._dynamo.reset()
    config = tritium.CompilationConfig(engine="eager", fusion_patterns=tritium.FusionPatterns(**switches))
    compiled = torch.compile(lambda x, gate: x + gate * x, backend=tritium.Backend(config))
    compiled(torch.randn(2, 3, 8), gate)
    return tritium.explain(compiled).to_dict()["sites"]["self_gate"]

with torch.inference_mode():
    found = [
        sites(torch.randn(2, 1, 8)),
        sites(torch.randn(2, 3, 8)),
        sites(torch.randn(2, 1, 8), enable_self_gate=False),
    ]
fields = [field.name for field in dataclasses.fields(tritium.FusionPatterns)]
print(json.dumps({"found": found, "fields": fields}))
"""


@pytest.fixture(scope="module")
def site_packages(tmp_path_factory) -> Path:
    target = tmp_path_factory.mktemp("site")
    copy = tmp_path_factory.mktemp("plugin") / "plugin"
    # Setuptools builds inside the source folder: keep the repository clean.
    shutil.copytree(PLUGIN, copy)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--target", str(target), str(copy)], check=True, capture_output=True)
    return target


def run(program: str, site_packages: Path) -> subprocess.CompletedProcess:
    environment = checkout.environment(site_packages)
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, env=environment)


def test_pass_fusion_and_provider_take_part(site_packages):
    done = run(PROGRAM, site_packages)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["sites"]["self_gate"]["fused"] == 1
    assert found["sites"]["rms_norm"]["reasons"] == {"pinned by force_provider='plain'": 1}
    entry = next(entry for entry in found["passes"] if entry["name"] == "remove_scale_by_one")
    assert entry["changed"] is True
    assert entry["requests"][0]["settings"] == {"cpp.use_decompose_tanh": True}


def test_a_fusion_has_its_own_switch_sites_and_reasons(site_packages):
    done = run(SWITCHES, site_packages)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert "enable_self_gate" in result["fields"]
    fused, near_miss, off = result["found"]
    assert (fused["fused"], fused["declined"]) == (1, 0)
    assert near_miss["reasons"] == {"the gate is as large as what it gates": 1}
    assert off["reasons"] == {"switched off: fusion_patterns for self_gate": 1}
    misspelled = run("import tritium; tritium.FusionPatterns(enable_selfgate=False)", site_packages)
    assert "did you mean 'enable_self_gate'?" in misspelled.stderr


def test_a_broken_plug_in_is_named_and_not_used(site_packages, tmp_path):
    broken = tmp_path / "broken"
    info = broken / "broken-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[tritium.passes]\nbad = json:dumps\n")
    done = run("import tritium; tritium.Backend()", broken)
    assert done.returncode == 0
    assert "entry point 'bad' of group 'tritium.passes' (json:dumps) is not used: it is a function" in done.stderr
