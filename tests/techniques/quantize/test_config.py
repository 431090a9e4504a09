"""What a plan may ask of quantization: bad values raise when it is made."""

import json

import pytest

from tritium import Budget, Choice, CompilationConfig, Plan, Quantize, Steps
from tritium.errors import ConfigError
from tritium.techniques.quantize.config import FORMATS

BAD = {
    "an unknown format": (lambda: Quantize("fp9"), "fp8"),
    "an unknown format of a layer": (lambda: Quantize(layers={"proj_out": "int9"}), r"layers\['proj_out'\]"),
    "a pattern that is none": (lambda: Quantize(layers={"re:(": "int8"}), "regular expression"),
    "an empty pattern": (lambda: Quantize(layers={"re:": "int8"}), "named by a string"),
    "a layer by number": (lambda: Quantize(layers={3: "int8"}), "named by a string"),
    "layers as a list": (lambda: Quantize(layers=["proj_out"]), "layers"),
    "unknown scales": (lambda: Quantize(scales="rows"), "'row'"),
    "a group that is not rotated": (lambda: Quantize("int8", rotate=32), "16, 64, 256"),
    "an unknown attention": (lambda: Quantize(attention="sdpa"), "'auto', 'int8'"),
    "attention in unquantized steps": (lambda: Quantize(attention="int8", steps=Steps(1)), "leave one out"),
    "measured attention and sparse attention": (
        lambda: Choice(how="eager", quantize=Quantize(None, attention="auto"), sparse={"latent": (1, 8, 8)}),
        "write attention='int8'",
    ),
    "two attentions": (lambda: Choice(quantize=Quantize(attention="int8"), attention="math"), "leave one of them out"),
    "an unknown place": (lambda: Quantize(keep="disk"), "keep"),
    "products of one row": (lambda: Quantize(one_row="fp8"), "one_row"),
    "a group of 48": (lambda: Quantize("int4-weights", group=48), "32, 64, 128"),
    "nothing": (lambda: Quantize(None), "nothing is quantized"),
    "a budget for a named format": (lambda: Quantize("fp8", budget=Budget(min_psnr=30)), "linear='auto'"),
    "a budget as a number": (lambda: Quantize("auto", budget=30), "Budget"),
    "steps without weights": (lambda: Quantize("fp8", steps=Steps(first=1), keep="cpu"), "keep='cpu'"),
    "steps of a wrong kind": (lambda: Quantize(steps=3), "Steps"),
    "an unknown field of steps": (lambda: Quantize(steps={"begin": 1}), "steps"),
    "a negative step": (lambda: Steps(first=-1), "0 or more"),
    "a step as a truth value": (lambda: Steps(first=True), "number of steps"),
    "steps of rows that all have": (lambda: Quantize(steps=Steps(1, instead="row")), "'static' or 'step'"),
    "scales of inputs of stored weights": (lambda: Quantize("int8-weights", scales="static"), "only weights"),
    "static scales of stored bytes": (lambda: Quantize("fp8", scales="static", keep="cpu"), "keep='device'"),
    "measurements by hand": (lambda: Quantize("int8", measured=(("a", "int8"),)), r"handle\.calibrate"),
    "a plan's unknown format": (lambda: Plan(quantize="fp9"), "Plan.quantize.*fp8"),
    "beside exact": (
        lambda: Plan(quantize="fp8", config=CompilationConfig(fidelity="exact", engine="eager")),
        "lossy.*'exact'",
    ),
    "beside close": (lambda: Plan(quantize="fp8", config=CompilationConfig(fidelity="close")), "lossy.*'close'"),
    "a part beside close": (
        lambda: Plan(components={"transformer": Choice(quantize="fp8")}, config=CompilationConfig(fidelity="close")),
        "lossy",
    ),
    "by inductor": (lambda: Choice(how="inductor", quantize="fp8"), "Tritium's"),
    "in graphs as they are": (lambda: Plan(quantize="fp8", graphs="only"), "graphs='only'"),
}


@pytest.mark.parametrize(("make", "message"), BAD.values(), ids=BAD)
def test_bad_values_raise_when_made(make, message):
    with pytest.raises(ConfigError, match=message) as raised:
        make()
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("format_", FORMATS)
def test_a_format_is_a_config(format_):
    assert Plan(quantize=format_).inherited()["quantize"] == Quantize(format_)


def test_fast_beside_it_is_allowed():
    Plan(quantize="fp8", config=CompilationConfig(fidelity="fast"))


def test_a_choice_survives_json():
    config = Quantize(
        "int8",
        layers={"re:.*net\\.2": "fp8", "proj_out": None},
        scales="step",
        rotate=64,
        steps=Steps(first=2, last=1, instead="row"),
        measured=(("blocks.0.to_q", "int8-rotated", (0.5, 0.25)), ("blocks.0.to_k", None, ())),
    )
    for one in (config, Quantize("auto", budget=Budget(min_psnr=30)), Quantize("int4-weights", group=32)):
        choice = Choice(quantize=one)
        assert Choice(**json.loads(json.dumps(choice.to_dict()))) == choice


def test_where_weights_are_kept():
    assert not Quantize("fp8").keeps_bytes
    assert Quantize("fp8", keep="cpu").keeps_bytes
    assert Quantize("int8-weights").keeps_bytes
    assert not Quantize("int8-weights", keep="device").keeps_bytes
    assert not Quantize(None, layers={"a": "int8", "b": "int8-weights"}).keeps_bytes


@pytest.mark.parametrize(("columns", "group"), [(128, 64), (160, 32), (96, 32), (50, 64)])
def test_groups_of_4_bits_divide_a_layer(columns, group):
    assert Quantize("int4-weights").precision("int4-weights", columns).group == group


@pytest.mark.parametrize(("columns", "rotate"), [(128, 64), (160, 16), (100, 4), (50, 64)])
def test_rotated_groups_divide_a_layer(columns, rotate):
    assert Quantize("int8-rotated").precision("int8-rotated", columns).rotate == rotate
