"""Make something of a catalogue wrong for a while."""

from __future__ import annotations

import contextlib

from tritium import fusions, ops


@contextlib.contextmanager
def changed(value, **fields):
    """A frozen value with other fields; everyone who holds it sees them."""
    before = {name: getattr(value, name) for name in fields}
    try:
        for name, other in fields.items():
            object.__setattr__(value, name, other)
        yield
    finally:
        for name, own in before.items():
            object.__setattr__(value, name, own)


def wrong_provider(op: str, run):
    """The provider `triton` of an op, on any device, with another result: `run(reference's result, *arguments)`."""
    catalogued = ops.catalog()[op]

    def compute(given):
        return run(catalogued.reference(**vars(given)), *vars(given).values())

    return changed(ops.providers(catalogued)["triton"], run=compute, decline=lambda given: None)


def wrong_fusion(name: str, **arguments):
    """A fusion that hands other arguments to its op than the model has."""
    fusion = fusions.catalog()[name]
    before = fusion.arguments

    def given(match):
        own = before(match) if before is not None else {**match.bindings, "out_dtype": match.out.dtype}
        return {**own, **arguments}

    return changed(fusion, arguments=given)
