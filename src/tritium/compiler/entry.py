"""What `torch.compile(model, backend="tritium")` finds through the entry point: a backend configured by the environment."""

from tritium.compiler.backend import Backend

backend = Backend()
