"""JSON data becomes dataclasses, or an error that names the field."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tritium.tuning import Key, ReductionLimits, Verdict, tables
from tritium.tuning.verdict import parse

ROW = {"op": "a", "shape": "tokens=1", "dtype": "float32", "provider": "inductor", "ms": {"inductor": 1.0}}

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
FIELDS = [*ROW, "alone_us", "issue_us", "launches", "looped", "bytes", "versions", "remarks"]


@given(st.sampled_from(FIELDS), JSON)
def test_a_row_is_a_verdict_or_an_error(name, value):
    try:
        verdict = Verdict.from_dict({**ROW, name: value})
    except (TypeError, ValueError):
        return
    assert Verdict.from_dict(json.loads(json.dumps(verdict.to_dict()))) == verdict


@given(JSON)
def test_any_json_is_a_table(tmp_path_factory, value):
    path = tmp_path_factory.mktemp("any") / "t.json"
    path.write_text(json.dumps({"rows": [ROW, value], "reductions": value, "device": value, "multiprocessors": value}))
    assert Key("a", "tokens=1", "float32") in tables.load(path).rows


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"provider": 3}, "provider is not str: 3"),
        ({"ms": {"inductor": "x"}}, "ms of 'inductor' is not float: 'x'"),
        ({"ms": {"inductor": True}}, "ms of 'inductor' is not float: True"),
        ({"launches": {"inductor": {"owned": 0.5}}}, "launches of 'inductor' of 'owned' is not int: 0.5"),
        ({"looped": {"size": "tokens"}}, "missing 1 required positional argument: 'reads'"),
        ({"remarks": []}, r"remarks is not Mapping: \[\]"),
    ],
)
def test_errors_name_the_field(change, reason):
    with pytest.raises(TypeError, match=reason):
        Verdict.from_dict({**ROW, **change})


def test_lists_are_tuples_and_other_fields_are_left_out():
    limits = parse(ReductionLimits, {"persistent_up_to": [{"reads": 2, "elements": 5, "unit": 1}], "later": None})
    assert limits.limit(1) == 5
