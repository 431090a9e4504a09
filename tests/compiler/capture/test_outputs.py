"""A result stays valid for as long as the caller holds it."""

import pytest
import torch

from support.capture import compiled, region


class TestOutputs:
    def test_two_calls_in_a_row_are_both_right(self, device, config):
        f = compiled(lambda x: x * 2, config)
        a, b = torch.ones(4, device=device), torch.full((4,), 3.0, device=device)
        for _ in range(3):
            cond, uncond = f(a), f(b)
            assert cond.tolist() == [2.0] * 4
            assert uncond.tolist() == [6.0] * 4

    def test_a_result_that_was_dropped_costs_no_copy(self, device):
        f, record = region(lambda x: x * 2, device)
        places = set()
        for value in (1.0, 2.0, 3.0):
            result = f(torch.full((4,), value, device=device))
            assert result.tolist() == [2 * value] * 4
            places.add(result.data_ptr())
            del result
        assert len(places) == 1
        assert record.captures[0].copies is False

    @pytest.mark.parametrize(
        "keep", [lambda r: r, lambda r: r[1:], lambda r: r.view(2, 2).t(), lambda r: r.detach(), lambda r: [r]]
    )
    def test_a_result_lives_while_anything_of_it_is_held(self, device, keep):
        f, record = region(lambda x: x * 2, device)
        kept = keep(f(torch.ones(4, device=device)))
        was = [t.clone() for t in (kept if isinstance(kept, list) else [kept])]
        for value in (2.0, 3.0):
            assert f(torch.full((4,), value, device=device)).tolist() == [2 * value] * 4
        assert all(map(torch.equal, kept if isinstance(kept, list) else [kept], was))
        assert record.captures[0].copies is True

    def test_writing_to_a_result_is_the_callers_right(self, device, config):
        f = compiled(lambda x: x + 1, config)
        x = torch.ones(3, device=device)
        with torch.no_grad():
            first = f(x)
        first.mul_(100)
        first.requires_grad_()
        (first * 2).sum().backward()
        assert f(x).tolist() == [2.0] * 3
        assert first.tolist() == [200.0] * 3
        del first
        assert f(x).tolist() == [2.0] * 3

    def test_views_of_inputs_are_views_of_the_callers_inputs(self, device, config):
        f = compiled(lambda x: (x.view(2, 3)[1], x * 2), config)
        x, y = torch.arange(6.0, device=device), torch.arange(6.0, 12.0, device=device)
        view, _ = f(x)
        other, _ = f(y)
        assert view.tolist() == [3.0, 4.0, 5.0]
        assert other.tolist() == [9.0, 10.0, 11.0]
        assert view.data_ptr() == x.data_ptr() + 3 * 4
        y[3] = -1
        assert other.tolist() == [-1.0, 10.0, 11.0]

    def test_an_input_that_is_returned_is_the_callers(self, device):
        f, _ = region(lambda x: (x, x + 1), device)
        for value in (1.0, 2.0):
            x = torch.full((2,), value, device=device)
            same, more = f(x)
            assert same is x
            assert more.tolist() == [value + 1] * 2

    def test_results_that_share_memory_go_on_sharing_it(self, device):
        def both(x):
            y = x * 2
            return y, y[1:]

        f, _ = region(both, device)
        pairs = [f(torch.full((3,), value, device=device)) for value in (1.0, 2.0, 3.0)]
        for value, (whole, part) in zip((1.0, 2.0, 3.0), pairs, strict=True):
            assert part.tolist() == [2 * value] * 2
            whole[1] = -1
            assert part.tolist() == [-1.0, 2 * value]

    def test_unsafe_results_are_overwritten(self, device):
        f, _ = region(lambda x: (x * 2, (x * 2).long()), device, safe_output_mode=False)
        first, _ = f(torch.ones(2, device=device))
        second, _ = f(torch.full((2,), 5.0, device=device))
        assert first.data_ptr() == second.data_ptr()
        assert first.tolist() == [10.0, 10.0]
