"""The tables that ship: their numbers, predictions from them, and the providers of SDXL's shapes."""

import dataclasses
import functools
import json
import math
import statistics
from collections import Counter

import pytest
import torch

import tritium
from support.codegen import generated, launches
from tritium import compat, envs, fusions, ops, tuning
from tritium.compiler.passes.fuse import fuse
from tritium.ops import INDUCTOR
from tritium.passes import PassContext
from tritium.tiling import session
from tritium.tiling.policy import OFF
from tritium.tuning import Key, Machine
from tritium.tuning.choice import predict
from tritium.tuning.verdict import MARGIN

H200 = Machine("NVIDIA H200", "9.0", 132)
TABLE = tuning.tables.SHIPPED / tuning.Machine(H200.name).file_name
ROWS = {key: row for key, row in tuning.load(TABLE).rows.items() if row.in_block}
LIMITS = tuning.tables.reduction_limits(H200)

SHIPPED = sorted(tuning.tables.SHIPPED.glob("*.json"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_tables_say_what_their_numbers_say(path):
    table = tuning.load(path)
    assert table.damage is None
    assert table.machine.name
    assert table.machine.capability
    assert table.machine.multiprocessors
    assert len(table.rows) == len(json.loads(path.read_text())["rows"]) > 0
    for key, row in tuning.tables.shipped_rows(table.machine).items():
        assert key.op in ops.catalog()
        assert row.provider == row.site().choose(), key
        assert set(row.ms) <= {INDUCTOR, *ops.providers(ops.catalog()[key.op])}
        # The host's time is measured or counted for every provider.
        assert row.ms.keys() == (row.issue_us or row.launches).keys()
        assert row.bytes > 0
        assert row.versions["torch"]


class TestLeaveOneOut:
    """Each row predicted from the others of its form."""

    @staticmethod
    def predicted(replayed=False):
        for key, row in ROWS.items():
            others = [other for name, other in ROWS.items() if name != key and bool(other.looped) == bool(row.looped)]
            yield row, predict(key, others, replayed=replayed)

    @pytest.mark.parametrize("replayed", [False, True], ids=["launched", "replayed"])
    def test_decisions_agree_or_lose_less_than_the_margin(self, replayed):
        for row, prediction in self.predicted(replayed):
            if prediction is None:
                continue
            site = row.site(replayed=replayed)
            measured, guessed = site.choose(), prediction.site.choose()
            waits = [site.costs[name].wait_us for name in (measured, guessed)]
            assert measured == guessed or waits[1] / waits[0] - 1 < MARGIN, row.key

    def test_errors_are_the_documented_ones(self):
        """docs/performance.md prints these: the median error of a time, and of a ratio of two."""
        times, ratios, without = [], [], []
        for row, prediction in self.predicted():
            if prediction is None:
                without.append(row.key)
                continue
            pair = [(row.site().costs[name].device_us, prediction.site.costs[name].device_us) for name in row.ms]
            times += [abs(math.log(guessed / measured)) for measured, guessed in pair]
            (inductor, guessed), (owned, guessed_owned) = pair
            ratios.append(abs(math.log(guessed / guessed_owned / (inductor / owned))))
        assert (len(ratios), len(without)) == (38, 7)
        assert round(math.expm1(statistics.median(times)), 2) == 0.06
        assert round(math.expm1(statistics.median(ratios)), 2) == 0.07


class TestSDXL:
    """The sites of SDXL's U-Net: two images of 1024 x 1024, guidance included."""

    @pytest.mark.parametrize(("tokens", "width"), [(8192, 640), (2048, 1280)])
    def test_residuals_and_norms_are_inductor_s(self, tokens, width):
        """No row shows a gain where Inductor holds rows in registers: 640 by its own rule, 1280 by the tiling policy."""
        key = Key("residual_norm_modulate", f"tokens={tokens} width={width} norm=layer", "bfloat16")
        assert LIMITS.holds(width, 5)
        assert tuning.decide(H200, key, ["triton"], LIMITS).provider == INDUCTOR

    @pytest.mark.parametrize(
        ("pixels", "channels"), [(32768, 320), (32768, 640), (8192, 640), (8192, 1280), (2048, 1280)]
    )
    @pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
    def test_group_norms_are_fused(self, pixels, channels, layout):
        key = Key("group_norm_silu", f"pixels={pixels} channels={channels} groups=32 layout={layout}", "bfloat16")
        decision = tuning.decide(H200, key, ["triton"], LIMITS)
        assert decision.provider == "triton"
        assert decision.why.startswith("predicted")


# One row of each form whose generated kernels differ. linear_gelu's provider takes CUDA tensors alone, and
# wide_attention's stays an operator, whose launches no generated code shows.
FORMS = {(key.op, row.launches[INDUCTOR].get("generated", 0)): key for key, row in ROWS.items()}
UNSEEN = ("linear_gelu", "wide_attention")


drawn = functools.partial(torch.empty, dtype=torch.bfloat16)


@pytest.mark.codegen
@pytest.mark.skipif(compat.versions.version_text() != "2.13", reason="launches were counted in code of torch 2.13")
@pytest.mark.parametrize(
    "key",
    # Every second one where time matters.
    [pytest.param(key, marks=[pytest.mark.thorough] * (turn % 2)) for turn, key in enumerate(FORMS.values())],
    ids=lambda key: f"{key.op}, {key.shape}",
)
class TestGeneratedCode:
    def test_launches_of_inductor_and_the_form_of_its_reduction(self, key):
        """Also that a row is marked whose kernel was a loop, and is none under the reductions that ship."""
        block, inputs = ops.catalog()[key.op].trial.block(key.sizes(), drawn)
        policy = dataclasses.replace(OFF, choose_reduction=True, reduction_limits=LIMITS)
        with session.active(policy) as decisions:
            found = generated(block, *inputs)
        assert len(launches(found)) == ROWS[key].launches[INDUCTOR].get("generated", 0)
        changed = [kernel.reduction for kernel in decisions.kernels if kernel.reduction and kernel.reduction.differs]
        marks = [{"size": "width", "reads": reduction.reads} for reduction in changed]
        assert marks == ([dataclasses.asdict(ROWS[key].looped)] if ROWS[key].looped else [])

    def test_launches_of_owned_kernels(self, key, monkeypatch):
        if key.op in UNSEEN:
            pytest.skip("its launches are not in code that is generated without a GPU")
        # Kernels take CPU tensors there: these become CUDA's before Inductor lowers the graph.
        monkeypatch.setattr(envs, "triton_interpreted", lambda: True)
        block, inputs = ops.catalog()[key.op].trial.block(key.sizes(), drawn)
        (provider,) = ROWS[key].owned
        context = PassContext(tritium.CompilationConfig(force_provider={key.op: provider}), "cuda")
        rewrite = functools.partial(fuse, context=context, fusions=fusions.catalog().values())
        kinds = Counter(kernel.kind for kernel in generated(block, *inputs, rewrite=rewrite).kernels)
        counted = ROWS[key].launches[provider]
        assert [kinds[kind] for kind in ("generated", "owned")] == [
            counted.get(kind, 0) for kind in ("generated", "owned")
        ]
