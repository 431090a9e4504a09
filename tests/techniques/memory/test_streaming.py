"""Blocks in slots: the right weights at every step, compiled and captured, in any order, within the budget."""

import gc
import threading
import time

import pytest
import torch

import tritium
from support.streamed import Held, Stack, block_size, budget, note, optimized, plan, tokens
from tritium.compat.tensors import storage_id
from tritium.errors import MemoryShortage, PipelineError
from tritium.techniques.memory.link import Link, link_to

WAYS = {"eager": {"how": "eager"}, "compiled": {}, "captured": {"graphs": "with_compile"}}


@pytest.fixture(scope="module")
def expected():
    with torch.no_grad():
        return Stack()(tokens())


def weights(model):
    return {name: (value.data_ptr(), value.detach().clone()) for name, value in model.named_parameters()}


def living_bytes():
    """The bytes of the memory of all tensors."""
    gc.collect()
    tensors = [leaf for leaf in gc.get_objects() if type(leaf) in (torch.Tensor, torch.nn.Parameter)]
    return sum({storage_id(leaf): leaf.untyped_storage().nbytes() for leaf in tensors}.values())


class TestSteps:
    @pytest.mark.parametrize("way", WAYS)
    @pytest.mark.parametrize(("resident", "slots"), [(0, 2), (1, 3), (3, 2)])
    def test_equal_at_every_step(self, expected, way, resident, slots):
        model = Stack()
        before = weights(model)
        with optimized(model, budget(model, resident, slots=slots), slots=slots, **WAYS[way]) as handle:
            results = [model(tokens()) for _ in range(3)]
            found = note(handle)
        assert all(torch.equal(result, expected) for result in results)
        assert (found["slots"], found["misses"]) == (slots, {})
        # Captures have intermediate values of their own.
        assert len(found["resident"]) == resident or way == "captured"
        after = dict(model.named_parameters())
        assert all(after[name].data_ptr() == place for name, (place, _) in before.items())
        assert all(torch.equal(after[name], value) for name, (_, value) in before.items())

    def test_weights_that_are_read_too_early_show(self, monkeypatch):
        monkeypatch.setattr(Link, "wait", lambda *_: None)
        real = torch.Tensor.copy_

        def slowly(target, source, *args, **kwargs):
            if threading.current_thread() is not threading.main_thread():
                time.sleep(0.02)
            return real(target, source, *args, **kwargs)

        monkeypatch.setattr(torch.Tensor, "copy_", slowly)
        model = Stack()
        with optimized(model, budget(model, 0), how="eager"):
            assert model(tokens()).isnan().any()

    def test_addresses_are_those_of_the_slots_at_every_step(self):
        model = Stack()
        with optimized(model, budget(model, 0), how="eager"):
            model(tokens())
            places = [[value.data_ptr() for value in block.parameters()] for block in model.blocks]
            model(tokens())
            assert places == [[value.data_ptr() for value in block.parameters()] for block in model.blocks]
        assert len({tuple(place) for place in places}) == 2

    def test_graphs_and_captures_do_not_grow_with_blocks(self):
        found = []
        for blocks in (4, 8):
            torch.compiler.reset()
            model = Stack(blocks)
            with optimized(model, budget(model, 0), graphs="with_compile") as handle:
                for _ in range(3):
                    model(tokens())
                report = handle.report
                found.append((len(report.records), len(report.captures), sum(row["hits"] for row in report.captures)))
        assert found[0][:2] == found[1][:2] == (1, 2)
        # Each replays all later calls of its slot.
        assert found[1][2] == 2 * found[0][2]

    def test_a_result_of_an_earlier_call_stays(self, expected):
        model = Stack()
        with optimized(model, budget(model, 1), graphs="with_compile"):
            first = model(tokens())
            model(tokens() + 1)
        assert torch.equal(first, expected)

    @pytest.mark.parametrize("resident", [0, 2, 4])
    def test_never_above_the_budget(self, resident):
        model, link = Stack(), link_to(torch.device("cpu"))
        size = budget(model, resident)
        with optimized(model, size, how="eager"), torch.inference_mode():
            model(tokens())
            with Held(link) as held:
                model(tokens())
        assert size - 2 * block_size() - 24_000 < held.most <= size

    def test_captures_keep_no_more_than_their_share_of_the_budget(self):
        # Each block that stays has a capture; their results together are larger than that share.
        model, x, link = Stack(16), tokens(64), link_to(torch.device("cpu"))
        with torch.no_grad():
            expected = model(x)
        with optimized(model, budget(model, 10, activations=120_000), graphs="with_compile") as handle:
            before = living_bytes() - link.allocated()
            assert all(torch.equal(model(x), expected) for _ in range(3))
            kept = living_bytes() - link.allocated() - before
            found, captures = note(handle), len(handle.captures)
        assert found["streamed"]
        # The other half is for the calls themselves.
        assert x.nbytes <= kept <= found["activations"] // 2 < captures * x.nbytes

    def test_threads_take_turns(self, expected):
        model, results = Stack(), []

        def run():
            with torch.no_grad():
                results.append(model(tokens()))

        with optimized(model, budget(model, 0), how="eager"):
            threads = [threading.Thread(target=run) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert len(results) == 4
        assert all(torch.equal(result, expected) for result in results)


class TestOrders:
    @pytest.mark.parametrize("order", [[0, 4, 5], [5, 4, 3, 2, 1, 0], [0, 0, 3, 3, 1], [3]])
    def test_skipped_or_in_another_order(self, order):
        model, reference = Stack(), Stack()
        with optimized(model, budget(model, 0), how="eager") as handle:
            for turn in range(4):
                model.order = reference.order = order if turn % 2 else list(range(6))
                assert torch.equal(model(tokens()), reference(tokens()))
            assert sum(note(handle)["misses"].values()) >= 1
            assert "out of order" in str(handle)

    def test_the_order_of_the_first_call_is_learned(self):
        model, reference = Stack(), Stack()
        model.order = reference.order = [3, 1, 5, 0, 2, 4]
        with optimized(model, budget(model, 0), how="eager") as handle:
            assert all(torch.equal(model(tokens()), reference(tokens())) for _ in range(3))
            assert not note(handle)["misses"]

    def test_a_block_called_alone_has_its_weights(self):
        model, reference = Stack(), Stack()
        with optimized(model, budget(model, 0), how="eager"):
            model(tokens())
            assert torch.equal(model.blocks[3](tokens()), reference.blocks[3](tokens()))

    def test_a_failed_call_leaves_the_right_weights(self, expected):
        model = Stack()
        with optimized(model, budget(model, 0), how="eager"):
            with pytest.raises(PipelineError, match="call model first"):
                model.blocks[2](tokens())
            model(tokens())
            with pytest.raises(RuntimeError):
                model.blocks[2](torch.ones(3))
            assert torch.equal(model(tokens()), expected)


class TestSpace:
    def test_a_budget_that_cannot_hold_a_block_says_what_is_needed(self):
        model = Stack()
        with (
            optimized(model, budget(model, 0) - block_size(), how="eager"),
            pytest.raises(MemoryShortage, match=r"it needs .* at least .*2 slots of .* for activations"),
        ):
            model(tokens())

    def test_a_larger_call_is_planned_again(self, expected):
        model = Stack()
        with optimized(model, budget(model, 3), how="eager") as handle:
            assert torch.equal(model(tokens()), expected)
            before = note(handle)
            model(tokens(20))
            after = note(handle)
            assert torch.equal(model(tokens()), expected)
        assert len(after["resident"]) < len(before["resident"])
        assert after["activations"] > before["activations"]

    def test_two_estimates_give_the_others(self, monkeypatch):
        from tritium.techniques.memory import tenant

        model, calls = Stack(), []
        real = tenant.estimate
        monkeypatch.setattr(tenant, "estimate", lambda *args: calls.append(1) or real(*args))
        with optimized(model, budget(model, 0, activations=60_000), how="eager") as handle:
            for count in (8, 20, 16, 18, 8):
                model(tokens(count))
            assert note(handle)["activations"] < 60_000
        assert len(calls) == 2

    def test_a_call_out_of_memory_gets_more(self, expected):
        model, failures = Stack(), [torch.OutOfMemoryError("no")] * 2

        def fail(*_):
            if failures:
                raise failures.pop()

        with optimized(model, budget(model, 4), how="eager") as handle:
            model.blocks[4].register_forward_pre_hook(fail)
            assert torch.equal(model(tokens()), expected)
            assert "out of memory" in " ".join(note(handle)["notes"])
        failures += [torch.OutOfMemoryError("no")] * 9
        with optimized(model, budget(model, 4), how="eager"), pytest.raises((torch.OutOfMemoryError, MemoryShortage)):
            model(tokens())

    def test_more_than_estimated_is_planned_again(self, expected, monkeypatch):
        model = Stack()
        size = budget(model, 3)
        peaks = iter([0, 0, 0])
        monkeypatch.setattr(Link, "most_allocated", lambda _: next(peaks, size + 10_000))
        with optimized(model, size, how="eager") as handle:
            results, resident = [], []
            for _ in range(3):
                results.append(model(tokens()))
                resident.append(len(note(handle)["resident"]))
            assert "it took" in " ".join(note(handle)["notes"])
        assert resident[0] > resident[2]
        assert all(torch.equal(result, expected) for result in results)

    def test_everything_resident_if_it_fits_easily(self, expected):
        model = Stack()
        with optimized(model, "1GB") as handle:
            assert torch.equal(model(tokens()), expected)
            assert note(handle) == {"budget": "1GB", "resident": True}
            assert "as one program" in str(handle)

    def test_gradients_are_refused(self):
        model = Stack()
        with (
            tritium.optimize(model, plan(budget(model, 0), how="eager")),
            pytest.raises(PipelineError, match="no_grad"),
        ):
            model(tokens())

    def test_measured_times_are_in_the_report(self):
        model = Stack()
        with optimized(model, budget(model, 1), how="eager") as handle:
            for _ in range(5):
                model(tokens())
            found = note(handle)
        assert found["measured"]
        assert found["step_ms"] > 0.999 * found["resident_step_ms"] > 0
