"""`vector.h`: what kernels in C++ are made of, called from a kernel of its own."""

import platform

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tritium.ops import cpp

pytestmark = pytest.mark.skipif(cpp.cannot_run() is not None, reason=str(cpp.cannot_run()))

SOURCE = """
#include "vector.h"

template <class Work>
void over(const float* x, float* out, int64_t count, Work work) {
  each(count, [&](int64_t i, auto lanes) { store(work(load(x + i, lanes)), out + i, lanes); });
}

extern "C" {
void narrow(const float* x, bfloat16* out, int64_t count) {
  each(count, [&](int64_t i, auto lanes) { store(load(x + i, lanes), out + i, lanes); });
}
void narrow_one_by_one(const float* x, bfloat16* out, int64_t count) {
  for (int64_t i = 0; i < count; ++i) put(x[i], out[i]);
}
void keep_narrow(const float* x, bfloat16* out, float* kept, int64_t count) {
  each(count, [&](int64_t i, auto lanes) { store(keep(load(x + i, lanes), out + i, lanes), kept + i, lanes); });
}
void widen(const bfloat16* x, float* out, int64_t count) {
  each(count, [&](int64_t i, auto lanes) { store(load(x + i, lanes), out + i, lanes); });
}
void twist(const float* x, float* first, float* second, float* cross, int64_t count) {
  over(x, first, count, firsts);
  over(x, second, count, seconds);
  over(x, cross, count, crossed);
}
void add(const float* x, float* out, int64_t count) {
  floats total = {};
  each(count, [&](int64_t i, auto lanes) { total += only(load(x + i, lanes) + 1.0f, lanes); });
  *out = sum(total);
}
}
"""


# What one instruction takes is another number of lanes on other processors; this one can do as if it were older.
PROCESSORS = ["native", "haswell", "x86-64"] if platform.machine() == "x86_64" else ["native"]


@pytest.fixture(scope="module", params=PROCESSORS)
def kernel(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("vector")
    (folder / "kernel.cpp").write_text(SOURCE)
    flags = tuple(f"-march={request.param}" if flag == "-march=native" else flag for flag in cpp.FLAGS)

    def call(name, *arguments):
        types = tuple(cpp.POINTER if isinstance(value, torch.Tensor) else cpp.INTEGER for value in arguments)
        values = [value.data_ptr() if isinstance(value, torch.Tensor) else value for value in arguments]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cpp, "FLAGS", flags)
            cpp.function(folder / "kernel.cpp", name, types)(*values)

    return call


def every_kind_of_number():
    """Numbers of every size, those halfway between two of bfloat16, infinities, and NaN with a full mantissa."""
    bits = [torch.arange(first, 2**32, step) for first, step in ((0, 65_521), (2**15, 2**16), (2**16 - 1, 2**16))]
    return torch.cat(bits).to(torch.int32).view(torch.float32)


def same(actual, expected):
    return torch.equal(actual.isnan(), expected.isnan()) and torch.equal(actual.nan_to_num(), expected.nan_to_num())


@pytest.mark.parametrize("name", ["narrow", "narrow_one_by_one"])
def test_bfloat16_is_rounded_to_the_nearest_even(kernel, name):
    x = every_kind_of_number()
    out = torch.empty(x.shape, dtype=torch.bfloat16)
    kernel(name, x, out, x.numel())
    assert same(out, x.bfloat16())


def test_what_is_kept_is_what_was_stored(kernel):
    x = every_kind_of_number()
    out, kept = torch.empty(x.shape, dtype=torch.bfloat16), torch.empty(x.shape)
    kernel("keep_narrow", x, out, kept, x.numel())
    assert same(out, x.bfloat16())
    assert same(kept, out.float())


def test_every_bfloat16_is_read(kernel):
    x = torch.arange(2**16).to(torch.int16).view(torch.bfloat16)
    out = torch.empty(x.shape)
    kernel("widen", x, out, x.numel())
    assert same(out, x.float())


@settings(deadline=None)
@given(count=st.integers(0, 70))
def test_nothing_is_read_or_written_beyond_the_end(kernel, count):
    x = torch.arange(1.0, 81.0)
    out = torch.full((80,), -1.0, dtype=torch.bfloat16)
    kernel("narrow", x, out, count)
    assert torch.equal(out[:count], x[:count].bfloat16())
    assert (out[count:] == -1).all()
    x[count:] = float("nan")
    total = torch.zeros(1)
    kernel("add", x, total, count)
    # One is added to every number, and to no lane without one.
    assert total.item() == x[:count].sum() + count


@settings(deadline=None)
@given(pairs=st.integers(0, 40))
def test_pairs(kernel, pairs):
    x = torch.randn(2 * pairs, generator=torch.Generator().manual_seed(pairs))
    made = [torch.empty_like(x) for _ in range(3)]
    kernel("twist", x, *made, x.numel())
    a, b = x.view(-1, 2).unbind(1)
    for out, lanes in zip(made, ((a, a), (b, b), (-b, a)), strict=True):
        assert torch.equal(out.view(-1, 2), torch.stack(lanes, 1))
