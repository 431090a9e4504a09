from __future__ import annotations

import pytest
from PIL import Image

from support import scripts
from tritium.example import PROMPTS


@pytest.mark.parametrize(
    "engine", ["eager", pytest.param("inductor", marks=[pytest.mark.thorough, pytest.mark.codegen])]
)
def test_the_demo_writes_images_and_a_report(engine, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITIUM_ENGINE", engine)
    demo = scripts.load("examples/demo.py")
    demo.main(tmp_path, num_inference_steps=2)
    printed = capsys.readouterr().out
    assert set(demo.PROMPTS) < set(PROMPTS)
    lines = printed.splitlines()
    for way in ("eager", "Tritium", "Tritium with recipe"):
        assert any(line.startswith(f"{way}: ") and "x, PSNR" in line for line in lines)
    assert "transformer" in printed
    # The recipe is for 28 steps: images of two are computed.
    assert "no plan for 2 steps" in printed
    with Image.open(tmp_path / "compare.png") as sheet:
        assert sheet.size == (3 * 2 * 128, 2 * 128)
    page = (tmp_path / "report.html").read_text()
    assert "FluxTransformer2DModel" in page
    assert ("Times are <b>measured</b>" in page) == (engine == "inductor")
