"""Which form a reduction gets: by the rules, by a table, and in the code that Inductor generates for a GPU."""

import dataclasses
import importlib
import json

import pytest
import torch
import torch.nn.functional as F

import tritium
from support import scripts
from support.codegen import generated, launches, sources
from tiling.patterns import TRANSFORMER
from tritium import compat
from tritium.tiling import session
from tritium.tiling.policy import OFF, TilingPolicy
from tritium.tiling.reductions import Reduction, cut, walk
from tritium.tuning import Limit, Machine, ReductionLimits, tables
from tritium.tuning.tables import INDUCTOR_LIMITS

PERSISTENT = ReductionLimits(persistent_up_to=(Limit(8, 16384),), whole_up_to=16384)
WHOLE = ReductionLimits(whole_up_to=16384)


def bf16(*shape):
    return torch.empty(*shape, dtype=torch.bfloat16)


def modulated_norm(x, scale, shift):
    return F.layer_norm(x, (x.shape[-1],)) * (1 + scale) + shift


def group_norm(x, weight, bias):
    return F.silu(F.group_norm(x, 32, weight, bias))


def rows(count, elements):
    return modulated_norm, (bf16(count, elements), bf16(elements), bf16(elements))


GROUPS = group_norm, (bf16(1, 128, 512, 512), bf16(128), bf16(128))


def with_table(case, table, **others):
    """The observer of generated kernels, and the choice for each kernel that reduces."""
    function, inputs = case
    policy = dataclasses.replace(OFF, choose_reduction=True, reduction_limits=table)
    with session.active(policy) as decisions:
        observer = generated(function, *inputs, **others)
    return observer, [kernel.reduction for kernel in decisions.kernels if kernel.reduction is not None]


def kinds(observer):
    """`red`, `per` or `poi` for each launch, as Inductor names it."""
    return [name.split("_")[1] for name in launches(observer)]


@pytest.fixture
def own_tables(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "SHIPPED", tmp_path / "shipped")
    monkeypatch.setattr(tables, "user_folder", lambda: tmp_path / "own")


def write(folder, device, limits):
    tables.store(folder / Machine(device).file_name, Machine(device), reductions=limits)


class TestRules:
    ROW = Reduction(rows=4096, elements=5120, reads=3, bytes_per_row=30_720, looped_bytes_per_row=40_960)

    def test_without_a_table_rows_are_walked_as_inductor_walks_them(self):
        for elements in (768, 1536, 16384):
            for inductor in ("persistent", "looped"):
                assert walk(dataclasses.replace(self.ROW, elements=elements), inductor).form == inductor

    def test_a_table_raises_the_limit(self):
        table = ReductionLimits(persistent_up_to=(Limit(2, 8192), Limit(4, 4096)))
        forms = [
            walk(dataclasses.replace(self.ROW, elements=elements, reads=reads), "looped", table).form
            for elements, reads in [(8192, 1), (8192, 2), (8192, 3), (4096, 3), (1536, 5)]
        ]
        assert forms == ["persistent", "persistent", "looped", "persistent", "looped"]
        choice = walk(self.ROW, "looped", PERSISTENT)
        assert choice.differs
        assert choice.reason == (
            "rows of 5,120 elements, 3 loads: 30 KiB are read once instead of 40 KiB in passes, measured faster"
        )

    @pytest.mark.parametrize(
        ("change", "reason"),
        [
            ({"elements": None}, "dynamic"),
            ({"is_contiguous": False}, "Inductor's choice is kept"),
            ({"elements": 32768}, "above the measured limit of 16,384"),
            ({"looped_bytes_per_row": 30_720}, "read once in either form"),
            ({"reads": 9}, "nothing was measured"),
        ],
    )
    def test_what_keeps_a_loop(self, change, reason):
        choice = walk(dataclasses.replace(self.ROW, **change), "looped", PERSISTENT)
        assert not choice.differs
        assert reason in choice.reason

    @pytest.mark.parametrize(
        ("elements", "parts", "table", "form"),
        [
            (8192, 1, INDUCTOR_LIMITS, "looped"),
            (8193, 2, INDUCTOR_LIMITS, "split"),
            (1 << 20, 17, INDUCTOR_LIMITS, "split"),
            (12288, 2, WHOLE, "looped"),
            (16385, 3, WHOLE, "split"),
        ],
    )
    def test_cuts(self, elements, parts, table, form):
        choice = cut(128, elements, parts, table)
        assert choice.form == form
        assert choice.parts == (parts if form == "split" else 1)


