"""Tables of actions: their rows, the rules that let steps run, and the rules that write them."""

import dataclasses
import inspect
import itertools
import json

import pytest

from tritium import Choice, Plan, Skip
from tritium.errors import ConfigError
from tritium.techniques.skip import policies, table


class TestRules:
    @pytest.mark.parametrize(
        ("row", "followed"),
        [
            ("RRR1R1", "RRR1R1"),
            ("1R1R11", "RR1R11"),
            ("R2R2R2", "RRR2R2"),
            ("000000", "R00000"),
            ("BRBB", "RRBB"),
            ("RBAB", "RBAB"),
        ],
    )
    def test_too_little_history_runs(self, row, followed):
        span = (0, 1) if set("AB") & set(row) else None
        assert Skip((row,), span=span).actions() == [followed]

    def test_a_replaced_step_enters_no_history(self):
        assert Skip("RB11R1R1", span=(0, 1)).actions() == ["RBR1R1R1"]

    def test_derive_needs_the_first_branch_and_a_difference(self):
        assert Skip("RDRD").actions(branches=2) == ["RRRR", "RDRD"]
        assert Skip(("RR1R", "DRDD")).actions(branches=2) == ["RR1R", "RRRD"]
        assert Skip(("RRRR", "RDDD")).actions(branches=3) == ["RRRR", "RDDD", "RDDD"]

    def test_a_part_that_begins_later_needs_its_own_history(self):
        assert Skip("RRR1R1R1").actions(begin=3) == ["RR1R1"]
        assert Skip("RRR1R1R1").actions(begin=5, end=7) == ["RR"]

    def test_executions_are_known_before_an_image(self):
        assert Skip.window(steps=28, runs=14).cost(blocks=57) == 14 * 57
        assert Skip.window(steps=28, runs=14).cost(blocks=57, branches=2) == 28 * 57
        assert Skip("RBRB", span=(2, 6)).cost(blocks=7) == 2 * 7 + 2 * 3
        assert Skip("RBRB", span=(2, 100)).cost(blocks=7) == 2 * 7 + 2 * 2


class TestPolicies:
    @pytest.mark.parametrize("order", [0, 1, 2])
    @pytest.mark.parametrize("growth", [0.0, 0.3, 1.0])
    def test_a_window_has_its_runs(self, order, growth):
        for steps in (8, 28, 50):
            for runs in range(5, steps + 1):
                row = Skip.window(steps=steps, runs=runs, first=3, last=2, growth=growth, order=order).rows[0]
                assert len(row) == steps
                assert row.count("R") == runs
                assert row.startswith("RRR")
                assert row.endswith("RR")
                assert set(row) <= {"R", str(order)}

    def test_the_gaps_of_a_window_grow(self):
        row = Skip.window(steps=50, runs=14, first=4, last=1, growth=0.5).rows[0]
        gaps = [len(gap) for gap in row.strip("R").split("R") if gap]
        assert gaps[0] < gaps[-1]
        assert all(later >= earlier - 1 for earlier, later in itertools.pairwise(gaps))

    @pytest.mark.parametrize(
        ("name", "steps", "computed"),
        [("slow", 28, 18), ("medium", 28, 15), ("fast", 28, 11), ("ultra", 28, 8), ("fast", 8, 5), ("slow", 9, 8)],
    )
    def test_step_masks_compute_as_many_steps(self, name, steps, computed):
        assert Skip.like(f"cache-dit:{name}", steps).rows[0].count("R") == computed

    @pytest.mark.parametrize(
        ("name", "steps", "mask"),
        [
            ("slow", 28, "1111111101110011100110010001"),
            ("medium", 28, "1111110110001100011000110001"),
            ("ultra", 28, "1111001000001000000100000001"),
            ("ultra", 50, "11111110001100000000011000000000001100000000000001"),
            ("fast", 9, "111101001"),
            ("medium", 8, "11110101"),
            ("medium", 6, "111001"),
            ("slow", 4, "1101"),
        ],
    )
    def test_step_masks(self, name, steps, mask):
        # Written by cache-dit 1.5.3.
        assert Skip.like(f"cache-dit:{name}", steps).export("cache-dit")["steps_computation_mask"] == [*map(int, mask)]

    def test_magcache_by_hand(self):
        # After the first two steps: 0.98 deviates by 0.02; times 0.97 by 0.049, in sum 0.069; times 0.95 it is too much.
        ratios = [1.0, 1.02, 0.98, 0.97, 0.95, 0.99, 1.0, 1.0, 1.0, 0.99]
        assert Skip.magcache(ratios, threshold=0.07, longest=3, retain=0.2).rows == ("RR00R000R0",)
        assert Skip.magcache(ratios, threshold=0.07, longest=1, retain=0.5, order=1).rows == ("RRRRR1R1R1",)
        assert Skip.magcache([1.0] * 4, threshold=0.0, longest=9, retain=0.0).rows == ("R000",)

    def test_intervals(self):
        assert Skip.blocks(10, 50, every=3, first=10).expanded(17) == ("R" * 10 + "RBBRBBR",)
        assert Skip.attention(0, 4, every=3, first=1, until=5).expanded(7) == ("RRAARAR",)
        assert policies.interval(0, 2, 1, "B") == "RB(R)"


