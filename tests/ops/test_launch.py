"""Remembered launches: the same arguments elsewhere in memory, and what must not be remembered."""

import ctypes
import gc
import weakref

import pytest
import torch

from fidelity import assert_no_worse
from interpreter import interpreted
from tritium import device, ops
from tritium.ops import cpp, launch


def planned(values, inputs, result):
    launched = []
    record = launch.Record([launch.Launch(lambda *values: launched.append(values), tuple(values))])
    return launched, launch._planned(record, [tensor.data_ptr() for tensor in inputs], result)


class TestPlans:
    def test_addresses_are_filled_in_and_results_made_anew(self):
        x, w, out = torch.randn(2, 3), torch.randn(3), torch.empty(2, 3)
        launched, plan = planned([x, w, out, 1.5, None, 8], [x, w], out)
        others = [torch.randn(2, 3), torch.randn(3)]
        made = plan.launch([tensor.data_ptr() for tensor in others], torch.device("cpu"))
        assert (made.shape, made.stride(), made.dtype) == (out.shape, out.stride(), out.dtype)
        assert made.data_ptr() != out.data_ptr()
        pointers = [tensor.data_ptr() for tensor in (*others, made)]
        assert launched == [(*pointers, 1.5, None, 8)]

    def test_several_results(self):
        x, first, second = torch.randn(2, 3), torch.empty(2, 3), torch.empty(3, 2).t()
        launched, plan = planned([x, second, first], [x], (first, second))
        made = plan.launch([x.data_ptr()], torch.device("cpu"))
        assert [one.stride() for one in made] == [first.stride(), second.stride()]
        assert launched == [(x.data_ptr(), made[1].data_ptr(), made[0].data_ptr())]

    def test_a_launch_on_a_copy_is_not_remembered(self):
        x, out = torch.randn(2, 3), torch.empty(2, 3)
        assert planned([x.clone(), out], [x], out)[1] is None

    def test_what_launches_nothing_is_not_remembered(self):
        x = torch.randn(2)
        assert launch._planned(launch.Record(), [x.data_ptr()], x) is None

    def test_several_launches_hand_each_other_their_memory(self):
        launched = []

        def note(name):
            return lambda *values: launched.append((name, *values))

        x, out, sums, more = torch.randn(2, 3), torch.empty(2, 3), torch.empty(4), torch.empty(2)
        launches = [("a", (x, sums, 7)), ("b", (sums, more)), ("c", (x, more, out))]
        record = launch.Record([launch.Launch(note(name), values) for name, values in launches], [sums, more])
        plan = launch._planned(record, [x.data_ptr()], out)
        made = plan.launch([1234], torch.device("cpu"))
        assert made.shape == out.shape
        (_, first, *_), (_, second, third), (_, fourth, fifth, sixth) = launched
        assert (first, fourth, sixth) == (1234, 1234, made.data_ptr())
        # The same memory in both launches, and not that of the first time.
        assert launched[0][2] == second != sums.data_ptr()
        assert third == fifth != more.data_ptr()

    def test_memory_that_is_not_noted_is_not_remembered(self):
        x, out, sums = torch.randn(2, 3), torch.empty(2, 3), torch.empty(4)
        launches = [launch.Launch(print, (x, sums)), launch.Launch(print, (sums, out))]
        assert launch._planned(launch.Record(launches), [x.data_ptr()], out) is None
        assert launch._planned(launch.Record(launches, [sums]), [x.data_ptr()], out) is not None

    def test_a_plan_keeps_no_tensor(self):
        x, out = torch.randn(2, 3), torch.empty(2, 3)
        kept = [weakref.ref(tensor) for tensor in (x, out)]
        _, plan = planned([x, out, 8], [x], out)
        del x, out
        gc.collect()
        assert [reference() for reference in kept] == [None, None]
        assert plan is not None


