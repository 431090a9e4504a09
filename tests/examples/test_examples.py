"""The examples run, are short, and import public names alone. Engine `eager` spares most of them the compiler."""

import ast
import functools
import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
from PIL import Image
from torch._dynamo.backends import registry

import tritium
from support import scripts, small_pipelines
from tritium.bench.search import engines

EXAMPLES = sorted((scripts.ROOT / "examples").glob("*.py"))
PLUGIN = sorted((scripts.ROOT / "examples" / "plugin" / "src").rglob("*.py"))
MOST_LINES = 40


def load(name):
    return scripts.load(f"examples/{name}.py")


@pytest.fixture
def engine_eager(monkeypatch):
    """Engine `eager`, also for `backend="tritium"`, which reads the environment once a process."""
    registry.lookup_backend("tritium")
    monkeypatch.setenv("TRITIUM_ENGINE", "eager")
    monkeypatch.setitem(registry._COMPILER_FNS, "tritium", tritium.Backend())


@pytest.mark.parametrize("path", [*EXAMPLES, *PLUGIN], ids=lambda path: path.stem)
def test_an_example_is_short(path):
    assert len(path.read_text().splitlines()) <= MOST_LINES


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_imports_public_names_alone(path):
    tree = ast.parse(path.read_text())
    imported = {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    imported |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name for name in imported if name.split(".")[0] == "tritium"} <= {"tritium"}
    used = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "tritium"
    }
    assert used <= set(tritium.__all__)


def test_image(engine_eager, tmp_path, capsys):
    load("image").main(tmp_path / "image.png")
    with Image.open(tmp_path / "image.png") as image:
        assert image.size == (128, 128)
        # Two red circles above a blue square on a yellow background: more than one colour.
        assert len(image.getcolors(maxcolors=128 * 128)) > 3
    assert "FluxTransformer2DModel as one program" in capsys.readouterr().out


def test_video(engine_eager, tmp_path, capsys):
    load("video").main(tmp_path / "video.gif")
    with Image.open(tmp_path / "video.gif") as video:
        assert (video.size, video.n_frames) == ((48, 32), 3)
    printed = capsys.readouterr().out
    assert "compiled: WanDecoder3d as a whole" in printed
    assert "compiled: WanTransformer3DModel as one program" in printed


def test_custom_model(engine_eager, capsys):
    report = load("custom_model").main()
    assert {name for name, sites in report.sites.items() if sites.fused == 2} == {
        "rms_norm",
        "gelu",
        "mul_add",
        "linear_gelu",
    }
    assert "recompiled because x changed: size 128 at dim 1 -> size 100 at dim 1" in capsys.readouterr().out


def without_the_compiler(command, options, **_settings):
    """Run the command of an example in this process, without plain torch.compile, whose compiler takes minutes."""
    from typer.testing import CliRunner

    from tritium.cli.app import app
    from tritium.pipelines import trial

    assert command[:3] == [sys.executable, "-m", "tritium"]
    ways = trial.ways
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trial, "ways", lambda part: [way for way in ways(part) if way.how != "inductor"])
        patch.setattr(engines, "plain_compile", lambda handle, calls: dict.fromkeys(handle.choices, engines.EAGER))
        result = CliRunner().invoke(app, [*command[3:], *options])
    assert result.exit_code == 0, result.output
    return subprocess.CompletedProcess(command, result.exit_code, result.stdout)


@pytest.mark.parametrize("model", ["folder", pytest.param("example", marks=pytest.mark.thorough)])
def test_recipe(model, engine_eager, tmp_path, monkeypatch, capsys):
    example = load("recipe")
    if model == "folder":
        model = str(tmp_path / model)
        small_pipelines.flux(1, 1).save_pretrained(model)
    options = ("--seconds", "0.1", "--prompt", "a red circle")
    run = functools.partial(without_the_compiler, options=options)
    monkeypatch.setattr(example, "subprocess", SimpleNamespace(run=run))
    example.main(model, recipe=tmp_path / "recipe.json", size="32x32", steps=1)
    assert (tmp_path / "recipe.json").is_file()
    printed = capsys.readouterr().out
    for part in ("transformer", "vae.decode", "text_encoder_2"):
        assert f"\n{part}: " in printed


@pytest.mark.thorough
@pytest.mark.codegen
def test_the_recipe_s_command_is_one_of_the_command_line(tmp_path):
    done = subprocess.run(
        [sys.executable, scripts.ROOT / "examples" / "recipe.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "transformer: " in done.stdout


@pytest.mark.parametrize("model", ["folder", pytest.param("example", marks=pytest.mark.thorough)])
def test_real_weights(model, engine_eager, tmp_path, monkeypatch):
    example = load("real_weights")
    short = {
        "bench": ("--against", "eager", "--seconds", "0"),
        "tune": ("--quick", "--no-skip", "--jobs", "1", "--held-out", "1", "--seconds", "0.1"),
    }

    def run(command, **settings):
        return without_the_compiler(command, options=short.get(command[3], ()))

    monkeypatch.setattr(example, "subprocess", SimpleNamespace(run=run, PIPE=None))
    named = model
    if model == "folder":
        named = str(tmp_path / model)
        small_pipelines.flux(1, 1).save_pretrained(named)
    example.main(named, str(tmp_path / "results.json"), "--size", "32x32", "--steps", "1")
    text = (tmp_path / "results.json").read_text()
    assert str(tmp_path) not in text
    found = json.loads(text)
    assert {row["variant"] for row in found["bench"]["rows"]} == {"eager", "tritium"}
    assert all("in 1 steps" in row["note"] for row in found["bench"]["rows"])
    assert found["tune"]["choices"]["transformer"]
    assert (found["verify"]["passed"], found["verify"]["model"], found["model"]) == (True, model, model)


def test_sparse_attention(capsys):
    pytest.importorskip("diffusers")
    density, psnr = load("sparse_attention").main()
    assert 0.5 < density < 0.8
    # 30.8 dB where this was written; as many blocks, selected at random instead of by likeness, gave 14.7.
    assert psnr > 28
    assert "of dense attention's work was done" in capsys.readouterr().out
