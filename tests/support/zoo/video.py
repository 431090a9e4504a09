"""Video and audio transformers of the zoo."""

import diffusers
import torch
from diffusers.models.embeddings import get_1d_rotary_pos_embed, get_3d_rotary_pos_embed

from support.zoo.model import Source, ZooModel, builder


def _wan() -> torch.nn.Module:
    return diffusers.WanTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        text_dim=16,
        freq_dim=16,
        ffn_dim=32,
        num_layers=2,
        rope_max_seq_len=32,
    )


def _wan_inputs(dtype=torch.float32, size=8):
    source = Source(dtype)
    return {
        "hidden_states": source.normal(2, 4, 2, size, 8),
        "timestep": torch.tensor([500, 500]),
        "encoder_hidden_states": source.normal(2, 6, 16),
        "return_dict": False,
    }


def _hunyuan_video() -> torch.nn.Module:
    return diffusers.HunyuanVideoTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=16,
        num_layers=1,
        num_single_layers=1,
        num_refiner_layers=1,
        text_embed_dim=16,
        pooled_projection_dim=8,
        rope_axes_dim=(4, 4, 8),
    )


def _hunyuan_video_inputs(dtype=torch.float32, size=8):
    source = Source(dtype)
    return {
        "hidden_states": source.normal(2, 4, 2, size, 8),
        "timestep": torch.tensor([500, 500]),
        "encoder_hidden_states": source.normal(2, 6, 16),
        "encoder_attention_mask": torch.ones(2, 6, dtype=torch.int64),
        "pooled_projections": source.normal(2, 8),
        "guidance": source.full(6000.0, 2),
        "return_dict": False,
    }


def _cogvideox() -> torch.nn.Module:
    return diffusers.CogVideoXTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=4,
        out_channels=4,
        time_embed_dim=16,
        text_embed_dim=16,
        num_layers=2,
        sample_width=8,
        sample_height=8,
        sample_frames=8,
        max_text_seq_length=6,
        use_rotary_positional_embeddings=True,
    )


def _cogvideox_inputs(dtype=torch.float32, size=8):
    source = Source(dtype)
    grid = (size // 2, 4)
    return {
        "hidden_states": source.normal(2, 2, 4, size, 8),
        "encoder_hidden_states": source.normal(2, 6, 16),
        "timestep": torch.tensor([500, 500]),
        "image_rotary_emb": get_3d_rotary_pos_embed(16, ((0, 0), grid), grid, 2),
        "return_dict": False,
    }


def _ltx() -> torch.nn.Module:
    return diffusers.LTXVideoTransformer3DModel(
        in_channels=8,
        out_channels=8,
        num_attention_heads=2,
        attention_head_dim=12,
        cross_attention_dim=24,
        num_layers=2,
        caption_channels=16,
    )


def _ltx_inputs(dtype=torch.float32, size=3):
    source = Source(dtype)
    return {
        "hidden_states": source.normal(2, 2 * size * 4, 8),
        "encoder_hidden_states": source.normal(2, 6, 16),
        "timestep": torch.tensor([500, 500]),
        "encoder_attention_mask": torch.ones(2, 6, dtype=torch.int64),
        "num_frames": 2,
        "height": size,
        "width": 4,
        "return_dict": False,
    }


def _ltx2() -> torch.nn.Module:
    return diffusers.LTX2VideoTransformer3DModel(
        in_channels=8,
        out_channels=8,
        num_attention_heads=2,
        attention_head_dim=16,
        cross_attention_dim=32,
        audio_in_channels=4,
        audio_out_channels=4,
        audio_num_attention_heads=2,
        audio_attention_head_dim=8,
        audio_cross_attention_dim=16,
        num_layers=2,
        caption_channels=24,
        rope_type="split",
    )


def _ltx2_inputs(dtype=torch.float32, size=3):
    source = Source(dtype)
    tokens = 2 * size * 4
    return {
        "hidden_states": source.normal(2, tokens, 8),
        "audio_hidden_states": source.normal(2, 10, 4),
        "encoder_hidden_states": source.normal(2, 6, 24),
        "audio_encoder_hidden_states": source.normal(2, 6, 24),
        "timestep": torch.full((2, tokens), 500),
        "audio_timestep": torch.full((2, 10), 500),
        "encoder_attention_mask": torch.ones(2, 6, dtype=torch.int64),
        "audio_encoder_attention_mask": torch.ones(2, 6, dtype=torch.int64),
        "num_frames": 2,
        "height": size,
        "width": 4,
        "audio_num_frames": 10,
        "return_dict": False,
    }


def _mochi() -> torch.nn.Module:
    return diffusers.MochiTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=8,
        num_layers=2,
        pooled_projection_dim=16,
        in_channels=4,
        out_channels=4,
        text_embed_dim=16,
        time_embed_dim=4,
        max_sequence_length=6,
    )


