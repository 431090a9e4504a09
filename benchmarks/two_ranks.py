"""Check guidance, weights and tiles that two processes share on one GPU: their results against one process.

    python benchmarks/two_ranks.py

NCCL refuses two ranks on one GPU, so tensors are exchanged by gloo: times say nothing about speed. Split tokens have
`benchmarks/ulysses.py`.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import tritium
from tritium import Parallel, device
from tritium.fidelity import allowed, error, in_float64

RANKS = 2
STEPS = 4


def flux(where: str, dtype: torch.dtype) -> tuple[torch.nn.Module, dict[str, object]]:
    """Return a FLUX of few blocks and the arguments of a call, equal on all ranks."""
    from diffusers import FluxTransformer2DModel

    torch.manual_seed(0)
    model = FluxTransformer2DModel(
        in_channels=16,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=64,
        num_attention_heads=4,
        joint_attention_dim=64,
        pooled_projection_dim=64,
        axes_dims_rope=(16, 24, 24),
    )
    inputs: dict[str, object] = {
        "hidden_states": torch.randn(1, 255, 16).to(where, dtype),
        "encoder_hidden_states": torch.randn(1, 33, 64).to(where, dtype),
        "pooled_projections": torch.randn(1, 64).to(where, dtype),
        "timestep": torch.tensor([0.5]).to(where, dtype),
        "img_ids": torch.randn(255, 3).to(where),
        "txt_ids": torch.zeros(33, 3, device=where),
        "return_dict": False,
    }
    return model.eval().to(where, dtype), inputs


def plan(how: str, **degrees: object) -> tritium.Plan:
    config = tritium.CompilationConfig(engine="inductor" if device.default() == "cuda" else "eager")
    return tritium.Plan(
        parallel=Parallel(**{"vae": None, **degrees}), components={"model": how}, progress=False, config=config
    )


def weights(where: str, dtype: torch.dtype, how: str) -> str:
    model, inputs = flux(where, dtype)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    eager, exact = model(**inputs)[0], in_float64(model, (), inputs)[0]
    with tritium.optimize(model, plan(how, tensor=RANKS)):
        found, granted = error(model(**inputs)[0], exact), allowed(eager, exact)
        left = sum(parameter.nbytes for parameter in model.parameters())
    assert found <= granted, f"error {found:.2e}, allowed {granted:.2e}"
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    whole = sum(parameter.nbytes for parameter in model.parameters())
    return f"error {found:.2e}, one process {error(eager, exact):.2e}; {left / whole:.0%} of the weights on a rank"


def guidance(where: str, dtype: torch.dtype, how: str) -> str:
    """Generate with two calls a step; the images must be bit-equal to those of a plan without ranks."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    model, inputs = flux(where, dtype)
    scheduler, computed = FlowMatchEulerDiscreteScheduler(), []

    def generate() -> torch.Tensor:
        scheduler.set_timesteps(STEPS, device=where)
        latents = torch.as_tensor(inputs["hidden_states"])
        for time in scheduler.timesteps:
            texts = [torch.as_tensor(inputs["encoder_hidden_states"]) * scale for scale in (1.0, 0.3)]
            cond, uncond = (
                model(**{**inputs, "hidden_states": latents, "encoder_hidden_states": text})[0] for text in texts
            )
            latents = scheduler.step(uncond + 3.0 * (cond - uncond), time, latents, return_dict=False)[0].to(dtype)
        return latents

    alone = plan(how).with_(techniques=())
    with tritium.optimize(model, alone, scheduler=scheduler):
        expected = generate()
    handle = tritium.optimize(model, plan(how, cfg=RANKS), scheduler=scheduler)
    images = [generate(), generate()]
    computed.append(handle.part("model").technique_notes["parallel"].text)
    handle.remove()
    assert all(torch.equal(image, expected) for image in images), "images differ"
    return f"bit-equal; {computed[0].partition(';')[2].strip()}"


def tiles(where: str, dtype: torch.dtype, _how: str) -> str:
    from diffusers import AutoencoderKL

    torch.manual_seed(0)
    vae = AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        block_out_channels=(32, 64, 64),
        norm_num_groups=8,
    )
    vae = vae.eval().to(where, dtype)
    vae.enable_tiling()
    vae.tile_latent_min_size, vae.tile_sample_min_size = 32, 128
    latent = torch.randn(1, 4, 88, 72).to(where, dtype)
    expected = vae.decode(latent, return_dict=False)[0]
    with tritium.optimize(vae, plan("eager", cfg=RANKS, vae=RANKS)) as handle:
        images = [vae.decode(latent, return_dict=False)[0] for _ in range(2)]
        note = handle.part("model").technique_notes["parallel"].text
    assert all(torch.equal(image, expected) for image in images), "images differ"
    return f"bit-equal; {note.partition(';')[2].strip()}"


def run(rank: int, store: str, where: str) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if where == "cuda":
        torch.cuda.set_device(0)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    for dtype in (torch.float32, torch.bfloat16):
        for check, how in ((guidance, "eager"), (weights, "eager"), (tiles, "eager"), (weights, "tritium")):
            with torch.no_grad():
                words = check(where, dtype, how)
            if rank == 0:
                print(f"{check.__name__:8} {how:8} {str(dtype).removeprefix('torch.'):9} {words}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run, (str(Path(folder) / "store"), device.default()), nprocs=RANKS)


if __name__ == "__main__":
    main()
