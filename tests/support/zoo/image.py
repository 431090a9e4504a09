"""Image transformers of the zoo."""

import diffusers
import torch

from support.zoo.model import Source, ZooModel, builder, grid_ids


def _flux() -> torch.nn.Module:
    return diffusers.FluxTransformer2DModel(
        in_channels=8,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=24,
        pooled_projection_dim=16,
        guidance_embeds=True,
        axes_dims_rope=(4, 4, 8),
    )


def _flux_inputs(dtype=torch.float32, size=24):
    source = Source(dtype)
    return {
        "hidden_states": source.normal(2, size, 8),
        "encoder_hidden_states": source.normal(2, 6, 24),
        "pooled_projections": source.normal(2, 16),
        "timestep": source.full(0.5, 2),
        "img_ids": grid_ids(size, 4, 3),
        "txt_ids": torch.zeros(6, 3),
        "guidance": source.full(3.5, 2),
        "return_dict": False,
    }


def _flux2() -> torch.nn.Module:
    return diffusers.Flux2Transformer2DModel(
        in_channels=8,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=24,
        timestep_guidance_channels=16,
        axes_dims_rope=(4, 4, 4, 4),
    )


def _flux2_inputs(dtype=torch.float32, size=24):
    source = Source(dtype)
    return {
        "hidden_states": source.normal(2, size, 8),
        "encoder_hidden_states": source.normal(2, 6, 24),
        "timestep": source.full(0.5, 2),
        "img_ids": grid_ids(size, 4, 4).expand(2, -1, -1),
        "txt_ids": grid_ids(6, 6, 4).expand(2, -1, -1),
        "guidance": source.full(3.5, 2),
        "return_dict": False,
    }


def _chroma() -> torch.nn.Module:
    return diffusers.ChromaTransformer2DModel(
        in_channels=8,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=24,
        axes_dims_rope=(4, 4, 8),
        approximator_num_channels=8,
        approximator_hidden_dim=16,
        approximator_layers=1,
    )


def _chroma_inputs(dtype=torch.float32, size=24):
    source = Source(dtype)
    return {
        "hidden_states": source.normal(2, size, 8),
        "encoder_hidden_states": source.normal(2, 6, 24),
        "timestep": source.full(0.5, 2),
        "img_ids": grid_ids(size, 4, 3),
        "txt_ids": torch.zeros(6, 3),
        "attention_mask": torch.ones(2, size + 6, dtype=torch.bool),
        "return_dict": False,
    }


def _qwen_image() -> torch.nn.Module:
    return diffusers.QwenImageTransformer2DModel(
        in_channels=16,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=24,
        axes_dims_rope=(8, 4, 4),
    )


def _qwen_image_inputs(dtype=torch.float32, size=4):
    source = Source(dtype)
    return {
        "hidden_states": source.normal(2, size * 4, 16),
        "encoder_hidden_states": source.normal(2, 6, 24),
        "encoder_hidden_states_mask": torch.ones(2, 6, dtype=torch.bool),
        "timestep": source.full(0.5, 2),
        "img_shapes": [[(1, size, 4)]] * 2,
        "return_dict": False,
    }


def _sd3() -> torch.nn.Module:
    return diffusers.SD3Transformer2DModel(
        sample_size=16,
        in_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=3,
        joint_attention_dim=16,
        caption_projection_dim=24,
        pooled_projection_dim=16,
        out_channels=4,
        pos_embed_max_size=16,
        dual_attention_layers=(0,),
        qk_norm="rms_norm",
    )


def _sd3_inputs(dtype=torch.float32, size=8):
    source = Source(dtype)
    return {
        "hidden_states": source.normal(2, 4, size, 8),
        "encoder_hidden_states": source.normal(2, 6, 16),
        "pooled_projections": source.normal(2, 16),
        "timestep": torch.tensor([500, 500]),
        "return_dict": False,
    }