class TestConfig:
    def test_it_is_json_and_back(self):
        for skip in (
            Skip.window(),
            Skip("RRR1", over="sigma", sigmas=(1.0, 0.7, 0.4, 0.1), scheduler="X", on_other="error", loss="PSNR 33 dB"),
            Skip.blocks(1, 3, every=2),
            Skip(adaptive=0.1, order=0),
        ):
            choice = Choice(skip=skip)
            assert Choice(**json.loads(json.dumps(choice.to_dict()))) == choice
            assert eval(repr(skip)) == skip

    def test_a_path_is_a_recipe(self, tmp_path):
        skip = Skip.window(steps=10, runs=6)
        path = tmp_path / "r.json"
        choices = {"transformer": Choice(skip=skip).to_dict(), "vae.decode": Choice().to_dict()}
        path.write_text(json.dumps({"format": 2, "choices": choices}))
        assert Plan(skip=str(path)).techniques == (skip,)
        assert Skip(str(path)) == skip
        choices["transformer_2"] = Choice(skip="RR1R1RRRRR").to_dict()
        path.write_text(json.dumps({"format": 2, "choices": choices}))
        with pytest.raises(ConfigError, match="a table for each of several parts"):
            Skip(str(path))
        path.write_text(json.dumps({"format": 2, "choices": {"vae": {"how": "eager"}}}))
        with pytest.raises(ConfigError, match="skips nothing"):
            Skip(str(path))

    @pytest.mark.parametrize(
        ("call", "message"),
        [
            (Skip, "skip needs a table"),
            (lambda: Skip("RRX"), "'X' is no action"),
            (lambda: Skip("RR("), "repeated and end the row"),
            (lambda: Skip("RR(R1)R"), "repeated and end the row"),
            (lambda: Skip(("RRR", "RR")), "have one number of steps"),
            (lambda: Skip(("RD", "RR")), "derived from no other"),
            (lambda: Skip("RB"), "needs span"),
            (lambda: Skip("RB", span=(3, 3)), "such as"),
            (lambda: Skip("RR1", sigmas=(1.0,)), "a table of 3 steps has 1 sigmas"),
            (lambda: Skip("RR1", over="sigmas"), "did you mean 'sigma'"),
            (lambda: Skip("RR1", on_other="raise"), "valid: 'error', 'run'"),
            (lambda: Skip("RR1", adaptive=0.1), "leave out table or adaptive"),
            (lambda: Skip(adaptive=-1.0), "0 or more"),
            (lambda: Skip("no.json"), "cannot be read"),
            (lambda: Skip.window(steps=8, runs=4), "5 to 8 can"),
            (lambda: Skip.window(first=2, order=2), "need 3 computed steps"),
            (lambda: Skip.window(order=3), "is 0, 1 or 2"),
            (lambda: Skip.like("cache-dit:quick", 28), "no step mask 'quick'"),
            (lambda: Skip.like("cache-dit:fast", 5), "4, 6, and 8 or more"),
            (lambda: Skip.like("teacache", 28), "no step masks like"),
            (lambda: Skip.blocks(0, 2, every=1), "2 steps or longer"),
            (lambda: Skip("RRR1").cost(9), "no plan for 9 steps"),
            (lambda: Skip("RRR1").export("cachedit"), "did you mean 'cache-dit'"),
            (lambda: Plan(skip=True), "Plan.skip: skip needs a table"),
            (lambda: Plan(skip=Skip.attention(0, 1, every=2)), "cannot be compiled; give it to that part"),
            (
                lambda: Choice(skip=Skip.blocks(0, 1, every=2), quantize={"linear": "fp8", "steps": {"first": 2}}),
                "quantize with steps runs two programs",
            ),
        ],
    )
    def test_wrong_settings_raise_in_one_line(self, call, message):
        with pytest.raises(ConfigError, match=message) as raised:
            call()
        assert "\n" not in str(raised.value)

    def test_exports(self):
        skip = Skip(("RRR1R1", "RRRDRD"))
        assert skip.export("cache-dit")["steps_computation_mask"] == [1, 1, 1, 1, 1, 1]
        assert Skip("RR(R1)").export("cache-dit", 6)["steps_computation_mask"] == [1, 1, 1, 0, 1, 0]
        assert "[1, 1, 1, 0]" in Skip("RRR1").export("sglang")

    def test_every_field_is_documented(self):
        for field in dataclasses.fields(Skip):
            assert f"\n    {field.name}: " in inspect.getdoc(Skip)

    def test_rows_for_other_numbers_of_steps(self):
        assert table.expanded("RR(R1)", 2) == "RR"
        assert Skip("RRR1").expanded(5) is None
