"""Whole pipelines of stock classes, tiny and with random weights."""

from __future__ import annotations

import functools

import diffusers
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import CLIPTextConfig, CLIPTextModel, PreTrainedTokenizerFast, T5Config, T5EncoderModel

from support import small_vaes

WORDS = ["a", "red", "blue", "circle", "square", "above"]
WIDTH = 16


def word_tokenizer(specials: list[str], template: str, **names: str) -> PreTrainedTokenizerFast:
    vocabulary = {word: place for place, word in enumerate(specials + WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = [(word, vocabulary[word]) for word in template.split() if word in vocabulary]
    tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=special)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=16, padding_side="right", **names)


def autoencoder() -> diffusers.AutoencoderKL:
    return small_vaes.kl(
        scaling_factor=1.0,
        shift_factor=0.0,
        use_quant_conv=False,
        use_post_quant_conv=False,
        mid_block_add_attention=False,
    )


def flux(double: int = 2, single: int = 2) -> diffusers.FluxPipeline:
    """A FLUX pipeline that draws 2 * 2 * 8 pixels a side in a fraction of a second."""
    torch.manual_seed(0)
    clip_words = word_tokenizer(
        ["<pad>", "<unk>", "<bos>", "<eos>"],
        "<bos> $A <eos>",
        unk_token="<unk>",
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
    )
    t5_words = word_tokenizer(
        ["<pad>", "</s>", "<unk>"], "$A </s>", unk_token="<unk>", pad_token="<pad>", eos_token="</s>"
    )
    clip = CLIPTextConfig(
        vocab_size=len(clip_words),
        hidden_size=WIDTH,
        intermediate_size=32,
        projection_dim=WIDTH,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=16,
        bos_token_id=2,
        eos_token_id=3,
        pad_token_id=0,
    )
    t5 = T5Config(
        vocab_size=len(t5_words),
        d_model=WIDTH,
        d_kv=8,
        d_ff=32,
        num_layers=2,
        num_heads=2,
        feed_forward_proj="gated-gelu",
        dropout_rate=0.0,
        pad_token_id=0,
        eos_token_id=1,
        decoder_start_token_id=0,
        tie_word_embeddings=False,
    )
    transformer = diffusers.FluxTransformer2DModel(
        in_channels=16,
        num_layers=double,
        num_single_layers=single,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=WIDTH,
        pooled_projection_dim=WIDTH,
        guidance_embeds=False,
        axes_dims_rope=(4, 6, 6),
    )
    pipe = diffusers.FluxPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=1.0),
        vae=autoencoder(),
        text_encoder=CLIPTextModel(clip),
        tokenizer=clip_words,
        text_encoder_2=T5EncoderModel(t5),
        tokenizer_2=t5_words,
        transformer=transformer,
    )
    for component in pipe.components.values():
        if isinstance(component, torch.nn.Module):
            component.eval().requires_grad_(requires_grad=False)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def generate(pipe: diffusers.FluxPipeline, *, height: int = 32, width: int = 32, steps: int = 2, seed: int = 0):
    """A image as a tensor of floats."""
    generator = torch.Generator().manual_seed(seed)
    call = functools.partial(pipe, "a red circle", max_sequence_length=16, output_type="pt", generator=generator)
    return call(height=height, width=width, num_inference_steps=steps).images


def guided(pipe, steps: int = 2) -> torch.Tensor:
    """A image by true guidance: two calls of the denoiser a step."""
    return pipe(
        "a red circle",
        negative_prompt="a blue square",
        true_cfg_scale=3.0,
        height=32,
        width=32,
        num_inference_steps=steps,
        max_sequence_length=16,
        output_type="pt",
        generator=torch.Generator().manual_seed(0),
    ).images
