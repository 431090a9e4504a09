"""The untrained parts of the example pipeline: tokenizers, text encoders, VAE, denoiser, scheduler.

All are stock classes of transformers and diffusers, so that saved parts load as an ordinary `FluxPipeline`.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import CLIPTextConfig, CLIPTextModel, PreTrainedTokenizerFast, T5Config, T5EncoderModel

from tritium.example.grammar import VOCABULARY, words

# The longest caption of the encoders; captions of the grammar are shorter.
TEXT = 32
WIDTH = 128
LATENT = 8
# The end token of CLIP must not have id 2: transformers would then pool at the highest id instead of at the end.
CLIP_SPECIALS = ["<pad>", "<unk>", "<bos>", "<eos>"]
T5_SPECIALS = ["<pad>", "</s>", "<unk>"]


def _word_tokenizer(specials: list[str], single: str, longest: int, **names: str) -> PreTrainedTokenizerFast:
    ids = {word: index for index, word in enumerate([*specials, *VOCABULARY])}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\W+"), behavior="removed")
    tokenizer.post_processor = processors.TemplateProcessing(
        single=single, special_tokens=[(word, ids[word]) for word in single.split() if word in ids]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_max_length=longest, padding_side="right", unk_token="<unk>", **names
    )


def tokenizers() -> tuple[PreTrainedTokenizerFast, PreTrainedTokenizerFast]:
    """Return the tokenizers of CLIP and of T5."""
    clip = _word_tokenizer(
        CLIP_SPECIALS, "<bos> $A <eos>", TEXT, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    )
    t5 = _word_tokenizer(T5_SPECIALS, "$A </s>", 512, pad_token="<pad>", eos_token="</s>")
    return clip, t5


class CaptionIds:
    """Convert captions to ids by table: the same result as the tokenizers, without their cost per call."""

    def __init__(self) -> None:
        self.clip = {word: index for index, word in enumerate([*CLIP_SPECIALS, *VOCABULARY])}
        self.t5 = {word: index for index, word in enumerate([*T5_SPECIALS, *VOCABULARY])}

    def __call__(self, captions: Sequence[str]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return CLIP's and T5's ids, both [captions, TEXT] and padded with 0."""
        clip, t5 = [], []
        for caption in captions:
            split = words(caption)
            clip.append(self._padded([2, *(self.clip[word] for word in split), 3]))
            t5.append(self._padded([*(self.t5[word] for word in split), 1]))
        return torch.tensor(clip, dtype=torch.int16), torch.tensor(t5, dtype=torch.int16)

    @staticmethod
    def _padded(ids: list[int]) -> list[int]:
        if len(ids) > TEXT:
            raise ValueError(f"a caption has {len(ids)} tokens; the encoders take {TEXT}")
        return ids + [0] * (TEXT - len(ids))


def build_vae() -> AutoencoderKL:
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(16, 32, 64, 64),
        layers_per_block=1,
        latent_channels=LATENT,
        norm_num_groups=8,
        scaling_factor=1.0,
        # If this is unset, FluxPipeline fails at decode.
        shift_factor=0.0,
        force_upcast=False,
        use_quant_conv=False,
        use_post_quant_conv=False,
        mid_block_add_attention=False,
    )


def build_text_encoders() -> tuple[CLIPTextModel, T5EncoderModel]:
    """Return the encoders: CLIP returns a vector per prompt; T5 one per token, with word order."""
    clip = CLIPTextModel(
        CLIPTextConfig(
            vocab_size=len(CLIP_SPECIALS) + len(VOCABULARY),
            hidden_size=WIDTH,
            intermediate_size=2 * WIDTH,
            projection_dim=WIDTH,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=TEXT,
            pad_token_id=0,
            bos_token_id=2,
            eos_token_id=3,
        )
    )
    t5 = T5EncoderModel(
        T5Config(
            vocab_size=len(T5_SPECIALS) + len(VOCABULARY),
            d_model=WIDTH,
            d_kv=WIDTH // 4,
            d_ff=2 * WIDTH,
            num_layers=3,
            num_heads=4,
            feed_forward_proj="gated-gelu",
            relative_attention_max_distance=TEXT,
            dropout_rate=0.0,
            pad_token_id=0,
            eos_token_id=1,
            decoder_start_token_id=0,
            tie_word_embeddings=False,
        )
    )
    return clip, t5


def build_denoiser() -> FluxTransformer2DModel:
    denoiser = FluxTransformer2DModel(
        in_channels=4 * LATENT,
        num_layers=2,
        num_single_layers=5,
        attention_head_dim=32,
        num_attention_heads=5,
        joint_attention_dim=WIDTH,
        pooled_projection_dim=WIDTH,
        guidance_embeds=False,
        axes_dims_rope=(8, 12, 12),
    )
    # Every block starts as the identity and the output as zero: high learning rates are stable from the first step.
    for name, module in denoiser.named_modules():
        if name == "proj_out" or name.endswith(("norm.linear", "norm1.linear", "norm1_context.linear")):
            torch.nn.init.zeros_(module.weight)
            torch.nn.init.zeros_(module.bias)
    return denoiser


def assemble(vae: Any, clip: Any, t5: Any, denoiser: Any, *, shift: float = 1.0) -> FluxPipeline:
    """Return the parts as one pipeline, in evaluation mode."""
    tokenizer, tokenizer_2 = tokenizers()
    for model in (vae, clip, t5, denoiser):
        model.eval()
    return FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=shift, use_dynamic_shifting=False),
        vae=vae,
        text_encoder=clip,
        tokenizer=tokenizer,
        text_encoder_2=t5,
        tokenizer_2=tokenizer_2,
        transformer=denoiser,
    )


def save(pipeline: FluxPipeline, folder: Path) -> None:
    """Replace the pipeline in `folder`; an interruption at any point leaves a complete one."""
    transformers.logging.disable_progress_bar()
    new, old = folder.with_name(folder.name + ".new"), folder.with_name(folder.name + ".old")
    shutil.rmtree(new, ignore_errors=True)
    pipeline.save_pretrained(new, safe_serialization=True)
    # transformers 4 has the tokenizers' class only under this name, transformers 5 under both.
    for path in [new / "model_index.json", *new.glob("tokenizer*/tokenizer_config.json")]:
        path.write_text(path.read_text().replace("TokenizersBackend", "PreTrainedTokenizerFast"))
    for path in new.glob("*/*.safetensors"):
        path.chmod(0o644)
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    new.rename(folder)
    shutil.rmtree(old, ignore_errors=True)
