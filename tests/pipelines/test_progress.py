"""What a warm-up shows: a bar on a terminal, log lines elsewhere, and nothing where it was not asked for."""

import io
import re
import sys

import pytest

import tritium
from support import small_pipelines
from tritium import CompilationConfig, Plan, Shapes
from tritium.pipelines.progress import Progress

PLAN = Plan(
    config=CompilationConfig(engine="eager"),
    shapes=Shapes(sizes=[(32, 32), (32, 48)], text_tokens=[16]),
    components={"vae": "eager"},
)


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def terminal(monkeypatch):
    for name, value in {"TERM": "xterm", "COLUMNS": "200", "CI": ""}.items():
        monkeypatch.setenv(name, value)

    def make():
        # Not before the test itself runs: pytest puts its own there then.
        monkeypatch.setattr(sys, "stderr", Terminal())
        return sys.stderr

    return make


def shown(screen):
    """What was written, without colours and movements."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.getvalue())


def test_a_bar_with_an_estimate_on_a_terminal(terminal):
    screen = terminal()
    with tritium.optimize(small_pipelines.flux(1, 1), PLAN) as handle:
        handle.warmup()
    text = shown(screen)
    assert "\x1b[" in screen.getvalue()
    assert "━" in text
    assert "0/2 warming up 32 x 48, batch 1, 16 text tokens" in text
    assert re.search(r"1/2 warming up 32 x 32, batch 1, 16 text tokens, about \d+ s left", text)
    assert "warmed up 2 buckets in" in text
    assert "compiled FluxTransformer2DModel.forward in" in text


def test_lines_with_an_estimate_elsewhere(capsys):
    with tritium.optimize(small_pipelines.flux(1, 1), PLAN) as handle:
        handle.warmup()
    lines = capsys.readouterr().err.splitlines()
    assert "tritium: warming up 32 x 48, batch 1, 16 text tokens (1 of 2)" in lines
    assert any(re.fullmatch(r"tritium: warming up 32 x 32.*, about \d+ s left \(2 of 2\)", line) for line in lines)
    assert re.fullmatch(r"tritium: warmed up 2 buckets in [\d.]+ s", lines[-1])


def test_silence_where_it_was_asked_for(terminal):
    screen = terminal()
    with tritium.optimize(small_pipelines.flux(1, 1), PLAN.with_(progress=False)) as handle:
        handle.warmup()
    assert screen.getvalue() == ""


def test_what_is_compiled_is_told_inside_of_the_bar(terminal):
    screen = terminal()
    progress = Progress(1)
    with progress.over("warming up", 3) as next_one:
        next_one("one")
        progress._outer.detail("transformer: compiling forward")
        progress._outer._bar.refresh()
        progress._outer.detail("")
        next_one("two")
    assert "0/3 warming up one; transformer: compiling forward" in shown(screen)
    assert progress._outer is None


def test_an_error_takes_the_bar_away(terminal):
    screen = terminal()
    progress = Progress(1)

    def fail():
        with progress.over("warming up", 3) as next_one:
            next_one("one")
            raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        fail()
    assert progress._outer is None
    assert sys.stderr is screen
