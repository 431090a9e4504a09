from __future__ import annotations

import pytest
from PIL import Image

from support import scripts
from tritium.example import PROMPTS


@pytest.mark.codegen
def test_the_demo_writes_images_and_a_report(capsys, tmp_path):
    demo = scripts.load("examples/demo.py")
    demo.main(tmp_path, num_inference_steps=2)
    printed = capsys.readouterr().out
    assert set(demo.PROMPTS) < set(PROMPTS)
    assert all(text in printed for text in ("eager images", "optimized images", "PSNR", "transformer"))
    with Image.open(tmp_path / "compare.png") as sheet:
        assert sheet.size == (3 * 128, 3 * 128)
    page = (tmp_path / "report.html").read_text()
    assert "FluxTransformer2DModel" in page
    assert "Times are <b>measured</b>" in page
