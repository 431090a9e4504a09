"""The part of a graph that a record keeps, before and after the passes."""

import re

import torch

import tritium
from support.small_models import Block, Stack, block_inputs
from tritium.report import diagram
from tritium.report.ledger import LEDGER, MOST_DIAGRAMS
from tritium.report.records import Diagram, GraphRecord


class TestDiagram:
    def diagram(self, model, *inputs, **config):
        config = tritium.CompilationConfig(engine="eager", **config)
        with torch.inference_mode():
            compiled = torch.compile(model, backend=tritium.Backend(config))
            compiled(*inputs)
        return tritium.explain(compiled).records[0].diagram

    def test_one_block_of_a_stack(self):
        part = self.diagram(Stack(3), *block_inputs(), force_provider="reference")
        assert part.block == "blocks.0"
        assert len(part.before) == 6
        assert part.before[0].target == "torch.rms_norm"
        assert part.before[0].type == "float32[2, 7, 16]"
        assert re.fullmatch(r"small_models\.py:\d+ in forward", part.before[1].source_line)
        # The residual at the end goes into one kernel with the next block's norm.
        assert [node.target for node in part.after][:4] == [
            "tritium.rms_norm.default",
            "torch._C._nn.linear",
            "operator.getitem",
            "tritium.residual_norm_modulate.default",
        ]
        assert part.left_out == 0

    def test_a_model_without_blocks_is_shown_from_its_beginning(self):
        part = self.diagram(Block(), *block_inputs())
        assert part.block is None
        assert [node.target for node in part.before][:2] == ["input", "input"]
        assert part.before[-1].target == "return"
        assert not any("parameters" in node.name for node in part.before)

    def test_a_large_one_is_cut_and_says_so(self, monkeypatch):
        whole = self.diagram(Block(), *block_inputs(), force_provider="reference")
        torch._dynamo.reset()
        monkeypatch.setattr(diagram, "MOST_NODES", 4)
        cut = self.diagram(Block(), *block_inputs(), force_provider="reference")
        assert (cut.before, cut.after) == (whole.before[:4], whole.after[:4])
        assert cut.left_out == len(whole.before) + len(whole.after) - 8 > 0

    def test_a_diagram_that_fails_is_reported_and_the_model_runs(self, monkeypatch):
        from tritium.compiler import pipeline

        def fail(before, after):
            raise ValueError("no ink")

        monkeypatch.setattr(pipeline, "diagram", fail)
        assert self.diagram(Block(), *block_inputs()) is None
        assert [(entry["part"], entry["reason"]) for entry in tritium.explain().failures] == [
            ("diagram", "ValueError: no ink")
        ]

    def test_a_process_keeps_only_so_many(self):
        empty = Diagram(None, (), ())
        for index in range(MOST_DIAGRAMS + 2):
            LEDGER.add(GraphRecord(f"{index}/0", "f", "eager", "cpu", diagram=empty))
        assert sum(record.diagram is not None for record in LEDGER.records()) == MOST_DIAGRAMS