class TestGeneratedCode:
    """Triton for an H200, which need not be there."""

    @pytest.mark.parametrize("elements", [1536, 5120, 16384])
    def test_persistent_rows_have_no_loop(self, elements):
        case = rows(4096, elements)
        looped, (before,) = with_table(case, INDUCTOR_LIMITS)
        persistent, (after,) = with_table(case, PERSISTENT)
        assert (kinds(looped), kinds(persistent)) == (["red"], ["per"])
        assert "for r0_offset in" in sources(looped)[0]
        assert "for r0_offset in" not in sources(persistent)[0]
        assert (before.form, before.inductor) == ("looped", "looped")
        assert (after.form, after.inductor, after.reads) == ("persistent", "looped", 3)

    def test_few_long_rows_stay_one_kernel(self):
        case = rows(128, 12288)
        assert kinds(generated(case[0], *case[1])) == ["red", "per", "poi"]
        observer, (choice,) = with_table(case, WHOLE)
        assert kinds(observer) == ["red"]
        assert (choice.form, choice.inductor) == ("looped", "split")
        assert "measured faster whole" in choice.reason
        observer, (choice,) = with_table(case, PERSISTENT)
        assert kinds(observer) == ["per"]
        assert (choice.form, choice.inductor) == ("persistent", "split")

    @pytest.mark.parametrize(
        ("case", "dynamic"),
        [
            *(((pattern.function, pattern.inputs()), None) for pattern in TRANSFORMER.values()),
            *(((pattern.function, pattern.inputs()), pattern.dynamic) for pattern in TRANSFORMER.values()),
            (GROUPS, None),
            (rows(4096, 1536), None),
            (rows(4096, 16384), None),
            # Rows are cut as Inductor does it where sizes are dynamic.
            ((lambda x: F.layer_norm(x, (x.shape[-1],)), (bf16(128, 12288),)), {0: (1,)}),
        ],
    )
    def test_without_measurements_code_is_inductors(self, case, dynamic):
        plain = generated(case[0], *case[1], dynamic=dynamic)
        observer, choices = with_table(case, INDUCTOR_LIMITS, dynamic=dynamic)
        assert sources(observer) == sources(plain)
        assert not any(choice.differs for choice in choices)

    def test_rows_of_dynamic_length_are_inductors(self):
        case = (lambda x: F.layer_norm(x, (x.shape[-1],))), (bf16(4096, 3072),)
        observer, choices = with_table(case, PERSISTENT, dynamic={0: (1,)})
        assert kinds(observer) == ["red"]
        assert choices == []

    def test_a_dynamic_number_of_rows_changes_nothing(self):
        observer, (choice,) = with_table(rows(4096, 3072), PERSISTENT, dynamic={0: (0,)})
        assert kinds(observer) == ["per"]
        assert choice.rows == 4096

    @pytest.mark.parametrize("settings", [{"triton.persistent_reductions": False}, {"triton.multi_kernel": 1}])
    def test_the_user_s_settings_go_first(self, settings):
        case = rows(4096, 3072)
        plain = generated(case[0], *case[1], **settings)
        observer, choices = with_table(case, PERSISTENT, **settings)
        assert sources(observer) == sources(plain)
        assert choices == []

    @pytest.mark.skipif(compat.versions.TORCH < (2, 15), reason="strict numerics came with torch 2.15")
    def test_a_fixed_order_of_additions_stays(self, monkeypatch):
        """Persistent rows would be added in another order than `numerics="strict"` promises."""
        lowering = importlib.import_module("torch._inductor.lowering")
        normalize = lambda x: x / x.sum(-1, keepdim=True)  # noqa: E731
        case = normalize, (torch.empty(4096, 3072),)
        assert kinds(with_table(case, PERSISTENT)[0]) == ["per"]
        # Triton 3.9 has no such order yet.
        monkeypatch.setattr(lowering, "has_triton_reduction_ordering", lambda: True)
        plain = generated(normalize, *case[1], numerics="strict")
        observer, choices = with_table(case, PERSISTENT, numerics="strict")
        assert "strict_reduction_rblock" in sources(plain)[0]
        assert sources(observer) == sources(plain)
        assert choices == []

    @pytest.mark.skipif(compat.versions.TORCH < (2, 15), reason="nested reductions are off before torch 2.15")
    def test_nested_reductions_stay_as_inductor_made_them(self):
        def quantized(x):
            y = F.rms_norm(x[:, 1:1025], (1024,))
            return y, y.view(y.shape[0], -1, 32).abs().amax(-1)

        metrics = importlib.import_module("torch._inductor.metrics")
        before = metrics.codegen_nested_reduction
        case, sizes = (quantized, bf16(4096, 2000)), {0: (0, 1)}
        plain = generated(*case, dynamic=sizes)
        assert metrics.codegen_nested_reduction == before + 1
        assert "ks0" in sources(plain)[0]
        with session.active(TilingPolicy()) as decisions:
            assert sources(generated(*case, dynamic=sizes)) == sources(plain)
        assert list(decisions.kernels) == []

    def test_mistakes_of_ours_keep_inductor_s_choice(self, monkeypatch):
        def broken(_):
            raise AssertionError("no statistics")

        monkeypatch.setattr(compat.generated, "reduction_reads", broken)
        observer, (choice,) = with_table(rows(4096, 3072), PERSISTENT)
        assert kinds(observer) == ["red"]
        assert choice.reason == "the rules failed: AssertionError: no statistics"

    def test_off_is_inductor(self):
        case = rows(128, 12288)
        plain = generated(case[0], *case[1])
        for policy in (TilingPolicy(choose_reduction=False, reduction_limits=PERSISTENT), OFF):
            with session.active(policy) as decisions:
                assert sources(generated(case[0], *case[1])) == sources(plain)
            assert all(kernel.reduction is None for kernel in decisions.kernels)


