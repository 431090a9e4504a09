"""Stable Audio: blocks over the tokens of a sound, behind one for its length."""

from tritium.models.family import Blocks, Cut, Family, ParallelFacts

FAMILY = Family(
    name="stable_audio",
    denoisers=("StableAudioDiTModel",),
    blocks=("StableAudioDiTBlock",),
    parallel=ParallelFacts(
        sections=(
            (
                Blocks(
                    path="transformer_blocks", streams={"hidden_states": Cut()}, tables={"rotary_embedding": Cut(dim=0)}
                ),
            ),
        )
    ),
)
