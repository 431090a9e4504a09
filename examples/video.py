"""Generate a video: a Wan pipeline with tiny random weights, so that it needs no download.

python examples/video.py
"""

from pathlib import Path

import torch
from diffusers import AutoencoderKLWan, FlowMatchEulerDiscreteScheduler, WanPipeline, WanTransformer3DModel

import tritium


def tiny_pipeline() -> WanPipeline:
    # A trained one: WanPipeline.from_pretrained("Wan-AI/Wan2.1-T2V-1.3B-Diffusers", torch_dtype=torch.bfloat16)
    torch.manual_seed(0)
    sizes = {"num_attention_heads": 2, "attention_head_dim": 12, "num_layers": 2, "ffn_dim": 32, "text_dim": 16}
    transformer = WanTransformer3DModel(**sizes, freq_dim=32, rope_max_seq_len=32).eval()
    scales = {"temperal_downsample": [True], "scale_factor_temporal": 2, "scale_factor_spatial": 2}
    vae = AutoencoderKLWan(base_dim=4, dim_mult=[1, 1], num_res_blocks=1, **scales).eval()
    return WanPipeline(None, None, vae, FlowMatchEulerDiscreteScheduler(), transformer)


def main(path: Path = Path("video.gif")) -> None:
    pipe = tiny_pipeline().to("cuda" if torch.cuda.is_available() else "cpu")
    prompt = {name: torch.randn(1, 8, 16) for name in ("prompt_embeds", "negative_prompt_embeds")}
    with tritium.optimize(pipe) as handle:
        video = pipe(**prompt, height=32, width=48, num_frames=3, num_inference_steps=2, output_type="pil")
        handle.summary()
    first, *others = video.frames[0]
    first.save(path, save_all=True, append_images=others, duration=125, loop=0)


if __name__ == "__main__":
    main()
