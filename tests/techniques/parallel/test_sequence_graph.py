"""Graphs with split tokens, for any number of ranks in one process: collectives, their number and their order."""

from collections import Counter

import pytest
import torch
import torch.distributed as dist

from support.codegen import WRAPPERS, generated
from support.zoo import ZOO
from tritium import CompilationConfig, Parallel, compat
from tritium.errors import PipelineError
from tritium.passes import Applied, PassContext
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
    undo = sequence.apply(part, grid, exchange)
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
    ("name", "attentions", "exchange", "each"),
    [
        ("flux", 2, "split", 4),
        ("flux", 2, "packed", 2),
        # The first block has a second attention.
        pytest.param("sd3", 3, "split", 4, marks=pytest.mark.thorough),
        # The text is on every rank, and attention to it needs no exchange.
        ("wan", 2, "packed", 2),
        # Keys have one head, which all ranks need.
        ("stable_audio", 2, "packed", 2),
        # A rank has one head: one chunk.
        pytest.param("wan", 2, "chunks 2", 4, marks=pytest.mark.thorough),
    ],
)
def test_exchanges_of_an_attention(world, name, attentions, exchange, each):
    world(8)
    part, undo, inputs = split(name, exchange, ulysses=8)
    found = collectives(graph_of(part, inputs))
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
    requests = []
    original = part.run_passes
    part.run_passes = lambda graph: requests.extend(original(graph))
    graph_of(part, inputs)
    settings = compat.inductor.overlap_settings()
    if not settings:
        # torch moves collectives by itself.
        assert [type(outcome) for outcome in requests] == [Applied]
        return
    assert [dict(request.settings) for outcome in requests for request in outcome] == [settings]
    *_, single = " ".join(order_of(part, inputs, **settings)).split("attention")
    # The wait for the result follows the product of the MLP, which needs it not.
    assert single.split()[:3] == ["exchange", "product", "wait"]
    undo()


def test_graphs_that_were_not_rewritten_raise(world):
    world(2)
    part, undo, inputs = split("wan", ulysses=2)
    torch._dynamo.reset()
    with pytest.raises(PipelineError, match="was not rewritten"), torch.inference_mode():
        torch.compile(part.module, backend="eager")(**inputs)
    undo()