def test_a_grid_has_three_dims(monkeypatch):
    class Kernel:
        arg_names = ("x", "SIZE")

        def __getitem__(self, grid):
            # As Triton does: called it launches and gives the compiled kernel, which is asked for a grid again.
            return lambda *values, **options: Compiled()

    class Compiled:
        hash = "0123"

        def __getitem__(self, grid):
            return lambda *values: launched.append((grid, values))

    launched, x = [], torch.randn(2)
    monkeypatch.setattr(launch, "_STARTED", {})
    noted = launch.Record()
    token = launch._RECORD.set(noted)
    launch.start(Kernel(), (7,), x, SIZE=4)
    launch._RECORD.reset(token)
    (record,) = noted.launches
    record.runner(*record.values)
    assert launched == [((7, 1, 1), (x, 4))]
    # For artifacts.
    assert [kernel.hash for kernel in launch.started()] == ["0123"]


class TestCalls:
    """What is remembered on a CPU: a C++ function, here one in Python."""

    def test_arguments_of_one_form_are_looked_at_once(self):
        looked, called = [], []

        def run(x, scale):
            looked.append(x)
            out = torch.empty_like(x)
            launch.call(lambda *values: called.append(values), x, out, scale)
            return out

        provider = launch.remembered(run)
        inputs = [torch.randn(2, 3) for _ in range(3)]
        made = [provider(x, 0.5) for x in inputs]
        assert len(looked) == 1
        assert called == [(x.data_ptr(), out.data_ptr(), 0.5) for x, out in zip(inputs, made, strict=True)]
        provider(inputs[0].t(), 0.5)
        provider(inputs[0], 0.25)
        assert len(looked) == 3

    def test_scratch_is_taken_anew(self):
        called = []

        def run(x):
            out, sums = torch.empty_like(x), launch.scratch(x, 5)
            assert sums.dtype == torch.float32
            launch.call(lambda *values: called.append(values), x, sums)
            launch.call(lambda *values: called.append(values), sums, out)
            return out

        provider = launch.remembered(run)
        inputs = [torch.randn(2, 3) for _ in range(3)]
        made = [provider(x) for x in inputs]
        for x, out, first, second in zip(inputs, made, called[::2], called[1::2], strict=True):
            assert (first[0], second[1]) == (x.data_ptr(), out.data_ptr())
            assert first[1] == second[0] not in (x.data_ptr(), out.data_ptr())

    def test_what_writes_to_an_input_makes_no_result(self):
        called = []

        def run(x, out):
            launch.call(lambda *values: called.append(values), x, out)

        provider = launch.remembered(run)
        pairs = [(torch.randn(2, 3), torch.empty(2, 3)) for _ in range(3)]
        assert [provider(*pair) for pair in pairs] == [None] * 3
        assert called == [(x.data_ptr(), out.data_ptr()) for x, out in pairs]

    def test_another_number_of_threads_is_asked_for_anew(self, monkeypatch):
        asked = []

        def run(x):
            out = torch.empty_like(x)
            launch.call(lambda *values: asked.append(values[-1]), x, out, torch.get_num_threads())
            return out

        provider = launch.remembered(run)
        for threads in (3, 3, 5, 3):
            monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
            provider(torch.randn(2))
        assert asked == [3, 3, 5, 3]

    def test_a_call_on_a_copy_is_made_anew(self):
        called = []

        def run(x):
            out, dense = torch.empty_like(x), x.contiguous()
            launch.call(lambda *values: called.append(dense.clone()), dense, out)
            return out

        provider = launch.remembered(run)
        for number in (1.0, 2.0, 3.0):
            provider(torch.full((2, 3), number).t())
        assert [copy.unique().tolist() for copy in called] == [[1.0], [2.0], [3.0]]


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.double(),
        lambda x: x[:1],
        lambda x: x.t().contiguous().t(),
        lambda x: x.unsqueeze(0),
        lambda x: [x],
    ],
    ids=["dtype", "shape", "stride", "rank", "nesting"],
)
def test_what_makes_another_signature(change):
    x = torch.randn(2, 3)

    def signature(*arguments):
        return launch.signature(arguments, [])

    assert signature(x, 1.0, None) == signature(torch.randn(2, 3), 1.0, None)
    assert signature(x, 1.0) != signature(change(x), 1.0)
    assert signature(x, 1.0) != signature(x, 2.0)


