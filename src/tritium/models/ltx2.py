"""LTX-2: blocks over a video and its audio, which attend to each other."""

from tritium.models.family import Blocks, Cut, Family, ParallelFacts

_AUDIO = Cut(("audio_hidden_states",))

FAMILY = Family(
    name="ltx2",
    denoisers=("LTX2VideoTransformer3DModel",),
    blocks=("LTX2VideoTransformerBlock",),
    parallel=ParallelFacts(
        sections=(
            (
                Blocks(
                    path="transformer_blocks",
                    streams={"hidden_states": Cut(), "audio_hidden_states": _AUDIO},
                    tables={
                        **dict.fromkeys(("temb", "temb_ca_scale_shift", "temb_ca_gate"), Cut()),
                        **dict.fromkeys(("temb_audio", "temb_ca_audio_scale_shift", "temb_ca_audio_gate"), _AUDIO),
                        **dict.fromkeys(("video_rotary_emb", "ca_video_rotary_emb"), Cut(dim=-2)),
                        **dict.fromkeys(
                            ("audio_rotary_emb", "ca_audio_rotary_emb"), Cut(("audio_hidden_states",), dim=-2)
                        ),
                    },
                    masks={
                        "self_attention_mask": Cut(dim=-1),
                        "audio_self_attention_mask": Cut(("audio_hidden_states",), dim=-1),
                    },
                    outputs=("hidden_states", "audio_hidden_states"),
                ),
            ),
        )
    ),
)
