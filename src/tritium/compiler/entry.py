"""The entry point of `torch.compile(model, backend="tritium")`, configured by the environment."""

from tritium.compiler.backend import Backend

backend = Backend()
