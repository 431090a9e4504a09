"""The adaptive rule: it decides one step late, without a table, and only if it is asked for."""

import pytest
import torch

from support.denoising import Denoiser, euler, generate, optimized
from tritium import Plan, Skip, techniques
from tritium.techniques.skip.adaptive import Steady
from tritium.techniques.skip.table import RUN


def letters(latents, threshold=0.1, order=0, longest=4, steps=None):
    steady = Steady(threshold, order, longest)
    steps = steps or len(latents)
    return "".join(
        steady.letter(step, steps, 0, (torch.tensor([float(latent)]),), {}) for step, latent in enumerate(latents)
    )


def test_steady_changes_are_skipped_one_step_late():
    # Changes of 1 arrive in steps 1, 2 and 3, and are known in steps 2, 3 and 4.
    assert letters(range(9), longest=9) == "RRRR0000R"
    assert letters(range(9), longest=2) == "RRRR00R0R"


def test_a_jump_is_seen_one_step_after_it():
    latents = [0, 1, 2, 3, 4, 5, 15, 16, 17, 18, 19, 20]
    assert letters(latents, longest=99) == "RRRR000RRR0R"


def test_the_rule_is_a_second_difference():
    # Changes 4, 3, 2, 1 lie on a line; 8, 4, 2, 1 do not.
    assert letters([0, 4, 7, 9, 10, 10, 10])[4] == "0"
    assert letters([0, 8, 12, 14, 15, 15, 15])[4] == RUN


def test_all_branches_of_a_step_do_the_same():
    model, scheduler = Denoiser(), euler()
    with optimized(model, Skip(adaptive=0.5), scheduler) as handle:
        first = generate(model, scheduler, steps=12, guidance=(0.0, 0.3))
        rows = handle.skipping.images["model"].rows
        assert rows[0] == rows[1]
        assert "1" in rows[0]
        assert rows[0].startswith("RRRR")
        assert rows[0].endswith("R")
        assert torch.equal(generate(model, scheduler, steps=12, guidance=(0.0, 0.3)), first)


@pytest.mark.parametrize("stop", [1, 7, 8])
def test_an_image_after_an_aborted_one(stop):
    model, scheduler, skip = Denoiser(), euler(), Skip(adaptive=0.5)
    with optimized(model, skip, scheduler):
        alone = generate(model, scheduler, steps=12, seed=3)
    with optimized(model, skip, scheduler):
        with pytest.raises(InterruptedError):
            generate(model, scheduler, steps=12, stop=stop)
        assert torch.equal(generate(model, scheduler, steps=12, seed=3), alone)


def test_a_threshold_of_zero_runs_all():
    model, scheduler = Denoiser(), euler()
    expected = generate(model, scheduler, steps=12)
    with optimized(model, Skip(adaptive=0.0), scheduler):
        assert torch.equal(generate(model, scheduler, steps=12), expected)


def test_it_is_never_the_default():
    assert techniques.catalog()["skip"].default is None
    assert "skip" not in Plan().inherited()
