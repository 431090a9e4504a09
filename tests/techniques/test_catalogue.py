"""The catalogue of techniques, and how their configs are written."""

import dataclasses

import pytest

from tritium import techniques
from tritium.catalog import Entry
from tritium.errors import CatalogError, ConfigError
from tritium.techniques import Technique
from tritium.techniques.channels_last import ChannelsLast
from tritium.techniques.choice import Choice, Off
from tritium.techniques.graphs import Graphs


def technique(name, **fields):
    config = dataclasses.make_dataclass(name.capitalize(), [], frozen=True)
    members = dict.fromkeys(("applies_to", "apply", "remove", "report"), lambda *_: None)
    return Technique(name=name, **{"config": config, **members, **fields})


SAME = dataclasses.make_dataclass("Same", [], frozen=True)


@pytest.fixture
def declare(monkeypatch):
    """Put other techniques into the catalogue."""

    def declare(*members):
        entries = [Entry(member, None, "here") for member in members]
        monkeypatch.setattr(techniques.catalogues, "walk", lambda *_: entries)
        monkeypatch.setattr(techniques, "_entries", techniques._entries.__wrapped__)

    return declare


class TestCatalogue:
    def test_first_members(self):
        assert {"channels_last", "graphs"} <= set(techniques.catalog())
        for name, member in techniques.catalog().items():
            assert member.name == name
        assert len({member.config for member in techniques.catalog().values()}) == len(techniques.catalog())

    def test_configs_are_names_of_the_package(self):
        assert (techniques.ChannelsLast, techniques.Graphs) == (ChannelsLast, Graphs)
        with pytest.raises(AttributeError, match="did you mean 'Graphs'"):
            techniques.Graph  # noqa: B018 - the access raises

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"name": "two words"}, "cannot be a keyword of Plan"),
            ({"name": "x", "config": dict}, "dict, which cannot be compared"),
            ({"name": "x", "config": dataclasses.make_dataclass("Loose", [])}, "Loose, which cannot be compared"),
        ],
    )
    def test_a_declaration_is_checked(self, fields, message):
        with pytest.raises(CatalogError, match=message):
            technique(**fields)

    def test_order_follows_after(self, declare):
        declare(technique("a", after=("c",)), technique("b"), technique("c"))
        order = list(techniques.catalog())
        assert sorted(order) == ["a", "b", "c"]
        assert order.index("c") < order.index("a")

    @pytest.mark.parametrize(
        ("members", "message"),
        [
            ({"a": {"after": ("bb",)}, "b": {}}, "'a' is after 'bb'; did you mean"),
            ({"a": {"after": ("b",)}, "b": {"after": ("a",)}}, "each after the other"),
            ({"a": {"config": SAME}, "b": {"config": SAME}}, "'a' and 'b' have the same config, Same"),
        ],
    )
    def test_bad_members(self, declare, members, message):
        declare(*(technique(name, **fields) for name, fields in members.items()))
        with pytest.raises(CatalogError, match=message):
            techniques.catalog()


class TestChoice:
    def test_spellings_of_one_choice(self):
        expected = Choice(techniques=(ChannelsLast(), Graphs("auto")))
        assert Choice(channels_last=True, graphs="auto") == expected
        assert Choice(techniques=(Graphs("auto"), ChannelsLast())) == expected
        assert Choice(techniques=[Graphs("off")], graphs={"mode": "auto"}, channels_last=ChannelsLast()) == expected
        assert Choice(**expected.to_dict()) == expected
        assert hash(Choice(**expected.to_dict())) == hash(expected)
        assert eval(repr(expected)) == expected
        assert str(expected) == "tritium, channels-last, graphs auto"
        assert expected.get(Graphs) == Graphs("auto")

    def test_false_leaves_out_and_none_inherits(self):
        assert Choice(channels_last=False).techniques == (Off("channels_last"),)
        assert Choice(graphs=None) == Choice()
        assert Choice(graphs="auto").with_(graphs=None) == Choice()
        assert str(Choice(channels_last=False)) == "tritium, without channels_last"
        assert Choice(**Choice(channels_last=False).to_dict()) == Choice(channels_last=False)

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"chanels_last": True}, "Choice has no field 'chanels_last'; did you mean 'channels_last'"),
            ({"channels_last": "yes"}, r"Choice.channels_last cannot be 'yes'; write channels_last=ChannelsLast\(\)"),
            ({"channels_last": 3}, "Choice.channels_last cannot be 3"),
            ({"graphs": True}, r"Choice.graphs cannot be True; write graphs=Graphs\(mode\)"),
            ({"graphs": {"mood": "auto"}}, r"write graphs=Graphs\(mode\)"),
            ({"graphs": "aut"}, "Choice.graphs: graphs cannot be 'aut'; did you mean 'auto'"),
            ({"techniques": ("graphs",)}, "Choice.techniques has 'graphs', which is no technique's config"),
            ({"techniques": "graphs"}, "Choice.techniques takes configs"),
            ({"techniques": (Graphs("off"), Graphs("auto"))}, "give one of them"),
            ({"how": "eager", "graphs": "only"}, "is Tritium's, and the part runs with 'eager'"),
        ],
    )
    def test_refused_in_one_line(self, arguments, message):
        with pytest.raises(ConfigError, match=message) as raised:
            Choice(**arguments)
        assert "\n" not in str(raised.value)
