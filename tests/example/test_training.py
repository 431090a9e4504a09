"""The images, captions and ids that the example pipeline is trained on, and the checker that reads images back."""

import random

import pytest
import torch
from diffusers import FluxPipeline

import parts
import score
import train
from draw import FIELDS, draw, held_out, sample_scenes
from tritium.example import unknown_words
from tritium.example.grammar import PROMPTS, Scene, caption


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def test_scenes_to_train_on_hold_out_every_held_out_combination():
    seen = sample_scenes(4000, generator())
    assert not held_out(seen).any()
    assert held_out(sample_scenes(50, generator(), unseen=True)).all()
    # Sizes and background do not take part: a held-out combination is held out on every background.
    changed = seen.clone()
    for name in ("background", "size_a", "size_b"):
        changed[:, FIELDS[name]] = 1
    assert not held_out(changed).any()


def test_objects_and_background_differ_in_colour():
    scenes = sample_scenes(4000, generator())
    background, first, second = (scenes[:, FIELDS[name]] for name in ("background", "colour_a", "colour_b"))
    pair = scenes[:, FIELDS["pair"]] == 1
    assert (background != first).all()
    assert ((second != first) & (second != background))[pair].all()


def test_captions_have_known_words_and_fit_the_encoders():
    scenes, choose, ids = sample_scenes(3000, generator()), random.Random(0), parts.CaptionIds()
    captions = [caption(Scene(*row), choose) for row in scenes.tolist()]
    assert not any(unknown_words(text) for text in [*captions, *PROMPTS])
    ids(captions)


def test_the_table_gives_the_ids_of_the_tokenizers():
    captions = [*PROMPTS, "", "A image of 2 Red circles, blue background."]
    for table, tokenizer in zip(parts.CaptionIds()(captions), parts.tokenizers(), strict=True):
        full = tokenizer(captions, padding="max_length", max_length=parts.TEXT, return_tensors="pt").input_ids
        assert torch.equal(table.long(), full)
        assert tokenizer("a dragon").input_ids.count(tokenizer.unk_token_id) == 1


def test_latents_are_packed_and_placed_as_the_pipeline_does():
    latents = torch.randn(2, parts.LATENT, 12, 8)
    assert torch.equal(train.pack(latents), FluxPipeline._pack_latents(latents, 2, parts.LATENT, 12, 8))
    place = FluxPipeline._prepare_latent_image_ids(1, 6, 4, torch.device("cpu"), torch.float32)
    assert torch.equal(train.positions(6, 4, torch.device("cpu")), place)


@pytest.mark.parametrize("sides", [pytest.param((128, 128), marks=pytest.mark.thorough), (96, 160)])
def test_the_checker_reads_true_images_and_no_others(sides):
    scenes, _ = score.unseen(24)
    images = draw(scenes, *sides, generator(3))
    assert score.means(score.check(images, scenes))["all"] == 1.0
    noisy = (images + 0.05 * torch.randn(images.shape, generator=generator(4))).clamp(0, 1)
    assert score.means(score.check(noisy, scenes))["all"] == 1.0
    wrong = score.means(score.check(images, scenes.roll(1, 0)))
    assert wrong["all"] == 0.0
    assert wrong["halves"] < 0.3


def test_the_checker_sees_each_attribute_alone():
    scenes, _ = score.unseen(40)
    scenes = scenes[scenes[:, FIELDS["pair"]] == 1]
    images = draw(scenes, 128, 128, generator(3))

    def broken(**changes):
        told = scenes.clone()
        for name, change in changes.items():
            told[:, FIELDS[name]] = change(told[:, FIELDS[name]])
        result = score.means(score.check(images, told))
        return {name for name, value in result.items() if value < 1.0} - {"all"}

    assert broken(shape_a=lambda shape: (shape + 1) % 5) == {"shape"}
    assert broken(count_b=lambda count: count % 3 + 1) == {"count"}
    assert broken(place=lambda place: (place - 1 ^ 1) + 1) == {"halves"}


def test_the_clock_warms_up_and_ends_at_zero():
    clock = train.Clock("stage", budget=100.0, spent=50.0)
    clock.step = 10**6
    assert clock.rate(1.0) == pytest.approx(0.5, abs=0.01)
    clock.spent = 100.0
    assert clock.rate(1.0) == pytest.approx(0.0, abs=1e-6)
    clock.spent, clock.step = 0.0, 0
    assert clock.rate(1.0) < 0.01
