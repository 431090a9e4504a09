"""A report with one of everything, and what is on its page."""

from html.parser import HTMLParser

from tritium import measure
from tritium.report import Report
from tritium.report.graph_text import GraphNode
from tritium.report.observation import Fallback, Kernel
from tritium.report.recompiles import Recompile
from tritium.report.records import (
    Capture,
    Component,
    Diagram,
    Failure,
    GraphRecord,
    Measurement,
    PassRecord,
    Site,
    Violation,
)

VOID = {"meta", "link", "input", "br", "img", "hr"}


class Page(HTMLParser):
    """What is on a page: its text, its elements with their attributes, and whether every element is closed."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.open, self.text, self.rows = [], [], [], {}
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag == "tr":
            table = next((attributes.get("id") for name, attributes in reversed(self.open) if name == "table"), None)
            self.rows[table] = self.rows.get(table, 0) + 1
        if tag not in VOID:
            self.open.append((tag, dict(attrs)))

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag

    def handle_data(self, data):
        if not self.open or self.open[-1][0] not in ("style", "script"):
            self.text.append(data)

    @property
    def words(self):
        return " ".join(" ".join(self.text).split())

    def all(self, tag, **attributes):
        wanted = {name.rstrip("_"): value for name, value in attributes.items()}
        return [a for t, a in self.elements if t == tag and all(a.get(name) == value for name, value in wanted.items())]


def kernel(name, **changes):
    usual = {
        "kind": "generated",
        "ops": ["aten.mul", "aten.add"],
        "source_lines": ["model.py:7"],
        "bytes_read": 3000,
        "bytes_written": 1000,
        "ideal_bytes": 4000,
    }
    return Kernel(name=name, **{**usual, **changes})


def node(name, *inputs, target="operator.mul"):
    return GraphNode(name, target, "float32[2, 7]", inputs, source_line="model.py:7 in forward")


def measurement(**changes):
    found = {"calls": 3, "call_ms": 0.5, "timed": 3, "of": 4, "roofs": measure.Roofs(1e9, 1e10, "float32")}
    return Measurement(**{**found, **changes})


def quantized(text="plain"):
    """What the technique says about a part with two blocks in 8 bits, a layer of another format and one outside."""
    layers = {
        f"blocks.{block}.attn.{text}": {"precision": "int8, rotated by 64", "provider": f"int_mm {text}"}
        for block in (0, 1)
    }
    layers |= {
        "blocks.0.ff.net.2": {"precision": "fp8", "provider": "scaled_mm", "sqnr": 28.46},
        "blocks.1.ff.net.2": {"precision": None, "reason": f"its input has 1 row: {text}"},
        "blocks.1.extra": {"precision": f"fp3 {text}", "provider": ""},
        "proj_out": {"precision": None, "reason": "outside of the repeated blocks"},
    }
    return {"layers": layers}


def full_report(text="plain", *, measured=True, **first):
    """One of everything."""
    us = (lambda value: value) if measured else (lambda value: None)
    kernels = [
        kernel(
            f"cpp_fused_{text}_0",
            measured_us=us(8.0),
            region=0,
            ideal_bytes=5000,
            why_not_fused=[f"buf1: {text}"],
            **first,
        ),
        kernel(f"cpp_fused_{text}_0", measured_us=us(8.0), region=0, ideal_bytes=5000),
        kernel(
            "addmm (64×64)", kind="library", flops=2 * 64**3, dtype="float32", measured_us=us(80.0), ops=["aten.addmm"]
        ),
        kernel("cpp_fused_lost_1"),
    ]
    record = GraphRecord(
        "0/1",
        f"Model.{text}",
        "inductor",
        "cpu",
        nodes=12,
        break_reason=f"because {text}",
        sites=[
            Site("rms_norm", ("rms_norm",), "fused", f"it is {text}", "norm", "model.py:7 in forward"),
            Site("rms_norm", ("rms_norm",), "fused", f"it is {text}", "norm_1", "model.py:7 in forward"),
            Site("rope", ("rope",), "declined", f"not {text}", "cos", "model.py:9 in forward"),
        ],
        passes=[PassRecord(f"fuse {text}", changed=True, requests=[{"settings": {"a": text}, "because": text}])],
        failures=[Failure(f"pass {text}", f"it broke: {text}", "somewhere")],
        fallbacks=[Fallback(f"aten.{text}", 2, f"no lowering for {text}")],
        kernels=kernels,
        recompile=Recompile("0/1", f"hidden_{text}", "size 8 at dim 1", "size 16 at dim 1", f"mismatch {text}"),
        captures=[Capture(f"x {text}", hits=3, bytes=64), Capture(f"y {text}", piece=2, declined=f"no {text}")],
        runs=2.0 if measured else None,
        diagram=Diagram(
            f"blocks.{text}",
            (node("x"), node("norm", "x"), node(f"mul_{text}", "norm", "x")),
            (node("x"), node("fused", "x", target=f"tritium.{text}")),
            left_out=5,
        ),
    )
    components = [
        Component(
            name=f"transformer {text}",
            milliseconds=80.0,
            calls=28,
            share=0.8,
            first_call_seconds=9.0,
            what=f"compiled {text}",
            techniques={"quantize": quantized(text)},
        ),
        Component(name="vae", milliseconds=None, calls=0, share=None, first_call_seconds=0.0, what="left"),
    ]
    violations = [Violation(f"vae {text}", f"size of {text}", "compiled", 2)]
    timed = measurement() if measured else None
    return Report([record], components=components, measurement=timed, violations=violations)
