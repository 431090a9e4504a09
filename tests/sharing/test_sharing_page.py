"""The code of docs/sharing.md runs as it is written."""

import pytest

import tritium
from support import pages, small_pipelines
from tritium.pipelines import sharing

PAGE = pages.ROOT / "docs" / "sharing.md"


def test_every_block_of_code(runtime, monkeypatch, tmp_path):
    monkeypatch.setenv("TRITIUM_ENGINE", "eager")
    monkeypatch.chdir(tmp_path)
    blocks = [block.text for block in pages.blocks(PAGE) if block.language == "python"]
    assert len(blocks) == 2
    with sharing.keeper("flux") as keeper:
        pipe = small_pipelines.flux(1, 1)
        pipe.default_sample_size = 8
        keeper.publish(pipe)
        names = {"tritium": tritium, "prompt": "a red circle"}
        exec(blocks[0], names)
        assert names["image"].size == (16, 16)
        names["handle"].remove()
        with pytest.warns(RuntimeWarning, match=r"flux\.tritium"):
            exec(blocks[1], names)
        names["handle"].remove()