class TestReached:
    def test_by_autofuse(self, own_tables):
        case = rows(128, 12288)
        write(tables.SHIPPED, Machine.of("cuda").name, WHOLE)
        with tritium.autofuse.enabled() as declined:
            assert declined is None
            assert kinds(generated(case[0], *case[1])) == ["red"]
            (kernel,) = tritium.autofuse.decisions()["kernels"]
        assert kernel["reduction"]["form"] == "looped"
        assert kernel["reduction"]["inductor"] == "split"
        with tritium.autofuse.enabled(choose_reduction=False):
            assert kinds(generated(case[0], *case[1])) == ["red", "per", "poi"]


CURRENT = tables.current_versions()
HELD = ReductionLimits(persistent_up_to=(Limit(3, 8192),), versions=CURRENT)


class TestTables:
    def test_the_device_s_limits_are_used(self, own_tables, monkeypatch):
        monkeypatch.setattr(tables, "_machine", lambda where: Machine("Some GPU"))
        case = rows(4096, 3072)
        with tritium.autofuse.enabled():
            assert kinds(generated(case[0], *case[1])) == ["red"]
        write(tables.SHIPPED, "Some GPU", HELD)
        write(tables.SHIPPED, "Another GPU", ReductionLimits(whole_up_to=4096))
        with tritium.autofuse.enabled():
            assert kinds(generated(case[0], *case[1])) == ["per"]
        assert tables.reduction_limits(Machine("Another GPU")) == ReductionLimits(whole_up_to=4096)
        assert tables.reduction_limits(Machine("A third GPU")) == INDUCTOR_LIMITS

    def test_own_limits_come_first_if_they_are_of_this_torch(self, own_tables):
        write(tables.SHIPPED, "g", HELD)
        write(tables.user_folder(), "g", ReductionLimits(whole_up_to=1, versions={"torch": "1.0"}))
        assert tables.reduction_limits(Machine("g")).limit(3) == 8192
        write(tables.user_folder(), "g", ReductionLimits(whole_up_to=1, versions=CURRENT))
        assert tables.reduction_limits(Machine("g")).whole_up_to == 1

    def test_tables_are_in_the_cache_key(self, own_tables):
        base = TilingPolicy()
        off = TilingPolicy(choose_reduction=False)
        keys = {base.identity, off.identity, TilingPolicy(reduction_limits=PERSISTENT).identity}
        write(tables.SHIPPED, "g", HELD)
        keys.add(TilingPolicy().identity)
        write(tables.user_folder(), "g", ReductionLimits(whole_up_to=1, versions=CURRENT))
        keys.add(TilingPolicy().identity)
        assert len(keys) == 5
        assert TilingPolicy(choose_reduction=False).identity == off.identity