def elsewhere(value):
    """Other numbers of the same shape, strides and dtype, at another address; the same ones where they are places."""
    if isinstance(value, list):
        return [elsewhere(part) for part in value]
    if not isinstance(value, torch.Tensor):
        return value
    made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    floating = value.is_floating_point() or value.is_complex()
    return made.copy_(torch.randn(value.shape, device=value.device, dtype=value.dtype) if floating else value)


def owned(provider):
    return [op for op in ops.catalog().values() if provider in ops.providers(op)]


def check_remembered(op, provider, device_type, dtype):
    run, decline = ops.providers(op)[provider].run, ops.providers(op)[provider].decline
    for sample in op.samples(dtype, device_type):
        if decline(**sample.arguments) is not None:
            continue
        run(*sample.arguments.values())
        for _ in range(2):
            arguments = [elsewhere(value) for value in sample.arguments.values()]
            made, plain = run(*arguments), op.reference(*arguments)
            pairs = zip(made, plain, strict=True) if isinstance(made, tuple) else [(made, plain)]
            for actual, expected in pairs:
                assert_no_worse(actual, expected, expected.double(), sample.label)


class Compiled:
    """Stands for what Triton gives after a launch: takes addresses, and launches again in the interpreter."""

    def __init__(self, kernel, arguments, options):
        self.kernel, self.arguments, self.options = kernel, arguments, options
        self.hash = "interpreted"

    def __getitem__(self, grid):
        def run(*values):
            replayed.append(self.kernel)
            given = dict(zip(self.kernel.arg_names, values, strict=True))
            positional = [self.seen(name, before, given.pop(name)) for name, before in self.arguments.items()]
            return self.kernel[grid](*positional, **{name: given.get(name, value) for name, value in self.options})

        return run

    @staticmethod
    def seen(name, before, now):
        if not isinstance(before, torch.Tensor):
            return now
        assert isinstance(now, int), name
        # From its address alone, and as long as the first one was.
        length = 1 + sum((size - 1) * stride for size, stride in zip(before.shape, before.stride(), strict=True))
        memory = (ctypes.c_char * (length * before.element_size())).from_address(now)
        return torch.frombuffer(memory, dtype=before.dtype)


replayed = []


def check_plans(name) -> int:
    """Launches that are remembered, made again in Triton's interpreter."""
    begin = launch.start

    def start(kernel, grid, *arguments, **options):
        class Kernel:
            arg_names = kernel.arg_names

            def __getitem__(self, grid):
                def run(*arguments, **options):
                    kernel[grid](*arguments, **options)
                    return Compiled(kernel, dict(zip(kernel.arg_names, arguments, strict=False)), options.items())

                return run

        begin(Kernel(), grid, *arguments, **options)

    launch.start = start
    check_remembered(ops.catalog()[name], "triton", "cpu", torch.float32)
    return len(replayed)


@pytest.mark.skipif(not device.has_triton(), reason="triton is not installed")
def test_launches_one_after_the_other_are_remembered():
    """Statistics, what becomes of them, and what reads that: three launches, two buffers."""
    assert interpreted("ops.test_launch", "check_plans", "'group_norm_silu'") > 20


@pytest.mark.gpu
@pytest.mark.parametrize("op", owned("triton"), ids=lambda op: op.name)
def test_a_remembered_launch_computes_the_same(op):
    check_remembered(op, "triton", "cuda", torch.float32)


@pytest.mark.skipif(cpp.cannot_run() is not None, reason=str(cpp.cannot_run()))
@pytest.mark.parametrize("op", owned("cpu"), ids=lambda op: op.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_remembered_call_computes_the_same(op, dtype):
    check_remembered(op, "cpu", "cpu", dtype)
