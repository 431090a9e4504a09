"""The provider of a site from tables: measured, predicted from near shapes, or Inductor."""

import pytest

from tritium import compat, tuning
from tritium.ops import INDUCTOR
from tritium.tuning import Key, Machine, Verdict
from tritium.tuning.verdict import Loop

GPU = Machine("Some GPU", "9.0", 132)
LIKE = Machine("Another GPU", "9.0", 130)


def key(tokens=4096, width=3072, dtype="bfloat16", norm="layer", op="some_norm"):
    return Key(op, f"tokens={tokens} width={width} norm={norm}", dtype)


def verdict(of, inductor, triton, looped=False, host=None):
    """A row whose neighbours take 20 us."""
    return Verdict(
        of,
        INDUCTOR,
        {"inductor": (inductor + 20) / 1e3, "triton": (triton + 20) / 1e3},
        alone_us={"inductor": inductor, "triton": triton},
        issue_us=host or {"inductor": 100.0, "triton": 100.0},
        looped=Loop("width", 5) if looped else None,
        versions={"torch": compat.versions.version_text()},
    )


@pytest.fixture
def shipped(tmp_path, monkeypatch):
    monkeypatch.setattr(tuning.tables, "SHIPPED", tmp_path / "shipped")
    monkeypatch.setattr(tuning.tables, "user_folder", lambda: tmp_path / "own")

    def add(*rows, folder="shipped", machine=GPU):
        tuning.store(tmp_path / folder / tuning.Machine(machine.name).file_name, machine, rows)

    tuning.forget()
    yield add
    tuning.forget()


def decide(of, able=("triton",), machine=GPU, looped_above=1 << 40, **options):
    return tuning.decide(
        machine, of, able, tuning.ReductionLimits(persistent_up_to=(tuning.Limit(9, looped_above),)), **options
    )


class TestMeasured:
    def test_a_row_of_this_machine_comes_first(self, shipped):
        shipped(verdict(key(), 40.0, 20.0))
        decision = decide(key())
        assert decision.provider == "triton"
        assert "1.50x against Inductor in a block" in decision.why
        assert decision.why.endswith("shipped")
        shipped(verdict(key(), 20.0, 40.0), folder="own")
        decision = decide(key())
        assert decision.provider == INDUCTOR
        assert decision.why.startswith("left to Inductor: measured")
        assert decision.why.endswith("on this machine")

    def test_a_provider_that_cannot_take_the_site_is_not_chosen(self, shipped):
        shipped(verdict(key(), 40.0, 20.0))
        decision = decide(key(), able=("aten",))
        assert decision.provider == INDUCTOR
        assert "provider 'triton' is fastest for such shapes and cannot take this one" in decision.why

    def test_the_host_counts_unless_the_graph_is_replayed(self, shipped):
        shipped(verdict(key(), 40.0, 30.0, host={"inductor": 100.0, "triton": 160.0}))
        assert decide(key()).provider == INDUCTOR
        assert "host +60.0 us, measured" in decide(key()).why
        assert decide(key(), replayed=True).provider == "triton"
        assert "the host's time does not count" in decide(key(), replayed=True).why


