"""Graphs with split tokens, for any number of ranks in one process: collectives, their number and their order."""

import re
from collections import Counter

import pytest
import torch
import torch.distributed as dist

from support.codegen import WRAPPERS, generated
from support.zoo import ZOO
from tritium import CompilationConfig, Parallel, compat
from tritium.passes import PassContext
from tritium.techniques.parallel import mesh, sequence


@pytest.fixture(scope="module")
def world():
    """Return a function that pretends that this process is the first of so many ranks."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def start(ranks):
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)

    yield start
    if dist.is_initialized():
        dist.destroy_process_group()


class Part:
    """The part of a pipeline that `sequence` splits."""

    name, how = "transformer", "tritium"

    def __init__(self, module):
        self.module, self.passes = module, []

    def compile_with(self, *, passes=(), apart=None):
        self.passes += passes

    def run_passes(self, graph):
        context = PassContext(CompilationConfig(), "cpu")
        return [entry.run(graph, context) for entry in self.passes]


def split(name, exchange="split", **degrees):
    """Return a part of the zoo that is split, and its inputs."""
    part = Part(ZOO[name].build())
    grid = mesh.mesh_of(Parallel(**degrees), torch.device("cpu"))
    undo = sequence.apply(part, grid, lambda _size, _is_cuda: exchange)
    return part, undo, ZOO[name].inputs()


def graph_of(part, inputs):
    """Return the rewritten graph."""
    graphs = []

    def backend(gm, _):
        part.run_passes(gm.graph)
        gm.recompile()
        graphs.append(gm.graph)
        return gm.forward

    torch._dynamo.reset()
    with torch.inference_mode():
        torch.compile(part.module, backend=backend, fullgraph=True)(**inputs)
    (graph,) = graphs
    return graph


def collectives(graph):
    names = [str(node.target) for node in graph.nodes if "_c10d_functional" in str(node.target)]
    return Counter(name.split("_c10d_functional.")[1].split(".")[0] for name in names)


@pytest.mark.parametrize(
    ("name", "attentions"),
    # SD3's first block has a second attention; Wan's and PixArt's text is on every rank.
    [("flux", 2), ("sd3", 3), ("wan", 2), ("pixart", 2), ("stable_audio", 2)],
)
@pytest.mark.parametrize(("exchange", "each"), [("split", 4), ("packed", 2)])
def test_exchanges_of_an_attention(world, name, attentions, exchange, each):
    world(2)
    part, undo, inputs = split(name, exchange, ulysses=2)
    found = collectives(graph_of(part, inputs))
    # Stable Audio's keys have one head, which both ranks need.
    assert found["all_to_all_single"] == attentions * each
    assert found["all_gather_into_tensor"] == 1
    assert found["wait_tensor"] == attentions * each + 1
    undo()


@pytest.mark.parametrize(
    ("degrees", "expected"),
    [
        # Keys and values are gathered one by one, and the result.
        ({"gather": 8}, {"all_gather_into_tensor": 2 * 2 + 1}),
        # Keys and values are passed on three times.
        ({"ring": 4}, {"all_to_all_single": 2 * 2 * 3, "all_gather_into_tensor": 1}),
        # FLUX's two heads become eight.
        ({"ulysses": 8}, {"all_to_all_single": 2 * 4, "all_gather_into_tensor": 1}),
        ({"gather": 2, "ulysses": 2}, {"all_to_all_single": 2 * 4, "all_gather_into_tensor": 2 * 2 + 2}),
    ],
    ids=str,
)
def test_exchanges_by_axis(world, degrees, expected):
    world(Parallel(**degrees).size)
    part, undo, inputs = split("flux", **degrees)
    found = collectives(graph_of(part, inputs))
    assert found == {**expected, "wait_tensor": sum(expected.values())}
    undo()


def order_of(part, inputs, **settings):
    """Return the steps of generated code: exchanges, waits, products and attention."""
    names = list(inputs)

    def run(*tensors):
        return part.module(**dict(zip(names, tensors, strict=True)), return_dict=False)

    generated(run, *inputs.values(), device="cpu", rewrite=part.run_passes, **settings)
    steps = []
    for line in WRAPPERS[0].splitlines():
        line = line.strip()
        for word, step in (
            ("all_to_all_single.default(", "exchange"),
            ("wait_tensor.default(", "wait"),
            ("extern_kernels.", "product"),
            ("flash_attention_for_cpu.default(", "attention"),
        ):
            if word in line and not line.startswith(("#", "assert")):
                steps.append(step)
    return steps


def test_waits_move_below_products_on_request(world):
    world(2)
    part, undo, inputs = split("flux", ulysses=2)
    inputs = {name: value for name, value in inputs.items() if isinstance(value, torch.Tensor)}
    settings = compat.inductor.overlap_settings()
    requests = [request for outcome in part.run_passes(graph_of(part, inputs)) if outcome for request in outcome]
    print(requests)
    print(order_of(part, inputs))
    print(order_of(part, inputs, **settings))
    undo()
