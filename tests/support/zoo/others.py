"""Models of the zoo that the benchmark does not have."""

import diffusers
import torch
from diffusers.models.embeddings import get_1d_rotary_pos_embed

from support.zoo.model import ZooModel, builder, normals
from support.zoo.stock import PYTHON_HEIGHT, VIDEO


def _ltx2_inputs(dtype=torch.float32, size=3):
    normal = normals(dtype)
    tokens = 2 * size * 4
    return {
        "hidden_states": normal(2, tokens, 8),
        "audio_hidden_states": normal(2, 10, 4),
        "encoder_hidden_states": normal(2, 6, 24),
        "audio_encoder_hidden_states": normal(2, 6, 24),
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


def _mochi_inputs(dtype=torch.float32, size=8):
    normal = normals(dtype)
    return {
        "hidden_states": normal(2, 4, 2, size, 8),
        "encoder_hidden_states": normal(2, 6, 16),
        "timestep": torch.tensor([500, 500]),
        "encoder_attention_mask": torch.ones(2, 6, dtype=torch.bool),
        "return_dict": False,
    }


def _cosmos_inputs(dtype=torch.float32, size=8):
    normal = normals(dtype)
    return {
        "hidden_states": normal(2, 4, 2, size, 8),
        "timestep": torch.full((2,), 0.5, dtype=dtype),
        "encoder_hidden_states": normal(2, 6, 16),
        "fps": 16,
        "return_dict": False,
    }


def _kandinsky5_inputs(dtype=torch.float32, size=8):
    normal = normals(dtype)
    return {
        "hidden_states": normal(2, 2, size, 8, 4),
        "encoder_hidden_states": normal(2, 6, 16),
        "timestep": torch.full((2,), 500.0, dtype=dtype),
        "pooled_projections": normal(2, 8),
        "visual_rope_pos": [torch.arange(2), torch.arange(size // 2), torch.arange(4)],
        "text_rope_pos": torch.arange(6),
        "return_dict": False,
    }


def _stable_audio_inputs(dtype=torch.float32, size=16):
    normal = normals(dtype)
    return {
        "hidden_states": normal(2, 3, size),
        "timestep": torch.full((2,), 0.5, dtype=dtype),
        "encoder_hidden_states": normal(2, 6, 8),
        "global_hidden_states": normal(2, 1, 8),
        "rotary_embedding": get_1d_rotary_pos_embed(4, size + 1, use_real=True, repeat_interleave_real=False),
        "return_dict": False,
    }


VIDEO_MODELS = (
    ZooModel(
        "ltx2",
        builder(
            diffusers.LTX2VideoTransformer3DModel,
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
        ),
        _ltx2_inputs,
        (3, 5),
        True,
        notes=f"LTX-2.0 with split RoPE. {PYTHON_HEIGHT}",
    ),
    ZooModel(
        "mochi",
        builder(
            diffusers.MochiTransformer3DModel,
            num_attention_heads=2,
            attention_head_dim=8,
            num_layers=2,
            pooled_projection_dim=16,
            in_channels=4,
            out_channels=4,
            text_embed_dim=16,
            time_embed_dim=4,
            max_sequence_length=6,
        ),
        _mochi_inputs,
        (8, 12),
        False,
        VIDEO,
        graphs=11,
        notes="Breaks at the text mask (`nonzero`): attention runs outside any graph, and blocks share frames.",
    ),
    ZooModel(
        "cosmos",
        builder(
            diffusers.CosmosTransformer3DModel,
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
        ),
        _cosmos_inputs,
        (8, 12),
        False,
        VIDEO,
        notes="concat_padding_mask=True needs torchvision.",
    ),
    ZooModel(
        "kandinsky5",
        builder(
            diffusers.Kandinsky5Transformer3DModel,
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
        ),
        _kandinsky5_inputs,
        (8, 12),
        True,
        {"hidden_states": (2,), "visual_rope_pos.1": (0,)},
        notes="bfloat16 runs only with the modules kept in float32 that the class names.",
    ),
    ZooModel(
        "stable_audio",
        builder(
            diffusers.StableAudioDiTModel,
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
        ),
        _stable_audio_inputs,
        (16, 24),
        False,
        {"hidden_states": (2,), "rotary_embedding.0": (0,), "rotary_embedding.1": (0,)},
    ),
)
