"""The pipeline that ships with the package: it loads without a network, is small, and draws what prompts say."""

import socket
import subprocess
import sys

import pytest
import torch

import score
import tritium
from tritium import example
from tritium.errors import MissingExtra, MissingWeights
from tritium.example import PROMPTS, WEIGHTS, load_example, unknown_words


@pytest.fixture
def no_network(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("the example pipeline reached for the network")

    for name in ("connect", "connect_ex"):
        monkeypatch.setattr(socket.socket, name, refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.fixture(scope="module")
def pipeline():
    pipe = load_example()
    pipe.set_progress_bar_config(disable=True)
    return pipe


def test_unknown_words_are_named_once_and_in_order():
    assert unknown_words("A tall red circle next to a tall dragon!") == ["tall", "next", "dragon"]
    assert not any(unknown_words(prompt) for prompt in PROMPTS)


def test_importing_the_example_does_not_import_diffusers():
    program = "import sys, tritium.example; assert not {'diffusers', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_absent_weights_and_absent_diffusers_are_clear_errors(monkeypatch, tmp_path):
    assert tritium.load_example is load_example
    with monkeypatch.context() as patch:
        patch.setattr(example, "WEIGHTS", tmp_path)
        with pytest.raises(MissingWeights, match=r"training/train\.py"):
            load_example()
    monkeypatch.setitem(sys.modules, "diffusers", None)
    with pytest.raises(MissingExtra, match=r"tritium\[diffusers\]"):
        load_example()


def test_it_loads_without_a_network_and_is_small(no_network):
    pipe = load_example(dtype=torch.bfloat16)
    assert {pipe.transformer.dtype, pipe.vae.dtype, pipe.text_encoder.dtype, pipe.text_encoder_2.dtype} == {
        torch.bfloat16
    }
    files = [path for path in WEIGHTS.rglob("*") if path.is_file()]
    assert not [path for path in files if path.suffix in {".bin", ".pt", ".ckpt", ".pkl"}]
    assert sum(path.stat().st_size for path in files) < 24e6


def test_the_plain_call_draws_the_prompt(pipeline):
    drawn = pipeline(PROMPTS[0], generator=torch.Generator().manual_seed(0), output_type="pt").images
    assert drawn.shape == (1, 3, 128, 128)
    # two red circles above a blue square on a yellow background
    scene = torch.tensor([[1, 3, 2, 0, 0, 2, 0, 1, 4, 1, 0]])
    result = score.means(score.check(drawn, scene))
    assert result["halves"] == result["colour"] == result["background"] == 1.0


def test_held_out_prompts_have_the_right_colours_by_half(pipeline):
    scenes, prompts = score.unseen(32)
    drawn = score.pictures(pipeline, prompts, 128, 128, 8, length=32)
    right = score.means(score.check(drawn, scenes))
    assert right["halves"] >= 0.9
    assert right["background"] >= 0.95
    # Other prompts' scenes are the chance level: the checker is not simply saying yes.
    assert score.means(score.check(drawn, scenes.roll(1, 0)))["halves"] < 0.3


@pytest.mark.parametrize("sides", [(96, 160), (192, 128)])
def test_other_shapes_are_drawn_too(pipeline, sides):
    scenes, prompts = score.unseen(12)
    drawn = score.pictures(pipeline, prompts, *sides, 8, length=32)
    assert drawn.shape[2:] == sides
    assert score.means(score.check(drawn, scenes))["halves"] >= 0.75


def test_a_saved_copy_draws_bit_equal_pictures(pipeline, tmp_path):
    pipeline.save_pretrained(tmp_path)
    again = type(pipeline).from_pretrained(tmp_path, local_files_only=True)
    first, second = (score.pictures(pipe, PROMPTS[:1], 96, 96, 2, length=32) for pipe in (pipeline, again))
    assert torch.equal(first, second)
