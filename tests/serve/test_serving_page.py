"""The code of docs/serving.md runs, and what the page names exists."""

import contextlib
import io
import re

import pytest

from support import pages
from support.fake_runner import FakeRunner, Server, model
from tritium.serve import protocol
from tritium.serve.metrics import Metrics
from tritium.serve.settings import Settings

PAGE = pages.ROOT / "docs" / "serving.md"
CODE = [block for block in pages.blocks(PAGE) if block.language == "python"]
TEXT = PAGE.read_text(encoding="utf-8")


@pytest.fixture
def address():
    with Server(FakeRunner(model(name="example")), Settings(drain_seconds=0.2)) as server:
        yield server.address


def test_the_client_of_the_page(address, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names, output = {}, io.StringIO()
    with contextlib.redirect_stdout(output):
        for block in CODE[:2]:
            exec(compile(block.text.replace("http://127.0.0.1:8000/", address), str(PAGE), "exec"), names)
    assert (tmp_path / "circles.webp").read_bytes()[8:12] == b"WEBP"
    lines = output.getvalue().splitlines()
    assert lines[0].endswith(" 7")
    assert [line.split(" ")[0] for line in lines[1:]] == ["image_generation.partial_image"] * 3 + [
        "image_generation.completed"
    ]


def test_the_app_of_the_page():
    names = {}
    exec(compile(CODE[2].text, str(PAGE), "exec"), names)
    assert names["app"].title == "Tritium"
    assert len(CODE) == 3


def test_metrics_of_the_page_are_those_of_the_app():
    named = set(re.findall(r"`(tritium_\w+)", TEXT))
    metrics = Metrics(FakeEngine())
    there = {
        f"{family.name}_total" if family.type == "counter" else family.name for family in metrics.registry.collect()
    }
    assert named == there


class FakeEngine:
    def status(self):
        from tritium.serve.engine import Status

        return Status(ready=True)


def test_the_extensions_of_the_page_are_those_of_the_app():
    rows = TEXT.split("| name | meaning |", 1)[1].split("\n\n", 1)[0]
    named = {
        name
        for row in rows.splitlines()
        for name in re.findall(r"`([a-z_]+)`", row.split("|")[1] if "|" in row else "")
    }
    assert named == set(protocol.Sampling.model_fields)


def test_codes_of_the_page_are_sent():
    rows = TEXT.split("| status, `code` |", 1)[1].split("\n\n", 1)[0]
    named = {code for row in rows.splitlines()[1:] for code in re.findall(r"`([a-z_]+)`", row.split("|")[1])}
    source = "".join(
        path.read_text(encoding="utf-8") for path in (pages.ROOT / "src" / "tritium" / "serve").rglob("*.py")
    )
    assert len(named) > 12
    assert [code for code in named if f'"{code}"' not in source] == []
