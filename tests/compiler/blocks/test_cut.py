"""Blocks that repeat are compiled once: the same numbers as eager for every way in which blocks can differ or be tied."""

import contextlib

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from support.blocks import EAGER, Block, Model, Scaled, check, counts, inputs, model_of, reuse
from tritium import Backend, compat
from tritium.compiler.blocks import cut
from tritium.compiler.blocks.segments import Facts


class TestEqualBlocks:
    def test_are_compiled_once(self):
        (entry,) = check(model_of(Block, 8))
        total, compiled = counts(entry)
        assert total == 10
        # Before, first, middle, behind: the first gets no end of another block.
        assert compiled == 4
        assert entry.changed

    def test_a_number_that_differs_is_another_piece(self):
        blocks = [Block(eps=eps) for eps in (1e-6, 1e-6, 1e-6, 1e-5, 1e-5, 1e-5, 1e-5, 1e-5)]
        (entry,) = check(Model(*blocks).requires_grad_(False))
        assert counts(entry) == (10, 5)

    def test_rows_of_a_common_table_are_taken_before_the_blocks(self):
        """As in Chroma: each block reads other rows of a value that the model computes once."""

        class Tabled(Model):
            def __init__(self):
                super().__init__(*(Block() for _ in range(8)))
                self.table = nn.Linear(16, 8 * 16)

            def forward(self, x, temb):
                table, x = self.table(temb).unflatten(-1, (8, 16)), self.enter(x)
                for place, block in enumerate(self.blocks):
                    x = block(x, table[:, place])
                return self.leave(x)

        (entry,) = check(Tabled().requires_grad_(False))
        assert counts(entry)[1] <= 5

    def test_rows_of_a_table_that_is_written_stay_in_place(self):
        class Written(Model):
            def forward(self, x, temb):
                table, x = temb * 1, self.enter(x)
                for block in self.blocks:
                    x = block(x, table + 1)
                    table.add_(1)
                return self.leave(x)

        check(Written(*(Block() for _ in range(8))).requires_grad_(False))

    def test_a_hook_on_one_block_is_another_piece(self):
        model = model_of(Block, 8)
        model.blocks[4].register_forward_hook(lambda module, arguments, result: result * 2)
        (entry,) = check(model)
        assert counts(entry)[1] in (5, 6)

    def test_a_lora_on_some_blocks_is_another_piece(self):
        class Lora(nn.Module):
            def __init__(self, base):
                super().__init__()
                self.base, self.a, self.b = base, nn.Linear(16, 2, bias=False), nn.Linear(2, 32, bias=False)

            def forward(self, x):
                return self.base(x) + self.b(self.a(x)) * 0.5

        model = model_of(Block, 10)
        for block in model.blocks[3:7]:
            block.up = Lora(block.up)
        (entry,) = check(model.requires_grad_(False))
        assert counts(entry) == (12, 5)

    def test_another_processor_in_some_blocks_is_another_piece(self):
        class Switched(Block):
            def forward(self, x, temb):
                return super().forward(x, temb) if self.plain else super().forward(x.relu(), temb)

        model = model_of(Switched, 10)
        for place, block in enumerate(model.blocks):
            block.plain = place % 2 == 0
        (entry,) = check(model)
        assert counts(entry)[1] <= 6

    def test_a_model_inside_of_a_function_and_of_another_model(self):
        model = model_of(Block, 8)
        wrapped = Wrapper(model)
        for function in (lambda x, temb: model(x, temb), model.forward, wrapped):
            torch._dynamo.reset()
            compiled = torch.compile(function, backend=Backend(EAGER))
            with torch.no_grad():
                assert torch.equal(compiled(*inputs()), model(*inputs()))
            (entry,) = reuse(compiled)
            assert counts(entry) == (10, 4)

    def test_inner_blocks_are_taken_if_outer_ones_differ(self):
        class Stage(Model):
            def __init__(self, last):
                super().__init__(*(Block() for _ in range(5)))
                self.last = last

            def forward(self, x, temb):
                return self.last(super().forward(x, temb))

        stages = nn.ModuleList([Stage(torch.tanh), Stage(torch.sin)]).requires_grad_(False)
        (entry,) = check(Stages(stages))
        total, compiled = counts(entry)
        assert total >= 12
        assert compiled <= 6

    def test_too_few_are_compiled_whole(self):
        (entry,) = check(model_of(Block, 3))
        assert entry.declined is not None
        assert "pieces are equal to another" in entry.declined
        assert not entry.changed


