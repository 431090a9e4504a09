"""One training step of the denoiser with the text encoders, and a check whether it can be compiled.

    python training/steps.py --device cuda --tokens 49152

runs a few compiled steps and prints the time of one.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import math
import subprocess
import sys
import time
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import nn

import parts

# Most steps have this image size and text length; only these are compiled.
MAIN_SIZE, MAIN_LENGTH = (128, 128), 32

# The centre of the noise levels, as a logit: at 0, noise and image have equal shares.
EARLY = 0.4

# The decay of the averaged weights, which are the saved ones.
EMA = 0.999

# Seconds after which compiling is given up.
PATIENCE = 200


def adam(parameters: list[nn.Parameter], device: torch.device) -> torch.optim.AdamW:
    """Return AdamW; on a GPU its learning rate is a device tensor, read by captured steps on each replay."""
    if device.type != "cuda":
        return torch.optim.AdamW(parameters, betas=(0.9, 0.95), weight_decay=0.01)
    rate = torch.zeros((), device=device)
    return torch.optim.AdamW(parameters, lr=rate, betas=(0.9, 0.95), weight_decay=0.01, fused=True, capturable=True)


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def positions(height: int, width: int, device: torch.device) -> torch.Tensor:
    """Return row and column of each token, [tokens, 3]; the first column is zero, as in FluxPipeline."""
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    return torch.stack([torch.zeros_like(rows), rows, columns], -1).view(-1, 3).float().to(device)


class Denoising(nn.Module):
    """The three models that are trained together, and the loss of one step."""

    def __init__(self, clip: Any, t5: Any, denoiser: Any) -> None:
        super().__init__()
        self.clip, self.t5, self.denoiser = clip, t5, denoiser

    def forward(
        self, latents: torch.Tensor, clip_ids: torch.Tensor, t5_ids: torch.Tensor, at: torch.Tensor, denoise: Any = None
    ) -> torch.Tensor:
        noise = torch.randn_like(latents)
        # Half of the times are where the image takes form, half anywhere, so that the first of few steps is good too.
        # The composition is decided early, while there is still more noise than image.
        middle = torch.sigmoid(torch.randn(len(latents), device=latents.device) + EARLY)
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
    """Weights in float32 for the optimizer, and on a GPU a bfloat16 copy for the computation."""

    def __init__(self, model: Denoising, device: torch.device) -> None:
        self.masters = list(model.parameters())
        self.model = copy.deepcopy(model).to(torch.bfloat16) if device.type == "cuda" else model
        self.copies = list(self.model.parameters())
        self._separate = self.model is not model

    def refresh(self) -> None:
        if self._separate:
            with torch.no_grad():
                torch._foreach_copy_(self.copies, self.masters)

    def descend(self, optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
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
        optimizer.step()
        self.refresh()


class Steps:
    """Run whole steps: batch, loss, gradients, weights, averaged weights.

    A step of such a small model is a few thousand small kernels, which take longer to launch than to run. So on a GPU,
    the step of each shape is captured at its second use and replayed afterwards. If a capture fails, a message is
    printed and steps continue without captures.
    """

    def __init__(self, model: Denoising, averaged: nn.Module, device: torch.device) -> None:
        self.halves, self.optimizer = Halves(model, device), adam(list(model.parameters()), device)
        self.loss = torch.ones((), device=device)
        self._averages, self._device = list(averaged.parameters()), device
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph | None] = {}
        self._captures = device.type == "cuda"
        self._pool: Any = None

    def __call__(self, key: Hashable, batch: Callable[[], Any], rate: float, denoise: Any = None) -> None:
        """Run one step on the result of `batch` with shape `key`; `loss` is a running mean of the losses."""
        set_rate(self.optimizer, rate)
        graph = self._graphs.get(key)
        if graph is None and key in self._graphs and self._captures:
            graph = self._graphs[key] = self._capture(key, batch, denoise)
        self._graphs.setdefault(key, None)
        if graph is not None:
            graph.replay()
        else:
            self._step(batch, denoise)

    def _step(self, batch: Callable[[], Any], denoise: Any) -> None:
        loss = self.halves.model(*batch(), denoise=denoise)
        self.halves.descend(self.optimizer, loss)
        with torch.no_grad():
            torch._foreach_lerp_(self._averages, self.halves.masters, 1 - EMA)
            self.loss.lerp_(loss.detach(), 0.02)

    def _capture(self, key: Hashable, batch: Callable[[], Any], denoise: Any) -> torch.cuda.CUDAGraph | None:
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self._pool, stream=torch.cuda.current_stream()):
                self._step(batch, denoise)
        except RuntimeError as error:
            print(f"steps of {key} cannot be captured and are run kernel by kernel: {error}", flush=True)
            self._captures = False
            return None
        self._pool = graph.pool()
        return graph


def plain_attention() -> None:
    """Use attention as two products and a softmax, which can be fused; for about 100 tokens it is as fast."""
    torch.backends.cuda.enable_flash_sdp(enabled=False)
    torch.backends.cuda.enable_mem_efficient_sdp(enabled=False)
    torch.backends.cuda.enable_cudnn_sdp(enabled=False)


class CompileCheck:
    """Run compiled steps in a child process: a kernel that reads out of bounds crashes only the child.

    torch 2.11 generated such a kernel from flash attention's backward pass for heads of 32.
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


def side_stream(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Return a stream that can be captured; the whole training run uses it."""
    if device.type != "cuda":
        return contextlib.nullcontext()
    torch.cuda.synchronize()
    return torch.cuda.stream(torch.cuda.Stream(device))


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def check(device: torch.device, tokens_a_step: int) -> None:
    """Run a few compiled steps of the main size on noise, and print the time of one."""
    plain_attention()
    model = Denoising(*parts.build_text_encoders(), parts.build_denoiser()).to(device).train()
    steps = Steps(model, copy.deepcopy(model).requires_grad_(requires_grad=False), device)
    quick = torch.compile(steps.halves.model.denoiser, dynamic=False)
    tokens = MAIN_SIZE[0] * MAIN_SIZE[1] // 256
    count = max(2, tokens_a_step // (tokens + MAIN_LENGTH))
    ids = torch.ones(count, parts.TEXT, dtype=torch.long, device=device)
    at = positions(MAIN_SIZE[0] // 16, MAIN_SIZE[1] // 16, device)

    def batch() -> Any:
        return torch.randn(count, tokens, 4 * parts.LATENT, device=device), ids.clamp(max=3), ids, at

    with side_stream(device):
        for step in range(14):
            if step == 4:
                synchronize(device)
                start = time.monotonic()
            steps("main", batch, 1e-4, quick)
        synchronize(device)
    if not math.isfinite(float(steps.loss)):
        raise RuntimeError(f"the loss is {float(steps.loss)}")
    print(f"{(time.monotonic() - start) * 100:.1f} ms a step of {count}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tokens", type=int, default=49_152)
    options = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    check(torch.device(options.device), options.tokens)
