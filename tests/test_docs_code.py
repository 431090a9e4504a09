"""Every block of Python in the documentation runs, with tiny models and without generated code."""

import re

import diffusers
import pytest
import torch
from diffusers.models import attention_dispatch as dispatch
from torch._dynamo.backends import registry

import tritium
from support import pages, scenes
from support.fake_runner import FakeRunner, Server, model
from tritium.serve.settings import Settings

# Pages whose blocks another test runs, with more that it checks.
ELSEWHERE = {
    "docs/sharing.md": "sharing/test_sharing_page.py",
    "docs/serving.md": "serve/test_serving_page.py",
    "docs/static-graphs.md": "pipelines/test_static_graphs_page.py",
    "docs/tutorials/serving.md": "test_docs_code.py",
}
CODE = {
    pages.name_of(page): found
    for page in pages.pages()
    if (found := [block for block in pages.blocks(page) if block.language == "python"])
}


@pytest.fixture
def reader(monkeypatch, tmp_path):
    """A process as a reader's: `optimize` may be called again on a pipeline, in the place of an earlier call."""
    registry.lookup_backend("tritium")
    monkeypatch.setenv("TRITIUM_ENGINE", "eager")
    monkeypatch.setitem(registry._COMPILER_FNS, "tritium", tritium.Backend())
    monkeypatch.chdir(tmp_path)
    handles, optimize = [], tritium.optimize
    active_backend, _ = dispatch._AttentionBackendRegistry.get_active_backend()

    def instead(pipe, *arguments, **options):
        for handle in [handle for handle in handles if handle.pipe is pipe]:
            handle.remove()
            handles.remove(handle)
        handles.append(optimize(pipe, *arguments, **options))
        return handles[-1]

    monkeypatch.setattr(tritium, "optimize", instead)
    monkeypatch.setattr(tritium, "load_example", scenes.pipeline)
    for name, load in scenes.LOADED.items():
        monkeypatch.setattr(getattr(diffusers, name), "from_pretrained", load)
    yield tmp_path
    for handle in handles:
        handle.remove()
    # A model's `set_attention_backend` also changes that of all models.
    dispatch._AttentionBackendRegistry.set_active_backend(active_backend)


@pytest.mark.parametrize("page", sorted(CODE.keys() - ELSEWHERE.keys()))
def test_every_block_of_a_page(page, reader, capsys):
    torch.manual_seed(0)
    names = scenes.general() | scenes.SCENES.get(page, lambda folder: {})(reader)
    for block in CODE[page]:
        if any(name in block.text for name in scenes.NEED_CODE):
            scenes.with_generated_code(block.text, names)
        # Lines of a traceback are those of the page.
        source = "\n" * (block.line - 1) + scenes.substituted(block.text)
        exec(compile(source, page, "exec"), names)


def test_pages_that_run_elsewhere_do():
    for page, test in ELSEWHERE.items():
        assert page.rpartition("/")[2] in (pages.ROOT / "tests" / test).read_text(encoding="utf-8")
        assert page in CODE


def test_the_client_of_the_tutorial_for_serving(tmp_path, monkeypatch, capsys):
    (block,) = CODE["docs/tutorials/serving.md"]
    monkeypatch.chdir(tmp_path)
    served = model(name="example", sizes=((128, 128), (192, 128)))
    with Server(FakeRunner(served), Settings(drain_seconds=0.2)) as server:
        exec(compile(block.text.replace("http://127.0.0.1:8000/", server.address), block.where, "exec"), {})
    assert (tmp_path / "ring.png").read_bytes().startswith(b"\x89PNG")
    assert float(capsys.readouterr().out) >= 0


# Values that pages write in a sentence or a table.
KINDS = "Plan|Skip|Parallel|Memory|Quantize|Choice|Shapes|CompilationConfig|FusionPatterns|QuantizationConfig"
VALUES = sorted(
    {
        (pages.name_of(page), value)
        for page in pages.pages()
        for value in re.findall(rf"`((?:tritium\.)?(?:{KINDS})(?:\.\w+)?\([^`]*\))`", page.read_text(encoding="utf-8"))
        if "..." not in value and " | " not in value
    }
)
# Names that stand for a reader's value.
PLACEHOLDERS = {"ratios": [1.0] * 28, "N": 2}


@pytest.mark.parametrize(("page", "value"), VALUES, ids=[f"{page}: {value}" for page, value in VALUES])
def test_a_value_in_a_sentence_is_accepted(page, value, reader):
    if ".json" in value:
        scenes.of_recipes(reader)
    assert eval(value, scenes.values() | PLACEHOLDERS) is not None
