"""Check tokens split between two processes that share one GPU: their results against one process.

    python benchmarks/ulysses.py --out h200-ulysses.json

NCCL refuses two ranks on one GPU, so tensors are exchanged through the host by gloo: times say nothing about speed.
"""

from __future__ import annotations

import argparse
import functools
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import tritium
from tritium import Parallel, compat, device
from tritium.bench.results import Results, Row
from tritium.fidelity import allowed, error, in_float64

RANKS = 2
# Odd lengths, and heads that do not divide by two ranks.
TOKENS, TEXT, HEADS, WIDTH = 1023, 77, 5, 64
VARIANTS: tuple[tuple[dict[str, Any], str], ...] = (
    ({"ulysses": 2, "exchange": "split"}, "eager"),
    ({"ulysses": 2, "exchange": "packed"}, "eager"),
    ({"ulysses": 2, "exchange": "chunks 2"}, "eager"),
    ({"gather": 2}, "eager"),
    ({"ring": 2}, "eager"),
    ({"ulysses": 2, "exchange": "packed"}, "tritium"),
)


def model_and_inputs(where: str, dtype: torch.dtype, tokens: int) -> tuple[torch.nn.Module, dict[str, Any]]:
    """Return a FLUX of few blocks and the arguments of a call, equal on all ranks."""
    from diffusers import FluxTransformer2DModel

    torch.manual_seed(0)
    model = FluxTransformer2DModel(
        in_channels=16,
        num_layers=2,
        num_single_layers=3,
        attention_head_dim=WIDTH,
        num_attention_heads=HEADS,
        joint_attention_dim=64,
        pooled_projection_dim=64,
        axes_dims_rope=(16, 24, 24),
    )
    inputs = {
        "hidden_states": torch.randn(2, tokens, 16),
        "encoder_hidden_states": torch.randn(2, TEXT, 64),
        "pooled_projections": torch.randn(2, 64),
        "guidance": torch.full((2,), 3.5) if model.config.guidance_embeds else None,
        "timestep": torch.tensor([0.5, 0.5]),
    }
    inputs = {name: None if value is None else value.to(where, dtype) for name, value in inputs.items()}
    inputs["img_ids"] = torch.randn(tokens, 3).to(where)
    inputs["txt_ids"] = torch.zeros(TEXT, 3, device=where)
    return model.eval().to(where, dtype), {**inputs, "return_dict": False}


def through_host() -> None:
    """Exchange copies in host memory: gloo's all-to-all of CUDA tensors ended in a segmentation fault on an H200."""
    for name in ("start_all_to_all", "start_all_gather"):
        setattr(compat.collectives, name, functools.partial(_copied, getattr(compat.collectives, name)))
    # The copy back has waited.
    compat.collectives.wait = lambda tensor: tensor


def _copied(start: Any, tensor: torch.Tensor, *arguments: Any) -> torch.Tensor:
    exchanged = torch.ops._c10d_functional.wait_tensor(start(tensor.cpu(), *arguments))
    return exchanged.to(tensor.device)


def check(where: str, dtype: torch.dtype, tokens: int, deadline: float) -> list[Row]:
    """Compare every variant with one process; return a row for each."""
    model, inputs = model_and_inputs(where, dtype, tokens)
    rows = []
    with torch.inference_mode():
        eager = model(**inputs)[0]
    exact = in_float64(model, (), inputs)[0]
    for degrees, how in VARIANTS:
        # Compiling takes longer than all the rest: once.
        if how == "tritium" and dtype != torch.bfloat16:
            continue
        # Ranks decide alike: each variant is a collective.
        late = torch.tensor([float(time.monotonic() > deadline)])
        dist.all_reduce(late)
        if float(late):
            break
        plan = tritium.Plan(techniques=(Parallel(**degrees, vae=None),), components={"model": how}, progress=False)
        start = time.perf_counter()
        with torch.inference_mode(), tritium.optimize(model, plan):
            found = model(**inputs)[0].clone()
            first = time.perf_counter() - start
            start = time.perf_counter()
            model(**inputs)
            if where == "cuda":
                torch.cuda.synchronize()
            again = (time.perf_counter() - start) * 1e3
        words = ", ".join(f"{name} {value}" for name, value in degrees.items())
        rows.append(_row(where, dtype, f"{words}, {how}", (found, eager, exact), (first, again), tokens))
    return rows


def _row(
    where: str,
    dtype: torch.dtype,
    variant: str,
    results: tuple[torch.Tensor, ...],
    seconds: tuple[float, float],
    tokens: int,
) -> Row:
    found, eager, exact = results
    first, again = seconds
    mine, granted = error(found, exact), allowed(eager, exact)
    shown = str(dtype).removeprefix("torch.")
    if dist.get_rank() == 0:
        ok = "ok" if mine <= granted else "WRONG"
        print(
            f"{variant:38} {shown:9} error {mine:.2e}, one process {error(eager, exact):.2e}, allowed {granted:.2e} {ok}",
            flush=True,
        )
    assert mine <= granted, f"{variant} in {shown}: error {mine:.2e}, allowed {granted:.2e}"
    return Row(
        workload="split tokens, two processes on one device",
        variant=variant,
        mode=None,
        dtype=shown,
        shrunk=where == "cpu",
        note=f"2 + 3 blocks of FLUX, {HEADS} heads, {tokens} + {TEXT} tokens; exchanged through the host: no speed",
        shapes={},
        median_ms=again,
        lower_quartile_ms=again,
        upper_quartile_ms=again,
        samples=1,
        ratio=None,
        first_call_s=first,
        first_call_cold=False,
        peak_memory_bytes=None,
        relative_l2=float((found.double() - eager.double()).norm() / eager.double().norm()),
        disturbed=None,
        error_f64=mine,
    )


def run(rank: int, store: str, out: str, where: str, tokens: int, seconds: float) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if where == "cuda":
        torch.cuda.set_device(0)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    if where == "cuda":
        through_host()
    deadline = time.monotonic() + seconds
    rows = [row for dtype in (torch.float32, torch.bfloat16) for row in check(where, dtype, tokens, deadline)]
    if rank == 0 and out:
        Results.now(rows, where).save(Path(out))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default="")
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--seconds", type=float, default=50.0, help="no variant begins later")
    given = parser.parse_args()
    where = device.default()
    tokens = given.tokens or (TOKENS if where == "cuda" else 33)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run, (str(Path(folder) / "store"), given.out, where, tokens, given.seconds), nprocs=RANKS)


if __name__ == "__main__":
    main()
