"""Choose attention kernels by measuring: candidates, the winner, and a call in a compiled function.

python examples/attention.py
"""

from __future__ import annotations

import torch

import tritium
from tritium.layers.attention import choice


def main() -> list[str]:
    where = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if where == "cuda" else torch.float32
    query, key, value = (torch.randn(1, 512, 8, 64, device=where, dtype=dtype) for _ in range(3))
    with torch.inference_mode():
        plain = tritium.attention_forward(query, key, value)
        causal = tritium.attention_forward(query, key, value, is_causal=True)
        # The compiled graph contains the chosen kernel, without a further choice at run time.
        compiled = torch.compile(tritium.attention_forward, backend="aot_eager", fullgraph=True)
        assert torch.allclose(compiled(query, key, value), plain, atol=1e-2)
    assert not torch.equal(plain, causal)
    lines = []
    for row in choice.choices():
        times = ", ".join(f"{name} {ms:.3f} ms" for name, ms in sorted(row.ms.items(), key=lambda pair: pair[1]))
        lines.append(f"{row.winner} won: {times}")
        lines += [f"  {name} did not take part: {reason}" for name, reason in row.dropped.items()]
    print("\n".join(lines))
    return lines


if __name__ == "__main__":
    main()