class Wrapper(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.parts = nn.ModuleList([inner])

    def forward(self, x, temb):
        return self.parts[0](x, temb)


class Stages(nn.Module):
    def __init__(self, stages):
        super().__init__()
        self.stages = stages

    def forward(self, x, temb):
        for stage in self.stages:
            x = stage(x, temb)
        return x


class Sharing(nn.Module):
    """Blocks that hand on two parts of one buffer, and tensors of their own."""

    def __init__(self, count=8):
        super().__init__()
        self.blocks = nn.ModuleList([Pair() for _ in range(count)])

    def forward(self, x, temb):
        text = x.sin()
        for block in self.blocks:
            text, x = block(text, x, temb)
        return text, x


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Block()

    def forward(self, text, x, temb):
        both = self.inner(torch.cat([text, x], dim=1), temb)
        return both[:, : text.shape[1]], both[:, text.shape[1] :]


class TestMemory:
    def test_views_of_one_buffer_are_not_tensors_of_their_own(self):
        (entry,) = check(Sharing().requires_grad_(False))
        total, compiled = counts(entry)
        assert total >= 8
        # The first block reads two tensors, the others two views of one.
        assert 3 <= compiled <= 5

    @pytest.mark.parametrize("kind", ["input", "iadd", "buffer", "view", "rope"])
    def test_writes(self, kind):
        class Writing(Block):
            def forward(self, x, temb):
                y = super().forward(x, temb)
                if kind == "input":
                    return x.add_(y)
                if kind == "iadd":
                    x += y
                    return x
                if kind == "buffer":
                    temb[:, 0] = y.mean()
                    return y
                if kind == "view":
                    x[:, 2:].mul_(2)
                    return x + y
                out = torch.empty_like(y)
                out[..., 0::2] = y[..., 1::2] * 2
                out[..., 1::2] = y[..., 0::2]
                return out

        (entry,) = check(model_of(Writing, 8))
        if kind in ("input", "iadd", "view", "rope"):
            assert counts(entry)[1] <= 4

    def test_two_inputs_of_which_one_is_written_are_compiled_whole(self):
        class Tied(nn.Module):
            def __init__(self):
                super().__init__()
                self.blocks = nn.ModuleList([Writes() for _ in range(8)])

            def forward(self, x, temb):
                x = x * 1
                part = x[:, 1:]
                for block in self.blocks:
                    x = block(x, part, temb)
                return x, part * 1

        class Writes(Block):
            def forward(self, x, part, temb):
                y = super().forward(part, temb)
                part.add_(y)
                return x

        (entry,) = check(Tied().requires_grad_(False))
        assert "share" in entry.declined

    def test_a_tuple_stays_with_what_makes_it(self):
        class Split(nn.Module):
            def __init__(self):
                super().__init__()
                self.blocks = nn.ModuleList([Block() for _ in range(8)])

            def forward(self, x, temb):
                for block in self.blocks:
                    left, right = block(x, temb).chunk(2, dim=-1)
                    x = torch.cat([right, left], dim=-1)
                return x

        (entry,) = check(Split().requires_grad_(False))
        assert counts(entry)[1] <= 6

    def test_a_value_is_let_go_after_the_last_piece_that_reads_it(self):
        alive = []

        class Watching(Block):
            def forward(self, x, temb):
                return super().forward(x, temb)

        model = model_of(Watching, 8)
        compiled = torch.compile(model, backend=Backend(EAGER))
        with torch.no_grad():
            compiled(*inputs())
            with _Allocations(alive):
                compiled(*inputs())
        # Nothing of an early block is left at the end: the most at once is what one block and its neighbour need.
        assert max(alive) <= 2 * max(alive[: len(alive) // 4])

    def test_random_numbers_come_in_the_model_s_order(self):
        class Noisy(Block):
            def forward(self, x, temb):
                return super().forward(x + torch.rand_like(x), temb) + torch.randn_like(x)

        model = model_of(Noisy, 8)
        compiled = torch.compile(model, backend=Backend(EAGER))
        with torch.no_grad():
            torch.manual_seed(3)
            expected = model(*inputs())
            compiled(*inputs())
            torch.manual_seed(3)
            assert torch.equal(compiled(*inputs()), expected)
        assert counts(reuse(compiled)[0])[1] <= 5


class _Allocations(torch.utils._python_dispatch.TorchDispatchMode):
    """Notes how many bytes of results are alive after each operator."""

    def __init__(self, alive):
        super().__init__()
        self.alive, self.refs = alive, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        import weakref

        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.refs.append(weakref.ref(result))
        self.alive.append(sum(ref() is not None for ref in self.refs))
        return result


class TestSizes:
    def test_three_sizes_on_one_compilation(self):
        calls = [inputs(2, tokens) for tokens in (5, 7, 63)]
        with compat.dynamo.floats_as_constants():
            (entry,) = check(model_of(Block, 8), *calls, dynamic=True)
        assert counts(entry)[1] <= 5

    def test_numbers_that_are_inputs(self):
        model = model_of(Scaled, 8)
        (entry,) = check(model, dynamic=True)
        assert counts(entry)[1] <= 6
        model.blocks[5].factor = 3.0
        assert len(check(model, dynamic=True)) >= 1

    def test_a_size_that_data_decides_is_compiled_whole(self):
        class Picking(nn.Module):
            def __init__(self):
                super().__init__()
                self.blocks = nn.ModuleList([Block() for _ in range(8)])

            def forward(self, x, temb):
                x = x.flatten(0, 1)[torch.nonzero(x.flatten(0, 1)[:, 0] > 0)[:, 0]][None].expand(2, -1, -1)
                for block in self.blocks:
                    x = block(x, temb)
                return x

        with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
            (entry,) = check(Picking().requires_grad_(False))
        assert "is not the value of any input" in entry.declined


def test_a_tensor_subclass_is_compiled_whole():
    reasons = []

    def look(gm, example_inputs):
        reasons.append(cut.decline_graph(gm.graph))
        return gm.forward

    double = TwoTensor(torch.ones(2), torch.ones(2))
    with torch.no_grad():
        torch.compile(torch.sin, backend=look)(double)
        torch.compile(torch.cos, backend=look)(torch.ones(2))
    assert "TwoTensor" in reasons[0]
    assert reasons[1] is None


def test_dead_operations_are_left_out():
    def look(gm, example_inputs):
        facts.append(Facts(gm))
        return gm.forward

    facts = []
    with torch.no_grad(), contextlib.suppress(RuntimeError):
        torch.compile(lambda x: (x.sin(), x.cos() * 0)[0], backend=look)(torch.ones(2))
    assert all(node.users for node in facts[0].calls)
