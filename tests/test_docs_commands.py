"""Every command line in the documentation parses, and cheap ones run."""

import re
import shlex
import tomllib

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from support import pages
from support.pages import ROOT
from tritium.cli.app import app

GROUP = get_command(app)
COMMANDS = [(block, line) for page in pages.pages() for block in pages.blocks(page) for line in block.commands]
TRITIUM = [(block, line) for block, line in COMMANDS if "tritium" in line.split(" ")[:2]]
# Commands in the middle of a sentence; capitals and dots stand for values.
INLINE = sorted(
    {
        (pages.name_of(page), command)
        for page in pages.pages()
        for command in re.findall(r"`(tritium [a-z]+[^`\n]*)`", page.read_text(encoding="utf-8"))
    }
)
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]


def ids(pairs):
    return [f"{block.where}: {line[:60]}" for block, line in pairs]


def arguments(line):
    """Return what `tritium` gets from a line: variables before it and redirections after it are the shell's."""
    words = shlex.split(re.split(r" [>|&]", line)[0])
    return words[words.index("tritium") + 1 :]


def parse(words):
    """Parse a command line as `tritium` does, and run nothing."""
    name, *rest = words
    return GROUP.commands[name].make_context(name, rest)


def test_there_are_commands():
    assert len(TRITIUM) > 20
    assert len(INLINE) > 20


@pytest.mark.parametrize(("block", "line"), TRITIUM, ids=ids(TRITIUM))
def test_a_command_parses(block, line):
    parse(arguments(line))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("tritium rnu", "rnu"),
        ("tritium run --sice 64x64", "No such option: --sice"),
        ("tritium run --steps many", "valid integer"),
        ("tritium run a b", "unexpected extra argument"),
    ],
)
def test_a_wrong_one_does_not(line, message):
    with pytest.raises(Exception, match=message):
        parse(arguments(line))


@pytest.mark.parametrize(("page", "line"), INLINE, ids=[f"{page}: {line[:60]}" for page, line in INLINE])
def test_the_options_of_a_command_in_a_sentence_exist(page, line):
    name, *rest = line.split(" ")[1:]
    known = {
        option for parameter in GROUP.commands[name].params for option in (*parameter.opts, *parameter.secondary_opts)
    }
    used = set(re.findall(r"(?<![\w-])-{1,2}[a-z][a-z0-9-]*", " ".join(rest)))
    assert used <= known | {"--help"}


@pytest.mark.parametrize(
    ("block", "line"), others := [pair for pair in COMMANDS if pair not in TRITIUM], ids=ids(others)
)
def test_another_program_finds_what_is_named(block, line):
    program, *words = shlex.split(line)
    if program == "make":
        makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
        assert [word for word in words if "=" not in word and f"\n{word}:" not in makefile] == []
    if program == "pip":
        extras = re.findall(r"tritium\[([\w,]+)\]", line)
        assert [extra for found in extras for extra in found.split(",") if extra not in EXTRAS] == []
        assert [word for word in words if word.startswith("./") and not (ROOT / word).is_dir()] == []
    if program in ("python", "torchrun") and (scripts := [word for word in words if word.endswith(".py")]):
        script = next((path for base in (ROOT, block.page.parent) if (path := base / scripts[0]).is_file()), None)
        # A folder of a kernel has its `benchmark.py`.
        if script is None:
            assert scripts[0] == "benchmark.py"
            return
        text = script.read_text(encoding="utf-8")
        options = [word for word in words[words.index(scripts[0]) :] if word.startswith("--")]
        assert [option for option in options if option.partition("=")[0] not in text] == []


CHEAP = sorted({line for _, line in TRITIUM if arguments(line)[0] in ("doctor", "plan") and "path/to" not in line})


@pytest.mark.parametrize("line", CHEAP)
def test_a_cheap_command_runs(line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, arguments(line))
    assert result.exit_code == 0, result.output


OF_THE_EXAMPLE = sorted(
    {line for _, line in TRITIUM if arguments(line)[0] in ("run", "verify", "explain") and "/" not in line}
)


@pytest.mark.thorough
@pytest.mark.codegen
@pytest.mark.parametrize("line", OF_THE_EXAMPLE)
def test_a_command_for_the_example_runs(line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # --dump writes generated code, and refuses the engine that generates none.
    if "--dump" not in line:
        monkeypatch.setenv("TRITIUM_ENGINE", "eager")
    result = CliRunner().invoke(app, arguments(line))
    assert result.exit_code == 0, result.output
