from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

DEMO = Path(__file__).parents[2] / "examples" / "demo.py"


@pytest.mark.codegen
def test_the_demo_prints_its_table_and_the_report(capsys):
    pytest.importorskip("diffusers")
    spec = importlib.util.spec_from_file_location("demo", DEMO)
    demo = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(demo)
    demo.main(seconds=0.0)
    printed = capsys.readouterr().out
    lines = [line.split() for line in printed.splitlines()]
    for variant in ("eager", "torch.compile", "Tritium"):
        assert sum(variant in line[:2] for line in lines) >= 1, printed
    assert "relative L2" in printed
    assert "Tritium report" in printed
    assert "rms_norm" in printed
