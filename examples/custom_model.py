"""Compile a model of yours, and read what was done.

python examples/custom_model.py
"""

import torch
from torch import nn

import tritium


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.RMSNorm(width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return x + gate * nn.functional.gelu(self.linear(self.norm(x)))


def main() -> tritium.Report:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = Block(64).to(device)
    compiled = torch.compile(model, backend="tritium")  # mode, options, dynamic and fullgraph work as usual
    x, gate = torch.randn(2, 128, 64, device=device), torch.randn(2, 1, 64, device=device)
    with torch.inference_mode():
        torch.testing.assert_close(compiled(x, gate), model(x, gate))
        compiled(x[:, :100], gate)  # another length: compiled again, and the report names the argument
    report = tritium.explain(compiled)
    for family, sites in report.sites.items():
        print(f"{family}: {sites.fused} fused, {sites.inductor} left to Inductor, {sites.declined} declined")
    for recompile in report.to_dict()["recompiles"]:
        print(f"recompiled because {recompile['argument']} changed: {recompile['was']} -> {recompile['now']}")
    return report


if __name__ == "__main__":
    main()