class TestPredicted:
    @pytest.fixture(autouse=True)
    def _rows(self, shipped):
        # Rates that grow with the width, the owned kernel's less than Inductor's.
        shipped(
            verdict(key(tokens=4096, width=2048), 40.0, 20.0),
            verdict(key(tokens=4096, width=4096), 60.0, 38.0),
            verdict(key(tokens=4096, width=8192), 80.0, 79.0),
            verdict(key(tokens=4096, width=2048, norm="rms"), 40.0, 39.0),
            verdict(key(tokens=4096, width=4096, norm="rms"), 80.0, 78.5),
        )

    def test_a_shape_between_measured_ones(self):
        decision = decide(key(width=3072))
        assert decision.provider == "triton"
        assert decision.why.startswith("predicted 1.6")
        assert "from 3 measured shapes (nearest tokens=4096 width=4096 norm=layer;" in decision.why

    def test_less_than_three_percent_is_inductor_s(self):
        decision = decide(key(width=3072, norm="rms"))
        assert decision.provider == INDUCTOR
        assert decision.why.startswith("left to Inductor: predicted 1.0")

    @pytest.mark.parametrize(
        "of",
        [
            *({"width": 256}, {"width": 65536}, {"tokens": 1 << 20}, {"tokens": 16}),
            *({"norm": "group"}, {"dtype": "float32"}, {"op": "another_norm"}),
        ],
        ids=str,
    )
    def test_nothing_is_predicted_far_from_measured_shapes(self, of):
        decision = decide(key(**of))
        assert decision.provider == INDUCTOR
        assert decision.why.startswith("left to Inductor: no")
        assert decision.why.endswith("`tritium tune` measures")

    def test_the_other_half_precision_has_the_same_times(self):
        assert decide(key(width=3072, dtype="float16")) == decide(key(width=3072))

    def test_launches_of_the_nearest_shape_count(self, shipped):
        shipped(verdict(key(width=4096), 60.0, 38.0, host={"inductor": 100.0, "triton": 160.0}))
        assert decide(key(width=3072)).provider == INDUCTOR
        assert decide(key(width=3072), replayed=True).provider == "triton"

    def test_kernels_at_their_floor_have_no_rate(self, shipped):
        shipped(verdict(key(tokens=64, width=1024), 2.0, 1.6))
        assert "from 3 measured shapes" in decide(key(width=3072)).why

    def test_a_cpu_is_not_predicted(self):
        assert decide(key(width=3072), predicts=False).provider == INDUCTOR
        assert decide(key(width=2048), predicts=False).provider == "triton"


class TestOtherDevices:
    def test_a_gpu_with_the_same_rates_is_predicted(self, shipped):
        shipped(verdict(key(), 40.0, 20.0))
        decision = decide(key(), machine=LIKE)
        assert decision.provider == "triton"
        assert decision.why.startswith("predicted")
        assert decision.why.endswith("measured on Some GPU")
        assert tuning.like(LIKE) == GPU

    @pytest.mark.parametrize(
        "machine",
        [Machine("x", "8.0", 132), Machine("x", "9.0", 78), Machine("x", "9.0"), Machine("a cpu")],
        ids=["another capability", "fewer multiprocessors", "unknown multiprocessors", "nothing known"],
    )
    def test_any_other_device_is_left_to_inductor(self, shipped, machine):
        shipped(verdict(key(), 40.0, 20.0))
        decision = decide(key(), machine=machine)
        assert decision.provider == INDUCTOR
        assert f"nothing was measured for some_norm on {machine.name}; `tritium tune` measures" in decision.why
        assert tuning.like(machine) is None


class TestForms:
    """Rows that Inductor walked over say nothing about rows that it holds in registers, and the other way round."""

    @pytest.fixture(autouse=True)
    def _rows(self, shipped):
        shipped(
            verdict(key(width=768), 20.0, 22.0),
            verdict(key(width=2048), 40.0, 20.0, looped=True),
            verdict(key(width=3072), 60.0, 30.0, looped=True),
        )

    def test_rows_are_of_the_form_of_the_site(self):
        assert decide(key(width=3072), looped_above=1024).provider == "triton"
        assert "from 2 measured shapes" in decide(key(width=2560), looped_above=1024).why
        decision = decide(key(width=1024), looped_above=1024)
        assert decision.provider == INDUCTOR
        assert "from 1 measured shape " in decision.why

    def test_a_measured_row_of_the_other_form_does_not_hold(self):
        decision = decide(key(width=3072), looped_above=8192)
        assert decision.provider == INDUCTOR
        assert "from 1 measured shape " in decision.why
        # Without a row of the form Inductor keeps the site.
        decision = decide(key(width=4096), looped_above=8192)
        assert decision.provider == INDUCTOR
        assert "measured against another form of Inductor's reduction" in decision.why
