from __future__ import annotations

import pytest
from PIL import Image

from support import scripts
from tritium.example import PROMPTS


@pytest.mark.codegen
def test_the_demo_writes_images_and_a_report(capsys, tmp_path):
    demo = scripts.load("examples/demo.py")
    demo.main(tmp_path, steps=2)
    printed = capsys.readouterr().out
    for prompt in PROMPTS:
        assert prompt in printed
    assert tuple(demo.PROMPTS) == PROMPTS
    assert printed.count("PSNR") == len(PROMPTS)
    assert "transformer" in printed
    with Image.open(tmp_path / "compare.png") as sheet:
        assert sheet.width > 3 * 256
        assert sheet.height > 4 * 256
    page = (tmp_path / "report.html").read_text()
    assert "FluxTransformer2DModel" in page
    assert "Times are <b>measured</b>" in page