def _pixart() -> torch.nn.Module:
    return diffusers.PixArtTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=12,
        out_channels=8,
        num_layers=2,
        cross_attention_dim=24,
        sample_size=8,
        caption_channels=16,
        use_additional_conditions=False,
    )


def _pixart_inputs(dtype=torch.float32, size=8):
    source = Source(dtype)
    return {
        "hidden_states": source.normal(2, 4, size, 8),
        "encoder_hidden_states": source.normal(2, 6, 16),
        "encoder_attention_mask": torch.ones(2, 6, dtype=torch.int64),
        "timestep": torch.tensor([500, 500]),
        "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
        "return_dict": False,
    }


def _dit() -> torch.nn.Module:
    return diffusers.DiTTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=8,
        out_channels=8,
        num_layers=2,
        sample_size=8,
        num_embeds_ada_norm=8,
    )


def _dit_inputs(dtype=torch.float32, size=8):
    source = Source(dtype)
    return {
        "hidden_states": source.normal(2, 4, size, size),
        "timestep": torch.tensor([5, 5]),
        "class_labels": torch.tensor([3, 4]),
        "return_dict": False,
    }


def _lumina2() -> torch.nn.Module:
    return diffusers.Lumina2Transformer2DModel(
        sample_size=8,
        in_channels=4,
        hidden_size=24,
        num_layers=2,
        num_refiner_layers=1,
        num_attention_heads=3,
        num_kv_heads=1,
        multiple_of=2,
        axes_dim_rope=(4, 2, 2),
        axes_lens=(64, 64, 64),
        cap_feat_dim=16,
    )


def _lumina2_inputs(dtype=torch.float32, size=8):
    source = Source(dtype)
    return {
        "hidden_states": source.normal(2, 4, size, 8),
        "timestep": source.full(0.5, 2),
        "encoder_hidden_states": source.normal(2, 6, 16),
        "encoder_attention_mask": torch.ones(2, 6, dtype=torch.bool),
        "return_dict": False,
    }


def _z_image() -> torch.nn.Module:
    return diffusers.ZImageTransformer2DModel(
        in_channels=4,
        dim=32,
        n_layers=2,
        n_refiner_layers=1,
        n_heads=2,
        n_kv_heads=2,
        cap_feat_dim=16,
        axes_dims=[8, 4, 4],
        axes_lens=[256, 32, 32],
    )


def _z_image_inputs(dtype=torch.float32, size=8):
    source = Source(dtype)
    return {
        "x": [source.normal(4, 1, size, 8)],
        "t": torch.tensor([0.5]),
        "cap_feats": [source.normal(6, 16)],
        "return_dict": False,
    }


def _sana() -> torch.nn.Module:
    return diffusers.SanaTransformer2DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=8,
        num_layers=2,
        num_cross_attention_heads=2,
        cross_attention_head_dim=8,
        cross_attention_dim=16,
        caption_channels=16,
        sample_size=8,
    )


def _sana_inputs(dtype=torch.float32, size=8):
    source = Source(dtype)
    return {
        "hidden_states": source.normal(2, 4, size, 8),
        "encoder_hidden_states": source.normal(2, 6, 16),
        "encoder_attention_mask": torch.ones(2, 6, dtype=torch.int64),
        "timestep": source.full(500.0, 2),
        "return_dict": False,
    }


def _auraflow() -> torch.nn.Module:
    return diffusers.AuraFlowTransformer2DModel(
        sample_size=16,
        in_channels=4,
        num_mmdit_layers=1,
        num_single_dit_layers=1,
        attention_head_dim=8,
        num_attention_heads=2,
        caption_projection_dim=16,
        joint_attention_dim=24,
        out_channels=4,
        pos_embed_max_size=256,
    )


def _auraflow_inputs(dtype=torch.float32, size=8):
    source = Source(dtype)
    return {
        "hidden_states": source.normal(2, 4, size, 8),
        "encoder_hidden_states": source.normal(2, 6, 24),
        "timestep": source.full(0.5, 2),
        "return_dict": False,
    }


