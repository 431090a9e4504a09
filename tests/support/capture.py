"""Regions around plain functions: what Dynamo cannot put into a graph is tested with them."""

import torch

import tritium
from tritium import Backend, CompilationConfig
from tritium.compiler.capture import Region, Spec
from tritium.report.records import GraphRecord


def compiled(function, config, **kwargs):
    return torch.compile(function, backend=Backend(config), **kwargs)


def captures(thing):
    return tritium.explain(thing).captures


class FunctionRegion(Region):
    """A region that returns what its function returns: a tensor, or a tuple of several values."""

    def __init__(self, function, *arguments):
        self.returns_one = False
        super().__init__(lambda *args: self.as_tuple(function(*args)), *arguments)

    def as_tuple(self, result):
        self.returns_one = not isinstance(result, tuple)
        return (result,) if self.returns_one else result

    def __call__(self, *args):
        results = super().__call__(*args)
        return results[0] if self.returns_one else results


def region(run, device, names=("x",), weights=(), written=(), **config):
    """Return a region around a plain function, and the record that it writes to."""
    record = GraphRecord("0/0", "run", "eager", device)
    settings = CompilationConfig(**{"graphs": "only", **config})
    return FunctionRegion(run, Spec(tuple(names), tuple(weights), frozenset(written)), settings, record), record
