"""One family: a stock class in two sizes, and the limits under which it is measured."""

from __future__ import annotations

from dataclasses import dataclass

from tritium.bench.transformers import Transformer

# A float64 run keeps all scores of attention in memory, which a GPU lacks for more tokens than this.
MOST_TOKENS_IN_FLOAT64 = 5000


@dataclass(frozen=True)
class Family(Transformer):
    """A workload of `tritium bench families`."""

    # Seconds after which the backend alone and `reduce-overhead` are cut.
    budget: float = 60.0
    # Also measure torch.compile with mode "reduce-overhead".
    reduce_overhead: bool = False
    # Tokens of the full size; 0 for a U-Net, whose longest attention is within the limit.
    tokens: int = 0

    @property
    def fits_float64(self) -> bool:
        return self.tokens <= MOST_TOKENS_IN_FLOAT64
