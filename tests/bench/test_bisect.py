"""What is outside of the bound is found: the module, the fusion, the provider, and who is to blame."""

from __future__ import annotations

import importlib
import json
import math
from pathlib import Path

import pytest
import torch
from torch import nn

from support.bench import is_a_share, job
from support.changed import wrong_fusion, wrong_provider
from tritium import CompilationConfig, FusionPatterns, fidelity
from tritium.api import optimize
from tritium.bench.bisect import Call, find_fault
from tritium.bench.locate import Checked, Location, locate
from tritium.catalog import Entry
from tritium.compiler import pipeline
from tritium.passes import Pass
from tritium.pipelines.plan import Plan

pytest.importorskip("diffusers")
small_pipelines = importlib.import_module("support.small_pipelines")

# A region would take the norms over.
NO_REGION = FusionPatterns(enable_qk_norm_rope=False)


def located(config, is_past=None, **plan):
    with optimize(small_pipelines.flux(), Plan(config=config, progress=False, **plan)) as handle:
        before = handle.choices
        found = locate(handle, job(), is_a_share, is_past and is_past(handle.pipe))
        assert handle.choices == before
        assert not any(module._forward_pre_hooks for module in handle.pipe.transformer.modules())
        return found


class TestPipelines:
    def test_what_is_right_is_inside_with_the_largest_ratio_named(self):
        found = located(CompilationConfig(engine="eager"))
        names = [entry.name for entry in found.checked]
        # In the order of calls; the encoder of the VAE is compiled too, and never called.
        assert names == [
            "transformer.time_text_embed",
            "transformer.pos_embed",
            "transformer.transformer_blocks.0",
            "transformer.transformer_blocks.1",
            "transformer.single_transformer_blocks.0",
            "transformer.single_transformer_blocks.1",
            "transformer.norm_out",
            "vae.decode",
        ]
        assert found.first is None
        assert found.fault is None
        largest = max(found.checked, key=lambda entry: entry.excess)
        assert 0 < largest.excess <= 1
        assert str(found) == f"all 8 compiled modules are inside the bound; the largest is {largest}"

    def test_a_wrong_provider_is_named_with_block_and_line(self):
        config = CompilationConfig(engine="eager", fusion_patterns=NO_REGION, force_provider={"rms_norm": "triton"})
        with wrong_provider("rms_norm", lambda result, *_: result * 1.01):
            found = located(config)
        assert (found.first.name, found.first.kind) == ("transformer.transformer_blocks.0", "FluxTransformerBlock")
        assert found.first.excess > 10
        assert [entry.kind for entry in found.outside] == ["FluxTransformerBlock"] * 2 + [
            "FluxSingleTransformerBlock"
        ] * 2
        blamed = found.fault
        assert (blamed.part, blamed.fusion, blamed.op, blamed.provider) == (
            "provider",
            "rms_norm",
            "rms_norm",
            "triton",
        )
        assert blamed.line.startswith("transformer_flux.py:")
        assert blamed.alone
        assert blamed.remedy == "CompilationConfig(force_provider={'rms_norm': 'inductor'})"
        assert blamed.remedy_helps
        text = str(found)
        assert text.startswith("transformer.transformer_blocks.0 (FluxTransformerBlock): error ")
        assert f"x the bound; goes away without fusion 'rms_norm', provider 'triton' (site: {blamed.line})" in text
        assert "3 of the 7 other modules are outside too" in text
        assert json.loads(json.dumps(found.to_dict(), allow_nan=False))["fault"]["provider"] == "triton"

    def test_nothing_compiled_nothing_to_locate(self):
        found = located(CompilationConfig(engine="eager"), components={"transformer": "eager", "vae": "eager"})
        assert str(found) == "nothing to locate: no part of the pipeline is compiled"


class TestImages:
    """What no module shows alone is searched by drawing."""

    def test_an_error_of_the_whole_program_alone(self):
        def is_past(pipe):
            def is_one_program():
                part = pipe.transformer._compiled_call_impl.part
                return part.choice.how == "tritium" and part.among is None

            return is_one_program

        found = located(CompilationConfig(engine="eager"), is_past)
        assert "only where a part is one program" in found.images

    def test_the_module_that_takes_a_image_out_is_named(self):
        def is_past(pipe):
            suspect = pipe.transformer.transformer_blocks[1]
            return lambda: suspect._compiled_call_impl is not None

        found = located(CompilationConfig(engine="eager"), is_past)
        assert "when transformer.transformer_blocks.1 (FluxTransformerBlock) is compiled" in found.images
        assert found.images in str(found)

    @pytest.mark.parametrize(
        ("answer", "text"), [(True, "the pipeline itself does not repeat"), (False, "changes from call to call")]
    )
    def test_what_does_not_repeat_is_said(self, answer, text):
        found = located(CompilationConfig(engine="eager"), lambda pipe: lambda: answer)
        assert text in found.images