@pytest.fixture(scope="module")
def sweep():
    return scripts.load("benchmarks/reductions.py")


def timing(rows, elements, reads, **ms):
    return {"rows": rows, "elements": elements, "reads": reads, "ms": ms}


class TestSweep:
    def test_shipped_limits_follow_from_committed_times(self, sweep):
        shipped = {path.stem: tables.load(path).reductions for path in tables.SHIPPED.glob("nvidia-*.json")}
        measured = json.loads((scripts.ROOT / "benchmarks/results/reductions/h200.json").read_text())
        assert shipped == {"nvidia-h200": sweep.limits_of(measured["rows"], {"torch": "2.11"})}

    @pytest.mark.parametrize("name", ["rms_norm", "modulated_norm", "few_rows", "group_norm", "gated_norm"])
    def test_every_form_can_be_forced(self, sweep, name):
        """As the sweep compiles them; groups of a size that this machine can hold."""
        case = next(case for case in sweep.cases(quick=True) if case.name == name)
        if name == "group_norm":
            case = dataclasses.replace(case, shape=(1, 128, 512, 512), elements=1 << 20)
        inputs = [bf16(*shape) for shape in (case.shape, *case.others)]
        code = set()
        for form in case.forms:
            policy = dataclasses.replace(OFF, choose_reduction=True, reduction_limits=sweep.FORCED[form])
            with session.active(policy) as decisions:
                observer = generated(case.function, *inputs)
            assert sweep.taken(decisions, case, form) is not None, form
            others = [other for other in sweep.FORCED if other not in (form, "persistent", "looped")]
            assert not any(sweep.taken(decisions, case, other) for other in others), form
            code.add("".join(sources(observer)))
        assert len(code) == len(case.forms)

    def test_a_table_follows_from_what_was_measured(self, sweep):
        timings = [
            timing(4096, 1536, 2, persistent=0.95, looped=1.0),
            timing(4096, 3072, 2, persistent=1.005, looped=1.0),
            timing(4096, 5120, 2, persistent=0.9, looped=1.0),
            timing(4096, 8192, 2, persistent=1.2, looped=1.0),
            # Faster again, but past a row where it is slower.
            timing(4096, 16384, 2, persistent=0.5, looped=1.0),
            timing(4096, 1536, 3, persistent=1.0, looped=1.0),
            timing(128, 12288, 3, looped=0.8, split=1.0),
            timing(128, 16384, 3, looped=1.1, split=1.0),
            timing(32, 1 << 21, 1, looped=9.0, split=1.0),
        ]
        limits = sweep.limits_of(timings, {"torch": "2.11"})
        assert limits.to_dict() == {
            "versions": {"torch": "2.11"},
            "persistent_up_to": ({"reads": 2, "elements": 5120}, {"reads": 3, "elements": 1024}),
            "whole_up_to": 12288,
        }
        assert ReductionLimits.from_dict(json.loads(json.dumps(limits.to_dict()))) == limits
        assert sweep.limits_of([], {}) == INDUCTOR_LIMITS