def _mochi_inputs(dtype=torch.float32, size=8):
    source = Source(dtype)
    return {
        "hidden_states": source.normal(2, 4, 2, size, 8),
        "encoder_hidden_states": source.normal(2, 6, 16),
        "timestep": torch.tensor([500, 500]),
        "encoder_attention_mask": torch.ones(2, 6, dtype=torch.bool),
        "return_dict": False,
    }


def _cosmos() -> torch.nn.Module:
    return diffusers.CosmosTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=16,
        num_layers=2,
        mlp_ratio=2,
        text_embed_dim=16,
        adaln_lora_dim=4,
        max_size=(4, 32, 32),
        concat_padding_mask=False,
    )


def _cosmos_inputs(dtype=torch.float32, size=8):
    source = Source(dtype)
    return {
        "hidden_states": source.normal(2, 4, 2, size, 8),
        "timestep": source.full(0.5, 2),
        "encoder_hidden_states": source.normal(2, 6, 16),
        "fps": 16,
        "return_dict": False,
    }


def _kandinsky5() -> torch.nn.Module:
    return diffusers.Kandinsky5Transformer3DModel(
        in_visual_dim=4,
        in_text_dim=16,
        in_text_dim2=8,
        time_dim=16,
        out_visual_dim=4,
        model_dim=32,
        ff_dim=64,
        num_text_blocks=1,
        num_visual_blocks=2,
        axes_dims=(4, 6, 6),
    )


def _kandinsky5_inputs(dtype=torch.float32, size=8):
    source = Source(dtype)
    return {
        "hidden_states": source.normal(2, 2, size, 8, 4),
        "encoder_hidden_states": source.normal(2, 6, 16),
        "timestep": source.full(500.0, 2),
        "pooled_projections": source.normal(2, 8),
        "visual_rope_pos": [torch.arange(2), torch.arange(size // 2), torch.arange(4)],
        "text_rope_pos": torch.arange(6),
        "return_dict": False,
    }


def _stable_audio() -> torch.nn.Module:
    return diffusers.StableAudioDiTModel(
        sample_size=8,
        in_channels=3,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=2,
        num_key_value_attention_heads=1,
        out_channels=3,
        cross_attention_dim=8,
        time_proj_dim=8,
        global_states_input_dim=8,
        cross_attention_input_dim=8,
    )


def _stable_audio_inputs(dtype=torch.float32, size=16):
    source = Source(dtype)
    return {
        "hidden_states": source.normal(2, 3, size),
        "timestep": source.full(0.5, 2),
        "encoder_hidden_states": source.normal(2, 6, 8),
        "global_hidden_states": source.normal(2, 1, 8),
        "rotary_embedding": get_1d_rotary_pos_embed(4, size + 1, use_real=True, repeat_interleave_real=False),
        "return_dict": False,
    }


HEIGHT = {"hidden_states": (3,)}

MODELS = (
    ZooModel("wan", builder(_wan), _wan_inputs, (8, 12), True, HEIGHT),
    ZooModel("hunyuan_video", builder(_hunyuan_video), _hunyuan_video_inputs, (8, 12), True, HEIGHT),
    ZooModel(
        "cogvideox",
        builder(_cogvideox),
        _cogvideox_inputs,
        (8, 12),
        False,
        HEIGHT | {"image_rotary_emb.0": (0,), "image_rotary_emb.1": (0,)},
    ),
    ZooModel(
        "ltx",
        builder(_ltx),
        _ltx_inputs,
        (3, 5),
        True,
        notes="height holds the size as a Python int, which specialises it.",
    ),
    ZooModel(
        "ltx2",
        builder(_ltx2),
        _ltx2_inputs,
        (3, 5),
        True,
        notes="LTX-2.0 with split RoPE. height holds the size as a Python int, which specialises it.",
    ),
    ZooModel(
        "mochi",
        builder(_mochi),
        _mochi_inputs,
        (8, 12),
        False,
        HEIGHT,
        graphs=11,
        notes="Breaks at the text mask (`nonzero`): attention runs outside any graph, and blocks share frames.",
    ),
    ZooModel(
        "cosmos",
        builder(_cosmos),
        _cosmos_inputs,
        (8, 12),
        False,
        HEIGHT,
        notes="concat_padding_mask=True needs torchvision.",
    ),
    ZooModel(
        "kandinsky5",
        builder(_kandinsky5),
        _kandinsky5_inputs,
        (8, 12),
        True,
        {"hidden_states": (2,), "visual_rope_pos.1": (0,)},
        notes="bfloat16 runs only with the modules kept in float32 that the class names.",
    ),
    ZooModel(
        "stable_audio",
        builder(_stable_audio),
        _stable_audio_inputs,
        (16, 24),
        False,
        {"hidden_states": (2,), "rotary_embedding.0": (0,), "rotary_embedding.1": (0,)},
    ),
)