class Norms(nn.Module):
    """Two norms, of widths 8 and 16."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.RMSNorm(8, eps=1e-6), nn.RMSNorm(16, eps=1e-6)
        self.grow, self.out = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x):
        return self.out(self.second(self.grow(self.first(x))))


def call_of(module, *args):
    module.requires_grad_(requires_grad=False)
    return Call(module, args, {}, module(*args), fidelity.in_float64(module, args, {}))


def blamed(config, module=None):
    torch.manual_seed(0)
    return find_fault(call_of(module or Norms(), torch.randn(3, 8)), config, dynamic=False)


@pytest.mark.parametrize(
    ("excess", "text", "is_outside"),
    [
        (math.inf, "no numbers, or another shape or dtype", True),
        (None, "returns nothing that can be compared", False),
        (0.5, "error 0.5 x the bound", False),
    ],
)
def test_what_a_module_s_error_is_called(excess, text, is_outside):
    found = Checked(name="transformer.norm_out", kind="Norm", excess=excess)
    assert str(found) == f"transformer.norm_out (Norm): {text}"
    finite = excess if excess != math.inf else None
    assert found.to_dict() == {**vars(found), "excess": finite, "outside": is_outside}
    assert Location(checked=(found,)).outside == [found] * is_outside


class TestFaults:
    def test_a_wrong_rewrite_is_told_from_a_wrong_provider(self):
        with wrong_fusion("rms_norm", eps=0.3):
            found = blamed(CompilationConfig(engine="eager"))
        assert (found.part, found.fusion, found.provider) == ("rewrite", "rms_norm", "reference")
        assert found.remedy_helps

    def test_no_numbers_have_a_fault_too(self):
        with wrong_provider("rms_norm", lambda result, *_: result * torch.nan):
            found = blamed(CompilationConfig(engine="eager", force_provider={"rms_norm": "triton"}))
        assert (found.part, found.provider) == ("provider", "triton")

    def test_the_site_at_fault_is_told_from_a_right_one(self):
        def run(result, x, *_):
            return result * (1.01 if x.shape[-1] == 16 else 1.0)

        with wrong_provider("rms_norm", run):
            found = blamed(CompilationConfig(engine="eager", force_provider={"rms_norm": "triton"}))
        assert found.part == "provider"
        assert found.node == "rms_norm_1"
        assert found.alone
        assert found.remedy_helps

    def test_a_provider_pinned_for_everything_is_kept(self):
        with wrong_provider("rms_norm", lambda result, *_: result * 1.01):
            found = blamed(CompilationConfig(engine="eager", force_provider="triton"))
        assert (found.part, found.provider) == ("provider", "triton")

    def test_a_second_fault_is_not_hidden_by_the_first(self):
        class Two(Norms):
            def forward(self, x):
                return nn.functional.gelu(super().forward(x).sin())

        with wrong_fusion("rms_norm", eps=0.3):
            assert blamed(CompilationConfig(engine="eager"), Two()).remedy_helps
        # Again, with the same configuration: nothing of the first search is taken for this one.
        with wrong_fusion("rms_norm", eps=0.3), wrong_fusion("gelu", approximate="tanh"):
            found = blamed(CompilationConfig(engine="eager"), Two())
        assert (found.fusion, found.remedy_helps) == ("rms_norm", False)
        assert str(found).startswith("first goes out with fusion 'rms_norm'")
        assert "another site is at fault as well" in str(found)

    def test_what_is_wrong_without_tritium_is_not_blamed_on_it(self):
        class Traced(Norms):
            def forward(self, x):
                return super().forward(x) * (1.01 if torch.compiler.is_compiling() else 1.0)

        found = blamed(CompilationConfig(engine="eager"), Traced())
        assert found.part == "torch.compile"
        assert str(found) == "what Dynamo traces is at fault: it is the same without Tritium"

    def test_a_wrong_pass_is_named(self, monkeypatch):
        def run(graph, context):
            output = next(node for node in graph.nodes if node.op == "output")
            (result,) = output.args[0]
            with graph.inserting_before(output):
                output.args = ((graph.call_function(torch.mul, (result, 1.01)),),)

        entry = Entry(Pass("one_percent", run), Path(__file__), "test")
        monkeypatch.setattr(pipeline, "_installed_passes", lambda: (entry,))
        found = blamed(CompilationConfig(engine="eager"))
        assert (found.part, "one_percent" in str(found)) == ("pass", True)

    def test_what_does_not_repeat_is_said(self):
        assert blamed(CompilationConfig(engine="eager")).part == "not repeated"

    def test_more_probes_than_dynamo_compiles_versions(self):
        few = torch._dynamo.config.patch(recompile_limit=2)
        with few, wrong_provider("rms_norm", lambda result, *_: result * 1.01):
            found = blamed(CompilationConfig(engine="eager", force_provider={"rms_norm": "triton"}))
        assert (found.part, found.remedy_helps) == ("provider", True)

    @pytest.mark.codegen
    def test_between_generated_code_too(self):
        with wrong_provider("rms_norm", lambda result, *_: result * 1.01):
            found = blamed(CompilationConfig(force_provider={"rms_norm": "triton"}))
        assert (found.part, found.fusion, found.provider) == ("provider", "rms_norm", "triton")
        assert found.remedy_helps
