"""Train the example pipeline from scratch: VAE, latents of many images, denoiser with text encoders.

    python training/train.py --out run --vae-seconds 150 --denoiser-seconds 360

Every stage has a time budget: the learning rate falls to zero at its end, on fast and slow machines. A checkpoint and a
loadable pipeline are written about once a minute; `--resume` continues from there.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import json
import math
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import FluxPipeline
from torch import nn

import parts
import score
from draw import draw, sample_scenes
from steps import (
    MAIN_LENGTH,
    MAIN_SIZE,
    CompileCheck,
    Denoising,
    Steps,
    adam,
    plain_attention,
    positions,
    set_rate,
    side_stream,
)
from tritium.example.grammar import Scene, caption

STARTED = time.monotonic()

# height, width: share of the cached images and of the denoiser's steps. 128 x 128 is the size of the default call.
BUCKETS = {
    (128, 128): 0.70,
    (96, 160): 0.05,
    (160, 96): 0.05,
    (128, 192): 0.05,
    (192, 128): 0.05,
    (192, 192): 0.05,
    (256, 256): 0.05,
}
# A 256 x 256 image costs the VAE four times as much, so it gets fewer of them.
VAE_BUCKETS = {(128, 128): 0.7, (96, 160): 0.07, (160, 96): 0.07, (192, 192): 0.08, (256, 256): 0.08}
# FluxPipeline pads T5's tokens to max_sequence_length without a mask, and the default is 512: training must include
# every amount of padding that occurs later.
LENGTHS = {32: 0.40, 64: 0.14, 128: 0.12, 256: 0.10, 512: 0.24}
# Most steps have one size and one length, which is compiled. The others teach other sizes and more padding, for which
# few steps are enough once images are correct.
MAIN_SHARE = 0.80
CAPTIONS = 4
NULL_SHARE = 0.1
UNSAID_BACKGROUND = 0.1
KL = 2e-4


@dataclass
class Clock:
    """The progress of a stage by elapsed time; `spent` is the time that earlier runs used."""

    name: str
    budget: float
    spent: float = 0.0

    def __post_init__(self) -> None:
        self.start = time.monotonic()
        self.logged = self.saved = self.start
        self.step = 0

    @property
    def elapsed(self) -> float:
        return self.spent + time.monotonic() - self.start

    @property
    def fraction(self) -> float:
        return min(1.0, self.elapsed / self.budget)

    def rate(self, peak: float, warmup: int = 200) -> float:
        """Return the current learning rate: warmed up by steps, cosine to zero by time."""
        return peak * min(1.0, (self.step + 1) / warmup) * 0.5 * (1 + math.cos(math.pi * self.fraction))

    def due_log(self, every: float = 5.0) -> bool:
        due = time.monotonic() - self.logged >= every
        if due:
            self.logged = time.monotonic()
        return due

    def due_save(self, every: float) -> bool:
        due = time.monotonic() - self.saved >= every
        if due:
            self.saved = time.monotonic()
        return due

    def log(self, loss: torch.Tensor, **more: float) -> None:
        value = float(loss.detach())
        told = " ".join(f"{name} {number:.4g}" for name, number in more.items())
        print(
            f"{self.name} {self.elapsed:.0f}/{self.budget:.0f} s step {self.step} loss {value:.4f} {told}", flush=True
        )
        if not math.isfinite(value):
            raise RuntimeError(f"{self.name}: the loss is {value} at step {self.step}")


def pick(shares: dict[Any, float], choose: random.Random) -> Any:
    return choose.choices(list(shares), weights=list(shares.values()))[0]


def autocast(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    if device.type == "cuda":
        return torch.autocast("cuda", dtype=torch.bfloat16)
    return contextlib.nullcontext()


def descend(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], loss: torch.Tensor, rate: float) -> None:
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    nn.utils.clip_grad_norm_(parameters, 1.0)
    set_rate(optimizer, rate)
    optimizer.step()


def write(state: dict[str, Any], path: Path) -> None:
    """Replace a checkpoint with a single rename, so that an interruption leaves the old one."""
    torch.save(state, path.with_suffix(".new"))
    path.with_suffix(".new").replace(path)


def vae_loss(vae: Any, truth: torch.Tensor) -> torch.Tensor:
    """Return the loss: pixels, edges, and a weak pull of the latents towards a unit normal."""
    posterior = vae.encode(truth).latent_dist
    mean, logvar = posterior.mean.float(), posterior.logvar.float()
    latent = mean + torch.exp(0.5 * logvar) * torch.randn_like(mean)
    again = vae.decode(latent).sample.float()
    error = again - truth
    edges = error.diff(dim=-1).abs().mean() + error.diff(dim=-2).abs().mean()
    kl = 0.5 * (mean.square() + logvar.exp() - 1 - logvar).mean()
    return error.abs().mean() + error.square().mean() + 0.5 * edges + KL * kl


def train_vae(vae: Any, options: argparse.Namespace, device: torch.device, *, decoder_only: bool = False) -> None:
    """Train in place. With `decoder_only` the latents stay equal, so a trained denoiser still fits."""
    name = "decoder" if decoder_only else "vae"
    path = options.out / f"{name}.pt"
    clock = Clock(name, options.decoder_seconds if decoder_only else options.vae_seconds)
    vae.to(device, memory_format=torch.channels_last).train()
    vae.requires_grad_(requires_grad=True)
    if decoder_only:
        vae.encoder.requires_grad_(requires_grad=False)
    parameters = [parameter for parameter in vae.parameters() if parameter.requires_grad]
    optimizer = adam(parameters, device)
    if options.resume and path.exists():
        state = torch.load(path, map_location=device)
        vae.load_state_dict(state["vae"])
        optimizer.load_state_dict(state["optimizer"])
        clock.spent, clock.step = state["elapsed"], state["step"]
    choose, generator = random.Random(clock.step), torch.Generator(device).manual_seed(clock.step)
    scenes_from = torch.Generator().manual_seed(1000 + clock.step)
    pool = sample_scenes(200_000 if device.type == "cuda" else 2_000, scenes_from).to(device)

    def save() -> None:
        state = {"vae": vae.state_dict(), "optimizer": optimizer.state_dict()}
        write(state | {"elapsed": clock.elapsed, "step": clock.step}, path)

    smooth = None
    while clock.fraction < 1:
        height, width = pick(VAE_BUCKETS, choose)
        batch = max(2, options.vae_batch * 128 * 128 // (height * width))
        rows = torch.randint(len(pool), (batch,), generator=generator, device=device)
        with torch.no_grad():
            truth = draw(pool[rows], height, width, generator) * 2 - 1
            truth = truth.contiguous(memory_format=torch.channels_last)
        with autocast(device):
            loss = vae_loss(vae, truth)
        rate = clock.rate(options.vae_rate * (0.3 if decoder_only else 1.0))
        descend(optimizer, parameters, loss, rate)
        smooth = loss.detach() if smooth is None else torch.lerp(smooth, loss.detach(), 0.02)
        clock.step += 1
        if clock.due_log():
            clock.log(smooth, rate=rate, batch=batch, size=height)
        if clock.due_save(options.save_seconds):
            save()
    if clock.spent < clock.budget:
        save()
        vae.eval()
        print("vae reconstructions read right:", json.dumps(score.ceiling(vae, max(8, options.prompts))), flush=True)


@dataclass
class Bucket:
    """Cached images of one size: packed latents [N, tokens, 4 * channels] and the ids of their captions."""

    size: tuple[int, int]
    latents: torch.Tensor
    clip_ids: torch.Tensor
    t5_ids: torch.Tensor
    positions: torch.Tensor


def pack(latents: torch.Tensor) -> torch.Tensor:
    """Pack [B, C, H, W] into one token per 2 x 2 square, [B, H * W / 4, 4 * C], in FluxPipeline's order."""
    batch, channels, height, width = latents.shape
    squares = latents.view(batch, channels, height // 2, 2, width // 2, 2)
    return squares.permute(0, 2, 4, 1, 3, 5).reshape(batch, height * width // 4, 4 * channels)


@torch.no_grad()
def normalise(vae: Any, device: torch.device, count: int) -> None:
    """Measure the latents, and write scale and shift into the VAE's configuration for the pipeline."""
    scenes = sample_scenes(count, torch.Generator().manual_seed(2)).to(device)
    drawn = draw(scenes, 128, 128, torch.Generator(device).manual_seed(2)) * 2 - 1
    latents = torch.cat([vae.encode(chunk).latent_dist.mean for chunk in drawn.split(64)])
    vae.register_to_config(scaling_factor=1.0 / float(latents.std()), shift_factor=float(latents.mean()))
    channels = latents.float().std(dim=(0, 2, 3)).tolist()
    print(f"scaling_factor {vae.config.scaling_factor:.4f} shift_factor {vae.config.shift_factor:.4f}")
    print("std by channel:", " ".join(f"{value:.2f}" for value in channels), flush=True)


def chunks(shares: dict[tuple[int, int], float], total: int, size: int) -> Iterator[tuple[tuple[int, int], int]]:
    """Yield sizes with counts to cache, in an order that keeps the shares if it is stopped early."""
    rounds = max(1, total // size)
    for _ in range(rounds):
        for sides, share in shares.items():
            yield sides, max(1, round(size * share))


@torch.no_grad()
def cache_latents(vae: Any, options: argparse.Namespace, device: torch.device) -> list[Bucket]:
    """Render, encode and caption images until there are enough or the time is over."""
    clock = Clock("latents", options.latent_seconds)
    choose, ids = random.Random(options.seed), parts.CaptionIds()
    scenes_from = torch.Generator().manual_seed(options.seed + 10)
    generator = torch.Generator(device).manual_seed(options.seed + 10)
    found: dict[tuple[int, int], list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]] = {}
    for sides, count in chunks(BUCKETS, options.pictures, min(4096, options.pictures)):
        if sides == (128, 128) and found and clock.fraction >= 1:
            break
        scenes = sample_scenes(count, scenes_from)
        said = [
            caption(Scene(*row), choose, background=choose.random() >= UNSAID_BACKGROUND)
            for row in scenes.tolist()
            for _ in range(CAPTIONS)
        ]
        clip_ids, t5_ids = (table.view(count, CAPTIONS, parts.TEXT).to(device) for table in ids(said))
        latents = []
        for part in scenes.to(device).split(max(1, 512 * 128 * 128 // (sides[0] * sides[1]))):
            drawn = draw(part, *sides, generator) * 2 - 1
            with autocast(device):
                mean = vae.encode(drawn.contiguous(memory_format=torch.channels_last)).latent_dist.mean
            latents.append((mean.float() - vae.config.shift_factor) * vae.config.scaling_factor)
        packed = pack(torch.cat(latents)).to(torch.bfloat16)
        found.setdefault(sides, []).append((packed, clip_ids, t5_ids))
    buckets = [
        Bucket((h, w), *(torch.cat(column) for column in zip(*chunk, strict=True)), positions(h // 16, w // 16, device))
        for (h, w), chunk in found.items()
    ]
    sizes = {f"{h}x{w}": len(bucket.latents) for (h, w), bucket in zip(found, buckets, strict=True)}
    print(f"latents {clock.elapsed:.0f} s: {json.dumps(sizes)}", flush=True)
    return buckets


def sample_batch(bucket: Bucket, length: int, count: int, null: tuple[torch.Tensor, torch.Tensor]) -> Any:
    """Return random latents of a bucket, each with a caption or the empty one; pad T5's ids to `length`."""
    device = bucket.latents.device
    rows = torch.randint(len(bucket.latents), (count,), device=device)
    which = torch.randint(CAPTIONS, (count,), device=device)
    empty = (torch.rand(count, device=device) < NULL_SHARE)[:, None]
    clip_ids = torch.where(empty, null[0], bucket.clip_ids[rows, which]).long()
    t5_ids = torch.where(empty, null[1], bucket.t5_ids[rows, which]).long()
    t5_ids = nn.functional.pad(t5_ids, (0, length - parts.TEXT), value=0)
    return bucket.latents[rows].float(), clip_ids, t5_ids, bucket.positions


def pick_shape(buckets: list[Bucket], choose: random.Random, *, is_main: bool) -> tuple[Bucket, int]:
    """Return an image size and a text length for one step."""
    if is_main:
        return buckets[list(BUCKETS).index(MAIN_SIZE)], MAIN_LENGTH
    return buckets[pick(dict(enumerate(BUCKETS.values())), choose)], pick(LENGTHS, choose)


def train_denoiser(
    model: Denoising,
    vae: Any,
    buckets: list[Bucket],
    options: argparse.Namespace,
    device: torch.device,
    check: CompileCheck | None = None,
) -> FluxPipeline:
    """Train denoiser and text encoders together; return the pipeline with their averaged weights."""
    path = options.out / "denoiser.pt"
    budget = options.denoiser_seconds
    if options.deadline_seconds:
        budget = min(budget, options.deadline_seconds - options.score_seconds - (time.monotonic() - STARTED))
    clock = Clock("denoiser", budget)
    model.to(device).train()
    averaged = copy.deepcopy(model).requires_grad_(requires_grad=False)
    steps = Steps(model, averaged, device)
    if options.resume and path.exists():
        state = torch.load(path, map_location=device)
        model.load_state_dict(state["model"])
        averaged.load_state_dict(state["averaged"])
        steps.optimizer.load_state_dict(state["optimizer"])
        clock.spent, clock.step = state["elapsed"], state["step"]
    steps.halves.refresh()
    quick = None
    if check is not None and check.passed():
        plain_attention()
        quick = torch.compile(steps.halves.model.denoiser, dynamic=False)
    pipeline = parts.assemble(vae, averaged.clip, averaged.t5, averaged.denoiser, shift=options.shift)

    def save() -> None:
        state = {"model": model.state_dict(), "averaged": averaged.state_dict()}
        state["optimizer"] = steps.optimizer.state_dict()
        write(state | {"elapsed": clock.elapsed, "step": clock.step}, path)
        parts.save(pipeline, options.out / "pipeline")

    choose = random.Random(clock.step)
    clip_ids, t5_ids = parts.CaptionIds()([""])
    null = clip_ids.to(device), t5_ids.to(device)
    seen = 0
    while clock.fraction < 1:
        is_main = choose.random() < MAIN_SHARE
        bucket, length = pick_shape(buckets, choose, is_main=is_main)
        count = max(2, options.tokens // (len(bucket.positions) + length))
        rate = clock.rate(options.denoiser_rate)
        batch = functools.partial(sample_batch, bucket, length, count, null)
        steps((is_main, *bucket.size, length), batch, rate, quick if is_main else None)
        clock.step += 1
        seen += count
        if clock.due_log():
            clock.log(steps.loss, rate=rate, text=length, tokens=len(bucket.positions), thousand_seen=seen / 1e3)
        if clock.due_save(options.save_seconds):
            save()
            if options.probe:
                progress(pipeline, options.probe)
    save()
    return pipeline


def progress(pipeline: FluxPipeline, count: int) -> None:
    """Generate a few images with the averaged weights and print their scores."""
    scenes, prompts = score.unseen(count)
    drawn = score.pictures(pipeline, prompts, 128, 128, 8)
    print("held-out prompts:", json.dumps(score.means(score.check(drawn, scenes))), flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=Path, required=True, help="checkpoints, and the pipeline in a folder of that name"
    )
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoints in --out")
    parser.add_argument("--start", type=Path, help="take all weights from this saved pipeline first")
    parser.add_argument("--vae-seconds", type=float, default=150, help="0 leaves the VAE as it is")
    parser.add_argument("--decoder-seconds", type=float, default=0, help="train the VAE's decoder alone for that long")
    parser.add_argument("--latent-seconds", type=float, default=40)
    parser.add_argument("--denoiser-seconds", type=float, default=360)
    parser.add_argument("--deadline-seconds", type=float, default=0, help="shorten the last stage to end by then")
    parser.add_argument("--score-seconds", type=float, default=30, help="what the deadline keeps for the scores")
    parser.add_argument("--save-seconds", type=float, default=60)
    parser.add_argument("--pictures", type=int, default=240_000, help="how many latents to cache, at most")
    parser.add_argument("--vae-batch", type=int, default=160, help="pictures a step at 128 x 128")
    parser.add_argument("--tokens", type=int, default=49_152, help="text and picture tokens a step")
    parser.add_argument("--vae-rate", type=float, default=1e-3)
    parser.add_argument("--denoiser-rate", type=float, default=1e-3)
    parser.add_argument("--shift", type=float, default=1.0, help="the scheduler's")
    parser.add_argument("--prompts", type=int, default=128, help="held-out prompts to score; 0 scores nothing")
    parser.add_argument("--probe", type=int, default=64, help="held-out prompts to score at each save; 0 for none")
    parser.add_argument("--compile", action="store_true", help="compile the denoiser for the main size, if that works")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    options = arguments()
    options.out.mkdir(parents=True, exist_ok=True)
    device = torch.device(options.device)
    torch.manual_seed(options.seed)
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.benchmark = True
    if options.start:
        old = FluxPipeline.from_pretrained(options.start, local_files_only=True)
        vae, model = old.vae, Denoising(old.text_encoder, old.text_encoder_2, old.transformer)
    else:
        vae, model = parts.build_vae(), Denoising(*parts.build_text_encoders(), parts.build_denoiser())
    sizes = {"vae": vae, "clip": model.clip, "t5": model.t5, "denoiser": model.denoiser}
    counts = {name: sum(p.numel() for p in part.parameters()) for name, part in sizes.items()}
    print(f"parameters {json.dumps(counts)}; {sum(counts.values()) * 4 / 1e6:.1f} MB on {device}", flush=True)

    check = CompileCheck(options.device, options.tokens) if options.compile else None
    if options.vae_seconds:
        train_vae(vae, options, device)
    if options.decoder_seconds:
        train_vae(vae, options, device, decoder_only=True)
    vae.to(device).eval().requires_grad_(requires_grad=False)
    # A trained denoiser depends on the latent scale that it was trained with.
    if options.vae_seconds or not options.start:
        normalise(vae, device, 1024 if device.type == "cuda" else 64)
    buckets = cache_latents(vae, options, device)
    with side_stream(device):
        pipeline = train_denoiser(model, vae, buckets, options, device, check)
    finish(pipeline, options)


def finish(pipeline: FluxPipeline, options: argparse.Namespace) -> None:
    """Write the scores and a contact sheet of the saved pipeline."""
    if not options.prompts:
        return
    started = time.monotonic()
    scenes, prompts = score.unseen(options.prompts)
    score.sheet(score.pictures(pipeline, prompts[:24], 128, 128, 28), 8, options.out / "sheet.png")
    scores = score.score(pipeline, options.prompts)
    for name, values in scores.items():
        print(f"{name:30}", *(f"{key} {value:.3f}" for key, value in values.items()))
    for shift in (2.0, 3.0):
        pipeline.scheduler = type(pipeline.scheduler).from_config(pipeline.scheduler.config, shift=shift)
        drawn = score.pictures(pipeline, prompts, 128, 128, 8)
        scores[f"128 length 512 steps 8 shift {shift:g}"] = score.means(score.check(drawn, scenes))
    took = {"score_seconds": round(time.monotonic() - started, 1), "seconds": round(time.monotonic() - STARTED, 1)}
    told = json.dumps({"prompts": options.prompts, **took, "scores": scores})
    (options.out / "scores.json").write_text(told + "\n")
    print(told, flush=True)


if __name__ == "__main__":
    main()