def _cogview4() -> torch.nn.Module:
    return diffusers.CogView4Transformer2DModel(
        in_channels=4,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        text_embed_dim=8,
        time_embed_dim=8,
        condition_dim=4,
        sample_size=8,
        rope_axes_dim=(16, 16),
    )


def _cogview4_inputs(dtype=torch.float32, size=8):
    source = Source(dtype)
    return {
        "hidden_states": source.normal(2, 4, size, 8),
        "encoder_hidden_states": source.normal(2, 6, 8),
        "timestep": torch.tensor([500, 500]),
        "original_size": source.full(64.0, 2, 2),
        "target_size": source.full(64.0, 2, 2),
        "crop_coords": source.full(0.0, 2, 2),
        "return_dict": False,
    }


def _hidream() -> torch.nn.Module:
    return diffusers.HiDreamImageTransformer2DModel(
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=8,
        num_attention_heads=2,
        caption_channels=[16, 8],
        text_emb_dim=16,
        num_routed_experts=2,
        num_activated_experts=2,
        axes_dims_rope=(4, 2, 2),
        max_resolution=(16, 16),
        llama_layers=[0, 1],
    )


def _hidream_inputs(dtype=torch.float32, size=8):
    source = Source(dtype)
    return {
        "hidden_states": source.normal(2, 4, size, size),
        "timesteps": torch.tensor([500, 500]),
        "encoder_hidden_states_t5": source.normal(2, 6, 16),
        "encoder_hidden_states_llama3": source.normal(2, 2, 6, 8),
        "pooled_embeds": source.normal(2, 16),
        "return_dict": False,
    }


HEIGHT = {"hidden_states": (2,)}
SQUARE = {"hidden_states": (2, 3)}

MODELS = (
    ZooModel("flux", builder(_flux), _flux_inputs, (24, 32), True, {"hidden_states": (1,), "img_ids": (0,)}),
    ZooModel("flux2", builder(_flux2), _flux2_inputs, (24, 32), True, {"hidden_states": (1,), "img_ids": (1,)}),
    ZooModel(
        "chroma",
        builder(_chroma),
        _chroma_inputs,
        (24, 32),
        True,
        {"hidden_states": (1,), "img_ids": (0,), "attention_mask": (1,)},
    ),
    ZooModel(
        "qwen_image",
        builder(_qwen_image),
        _qwen_image_inputs,
        (4, 6),
        True,
        notes="img_shapes holds the size as Python ints, which specialise it.",
    ),
    ZooModel("sd3", builder(_sd3), _sd3_inputs, (8, 12), False, HEIGHT, notes="Block 0 has SD 3.5's second attention."),
    ZooModel("pixart", builder(_pixart), _pixart_inputs, (8, 12), False, HEIGHT),
    ZooModel("dit", builder(_dit), _dit_inputs, (8, 12), False, SQUARE, notes="Takes square latents only."),
    ZooModel(
        "lumina2",
        builder(_lumina2),
        _lumina2_inputs,
        (8, 12),
        False,
        graphs=4,
        notes="Breaks at the mask lengths (`.item()`), which also specialise the height.",
    ),
    ZooModel(
        "z_image",
        builder(_z_image),
        _z_image_inputs,
        (8, 12),
        True,
        {"x.0": (2,)},
        graphs=5,
        notes="Takes a list of images without a batch dim. The model makes its RoPE tables once, in float64.",
    ),
    ZooModel("sana", builder(_sana), _sana_inputs, (8, 12), False, HEIGHT),
    ZooModel("auraflow", builder(_auraflow), _auraflow_inputs, (8, 12), False, HEIGHT),
    ZooModel("cogview4", builder(_cogview4), _cogview4_inputs, (8, 12), False, HEIGHT),
    ZooModel(
        "hidream",
        builder(_hidream),
        _hidream_inputs,
        (8, 12),
        False,
        SQUARE,
        graphs=20,
        notes="Breaks at the experts (`.numpy()`), which share frames. Latents that are not square are padded.",
    ),
)
