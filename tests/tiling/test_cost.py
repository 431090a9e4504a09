"""The cost model, on the shapes it was measured with: it must rank tilings as the device did."""

import pytest

from tritium.tiling import cost
from tritium.tiling.cost import Loop, Workload

HALF = 2


def pad(bits=32, channels_last_output=False):
    """A pad of [1, 96, 2, 544, 960] in bf16: loops over channels, frames, rows and columns of the padded video."""
    elements = 96 * 4 * 546 * 962
    read, written = elements * HALF, 2 * elements * HALF
    innermost = read if channels_last_output else read + written
    return Workload(
        (
            Loop(96, known_factor=96, bytes=written if channels_last_output else 0),
            Loop(4, known_factor=4),
            Loop(546, is_symbolic=True),
            Loop(962, is_symbolic=True, bytes=innermost),
        ),
        index_bits=bits,
    )


def best(workload, most_dims=3):
    return min(cost.all_cuts(len(workload.loops), most_dims), key=lambda cuts: cost.cost(workload, cuts))


def test_every_way_to_cut():
    assert list(cost.all_cuts(1, 3)) == [()]
    assert list(cost.all_cuts(3, 1)) == [()]
    assert list(cost.all_cuts(4, 3)) == [(), (1,), (2,), (3,), (1, 2), (1, 3), (2, 3)]


def test_a_flat_pad_is_bound_by_its_divisions():
    """Measured: 3.47 ms with 64-bit divisions, 0.78 with 32-bit ones, 0.34 without."""
    narrow, wide = pad(32), pad(64)
    assert cost.cost(wide, ()) / cost.cost(narrow, ()) == pytest.approx(3.47 / 0.78, rel=0.2)
    assert cost.cost(narrow, ()) / cost.cost(narrow, best(narrow)) > 2


def test_a_pad_to_channels_last_needs_two_dims():
    """Measured: 9.6 ms flat, 0.24 with the channels apart."""
    workload = pad(channels_last_output=True)
    assert best(workload) == (1,)
    assert cost.cost(workload, ()) > 3 * cost.cost(workload, (1,))


def test_divisions_by_multiples_of_16_are_shared():
    """Why a split of qkv stays flat: the head's 64 elements have one quotient. Measured: 0.153 ms flat, 0.207 in 3 dims."""
    elements = 2 * 16384 * 4608
    heads = (
        Loop(3),
        Loop(2),
        Loop(24, known_factor=24),
        Loop(16384, is_symbolic=True),
        Loop(64, known_factor=64, bytes=3 * HALF * elements),
    )
    workload = Workload(heads)
    assert cost.cost(workload, ()) <= cost.LEAST_GAIN * min(
        cost.cost(workload, cuts) for cuts in cost.all_cuts(len(heads), 3)
    )
    odd = Workload((*heads[:-1], Loop(63, bytes=heads[-1].bytes)))
    assert cost.cost(odd, ()) > 1.5 * cost.cost(workload, ())


def test_thin_dims_are_not_coalesced():
    """RoPE cut down to its pairs was measured 3.2 times slower."""
    elements = 1 << 20
    workload = Workload((Loop(elements // 128), Loop(64), Loop(2, bytes=6 * elements)))
    assert cost.cost(workload, (2,)) > 2 * cost.cost(workload, ())


class TestWaves:
    @pytest.mark.parametrize(
        ("tiles", "multiprocessors", "waste"),
        [(132 * 8, 132, 1.0), (132 * 8 + 1, 132, 2.0), (132 * 8 * 50 + 1, 132, 1.02), (2, None, 1.0), (1, 132, 1.0)],
    )
    def test_only_the_last_wave_of_few_wastes(self, tiles, multiprocessors, waste):
        assert cost.last_wave_waste(tiles, multiprocessors) == pytest.approx(waste, rel=0.01)

    def test_it_is_part_of_the_cost(self):
        loops = (Loop(33, is_symbolic=True, bytes=4), Loop(33 * 1024, is_symbolic=True, bytes=4))
        assert cost.cost(Workload(loops, multiprocessors=132), ()) > cost.cost(Workload(loops), ())


def test_tiles_are_powers_of_two_within_bounds():
    for sizes in ([1], [7], [1000], [3, 5], [96, 10**6], [2, 3, 4], [10**6, 10**6, 10**6]):
        tile = cost.tile_of(sizes)
        assert len(tile) == len(sizes)
        assert all(block & (block - 1) == 0 for block in tile)
        product = 1
        for block in tile:
            product *= block
        assert product <= cost.TILE
