"""One step of training the denoiser with the text encoders, and whether it can be compiled on this machine.

    python training/steps.py --device cuda --tokens 49152

tries a few compiled steps and prints how long one takes.
"""

from __future__ import annotations

import argparse
import copy
import math
import subprocess
import sys
import time
from typing import Any

import torch
from torch import nn

import parts

# Most steps are on this size and this length of text; it is what is compiled.
MAIN_SIZE, MAIN_LENGTH = (128, 128), 32

# Seconds that compiling may take before it is given up.
PATIENCE = 200


def adam(parameters: list[nn.Parameter], device: torch.device) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, betas=(0.9, 0.95), weight_decay=0.01, fused=device.type == "cuda")


def positions(height: int, width: int, device: torch.device) -> torch.Tensor:
    """Row and column of each token, [tokens, 3]; the first column is FluxPipeline's and always zero."""
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    return torch.stack([torch.zeros_like(rows), rows, columns], -1).view(-1, 3).float().to(device)


class Denoising(nn.Module):
    """The three models that are trained together, and one step of their loss."""

    def __init__(self, clip: Any, t5: Any, denoiser: Any) -> None:
        super().__init__()
        self.clip, self.t5, self.denoiser = clip, t5, denoiser

    def forward(
        self, latents: torch.Tensor, clip_ids: torch.Tensor, t5_ids: torch.Tensor, at: torch.Tensor, denoise: Any = None
    ) -> torch.Tensor:
        noise = torch.randn_like(latents)
        # Half of the times where the picture takes form, half anywhere, so that the first of few steps is good too.
        middle = torch.sigmoid(torch.randn(len(latents), device=latents.device))
        evenly = torch.rand_like(middle)
        time_ = torch.where(torch.rand_like(middle) < 0.5, middle, evenly)
        mixed = torch.lerp(latents, noise, time_[:, None, None])
        tokens = self.t5(t5_ids)[0]
        pooled = self.clip(clip_ids).pooler_output
        velocity = (self.denoiser if denoise is None else denoise)(
            hidden_states=mixed.to(tokens.dtype),
            timestep=time_,
            encoder_hidden_states=tokens,
            pooled_projections=pooled,
            txt_ids=at.new_zeros(t5_ids.shape[1], 3),
            img_ids=at,
            return_dict=False,
        )[0]
        return (velocity.float() - (noise - latents)).square().mean()


class Halves:
    """Weights in float32 that the optimizer moves, and on a GPU the bfloat16 copy of them that computes."""

    def __init__(self, model: Denoising, device: torch.device) -> None:
        self.masters = list(model.parameters())
        self.model = copy.deepcopy(model).to(torch.bfloat16) if device.type == "cuda" else model
        self.copies = list(self.model.parameters())
        self._separate = self.model is not model

    def refresh(self) -> None:
        if self._separate:
            with torch.no_grad():
                torch._foreach_copy_(self.copies, self.masters)

    def descend(self, optimizer: torch.optim.Optimizer, loss: torch.Tensor, rate: float) -> None:
        for copied in self.copies:
            copied.grad = None
        loss.backward()
        if self._separate:
            for master, copied in zip(self.masters, self.copies, strict=True):
                if master.grad is None and copied.grad is not None:
                    master.grad = torch.empty_like(master)
            moved = [(m.grad, c.grad) for m, c in zip(self.masters, self.copies, strict=True) if c.grad is not None]
            torch._foreach_copy_(*map(list, zip(*moved, strict=True)))
        nn.utils.clip_grad_norm_(self.masters, 1.0)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        self.refresh()


def plain_attention() -> None:
    """Attention as two products and a softmax, which the compiler can fuse; at about a hundred tokens nothing is lost."""
    torch.backends.cuda.enable_flash_sdp(enabled=False)
    torch.backends.cuda.enable_mem_efficient_sdp(enabled=False)
    torch.backends.cuda.enable_cudnn_sdp(enabled=False)


class CompileCheck:
    """Tries compiled steps in a process of its own, beside this one: a kernel that reads out of bounds takes its process
    along. torch 2.11 made one of flash attention's backward pass for heads of 32.
    """

    def __init__(self, device: str, tokens: int) -> None:
        order = [sys.executable, __file__, "--device", device, "--tokens", str(tokens)]
        self._child = subprocess.Popen(order, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def passed(self) -> bool:
        try:
            printed, _ = self._child.communicate(timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            self._child.kill()
            print("compiled steps took too long to compile: steps are not compiled", flush=True)
            return False
        last = printed.strip().splitlines()[-1:]
        print(f"compiled steps: exit status {self._child.returncode}, {' '.join(last)}", flush=True)
        return self._child.returncode == 0


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def check(device: torch.device, tokens_a_step: int) -> None:
    """A few steps of the main size on noise, compiled, and how long one takes."""
    plain_attention()
    model = Denoising(*parts.build_text_encoders(), parts.build_denoiser()).to(device).train()
    halves, optimizer = Halves(model, device), adam(list(model.parameters()), device)
    quick = torch.compile(halves.model.denoiser, dynamic=False)
    tokens = MAIN_SIZE[0] * MAIN_SIZE[1] // 256
    count = max(2, tokens_a_step // (tokens + MAIN_LENGTH))
    ids = torch.ones(count, parts.TEXT, dtype=torch.long, device=device)
    at = positions(MAIN_SIZE[0] // 16, MAIN_SIZE[1] // 16, device)
    for step in range(12):
        if step == 2:
            synchronize(device)
            start = time.monotonic()
        latents = torch.randn(count, tokens, 4 * parts.LATENT, device=device)
        loss = halves.model(latents, ids.clamp(max=3), ids, at, denoise=quick)
        halves.descend(optimizer, loss, 1e-4)
    synchronize(device)
    if not math.isfinite(float(loss)):
        raise RuntimeError(f"the loss is {float(loss)}")
    print(f"{(time.monotonic() - start) * 100:.1f} ms a step of {count}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tokens", type=int, default=49_152)
    options = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    check(torch.device(options.device), options.tokens)
