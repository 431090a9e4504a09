"""Twelve sizes through one compiled decoder."""

import dataclasses

import torch

import tritium
from tritium.bench import decoder_sizes
from tritium.bench.decoders import VAE_LIKE
from tritium.bench.settings import Settings, silent

SETTINGS = Settings(cold=False, seconds=0.0, config=tritium.CompilationConfig(engine="eager"))


def test_ten_sizes_after_two_compile_nothing():
    rows = decoder_sizes.run(VAE_LIKE, SETTINGS, silent)
    assert {row.recompiles for row in rows} == {0}
    assert len(rows) == 2 * len(decoder_sizes.TIMED)
    for ours, own in zip(rows[::2], rows[1::2], strict=True):
        assert ours.workload == own.workload
        assert own.against_static == 1.0
        assert ours.relative_l2 < 1e-5


def test_compilations_of_further_sizes_are_counted():
    """A decoder that looks at its width compiles for both answers."""

    class Branching(torch.nn.Module):
        def forward(self, latents):
            return latents * 2 if latents.shape[-1] > 5 else latents * 3

    workload = dataclasses.replace(VAE_LIKE, make=lambda config: Branching(), dims=None)
    rows = decoder_sizes.run(workload, SETTINGS, silent)
    assert rows[0].recompiles > 0
