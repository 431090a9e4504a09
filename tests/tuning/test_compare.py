"""Comparisons of providers in a compiled block and alone, and the rows they write."""

import functools
import math

import pytest
import torch

import tritium
from support.report_samples import kernel
from tritium import ops, tuning
from tritium.compiler.compile import compile_pinned
from tritium.ops.op import draw_from
from tritium.report.observation import KernelTiling, ReductionChoice
from tritium.report.records import GraphRecord
from tritium.tuning import Key, Verdict, compare
from tritium.tuning.verdict import Loop


class Quiet:
    """No other process uses the CPU: the load of a test machine does not decide a test."""

    disturbed, foreign_cores = False, 0.0

    def read(self):
        return self


class Busy(Quiet):
    disturbed, foreign_cores = True, 1.5


KEY = Key.of("rope", {"tokens": 64, "width": 8, "mode": "complex"}, torch.float32)


def measured(path, **options):
    told = []
    (row,) = compare.measure_keys([KEY], "cpu", path, lambda *what: told.append(what), compile_pinned, **options)
    assert told == [(KEY, 0, 1)]
    return row


def test_a_verdict_of_a_busy_cpu_is_not_kept(tmp_path, monkeypatch):
    found = Verdict(KEY, "aten", {"inductor": 2.0, "aten": 1.0})
    monkeypatch.setattr(compare, "compare_in_block", lambda *given: found)
    monkeypatch.setattr(compare.measure, "LoadMeter", Busy)
    assert measured(tmp_path / "t.json").remarks == {compare.DISTURBED: "1.5 cores were taken by others"}
    assert not (tmp_path / "t.json").exists()


def test_the_host_is_timed_by_calls_in_a_row(monkeypatch):
    """No call waits for the one before: the device is waited for between bursts alone, and the runs take turns."""
    events = []
    monkeypatch.setattr(compare.device, "synchronize", lambda device_type: events.append("wait"))
    names = ("inductor", "triton")
    found = compare._issue_us({name: functools.partial(events.append, name) for name in names}, "cuda")
    assert found.keys() == set(names)
    bursts = [burst.split() for burst in " ".join(events).split("wait") if burst.split()]
    assert len(bursts) == len(names) * compare.ISSUE_ROUNDS
    assert all(burst in [[name] * compare.ISSUED_CALLS for name in names] for burst in bursts)
    assert bursts[0] == bursts[3] != bursts[1]


@pytest.mark.parametrize(
    ("form", "elements", "looped"),
    [
        ("looped", 3072, Loop("width", 5)),
        ("persistent", 3072, None),
        # A row that Inductor always holds, and one whose length is not a size of the shape.
        ("looped", 768, None),
        ("looped", 5120, None),
    ],
)
def test_a_row_names_the_size_that_inductor_looped_over(form, elements, looped):
    width = elements if elements < 5000 else 128
    key = Key("residual_norm_modulate", f"tokens=4096 width={width} norm=layer", "bfloat16")
    reduction = ReductionChoice(form, "looped", "measured", elements=elements, reads=5)
    tilings = [None, *(KernelTiling({}, "coalesced", "", reduction=choice) for choice in (None, reduction))]
    kernels = [kernel(f"triton_{index}", tiling=tiling) for index, tiling in enumerate(tilings)]
    record = GraphRecord("0/0", "block", "inductor", "cuda", kernels=kernels)
    assert compare._loop(key, [record]) == looped


@pytest.mark.codegen
def test_a_comparison_on_this_machine(tmp_path, monkeypatch):
    monkeypatch.setattr(compare.measure, "LoadMeter", Quiet)
    row = measured(tmp_path / "t.json", seconds=0.05)
    assert set(row.ms) == {"inductor", "aten"}
    assert all(ms > 0 for ms in (*row.ms.values(), *row.alone_us.values()))
    assert row.provider == row.site(replayed=True).choose()
    # A CPU launches nothing.
    assert row.issue_us == {}
    # x and result of 64 rows of 8 floats, and the table of 4 tokens.
    assert row.bytes == 2 * 64 * 8 * 4 + 4 * 4 * 8
    assert dict(tuning.load(tmp_path / "t.json").rows) == {KEY: row}


def test_a_failed_measurement_is_a_row_with_the_reason(tmp_path, monkeypatch):
    def broken(*arguments):
        raise RuntimeError("no such luck\nat all")

    monkeypatch.setattr(compare, "compare_in_block", broken)
    monkeypatch.setattr(compare.measure, "LoadMeter", Quiet)
    row = measured(tmp_path / "t.json")
    assert row.provider == "inductor"
    assert row.why() == "not measured: RuntimeError: no such luck"


STANDARD = [
    Key.of(op.name, shape, torch.float32)
    for op in ops.catalog().values()
    if op.trial is not None
    for shape in op.trial.standard
]


def kind(key):
    """Return what decides the block of a key, apart from its sizes."""
    return key.op, *((name, value) for name, value in key.sizes().items() if isinstance(value, str) or name == "parts")


def elements(key):
    return math.prod(value for value in compare.few(key.sizes()).values() if isinstance(value, int))


SMALLEST = {kind(key): key for key in sorted(STANDARD, key=elements, reverse=True)}


@pytest.mark.parametrize(
    "key",
    [pytest.param(key, marks=() if SMALLEST[kind(key)] is key else pytest.mark.thorough) for key in STANDARD],
    ids=lambda key: f"{key.op}, {key.shape}",
)
def test_blocks_have_a_site_of_their_op(key):
    """With few tokens, on the CPU, with engine `eager`: each block has one fused site of its op."""
    op, small = ops.catalog()[key.op], compare.few(key.sizes())
    draw = draw_from(torch.float32, "cpu")
    block, inputs = op.trial.block(small, draw)
    with torch.inference_mode():
        config = tritium.CompilationConfig(engine="eager")
        compiled = torch.compile(block, backend=tritium.Backend(config), fullgraph=True)
        torch.testing.assert_close(compiled(*inputs), block(*inputs), rtol=1e-3, atol=1e-3)
    sites = [site for record in tritium.explain(compiled).records for site in record.sites if site.fusion == key.op]
    assert [site.outcome for site in sites] == ["fused"], sites
    assert dict(op.trial.shape(op.bind(**op.trial.alone(small, draw)))) == small


def test_standard_keys_are_those_that_can_be_compared_here():
    keys = compare.standard_keys([], [torch.float32], "cpu")
    assert {key.op for key in keys} == {"cat_linear", "rope"}
    assert all(key.dtype == "float32" for key in keys)
