"""Every error that the configuration promises, and the precedence of its sources."""

import dataclasses

import pytest

from tritium.config import ATTENTIONS, CompilationConfig, FusionPatterns, PassConfig
from tritium.errors import ConfigError
from tritium.ops import attention


def test_defaults_are_the_documented_ones():
    fields = dataclasses.asdict(CompilationConfig())
    assert set(fields.pop("fusion_patterns").values()) == set(fields.pop("pass_config").values()) == {True}
    assert fields == {
        "enable_freezing": False,
        "reuse_blocks": False,
        "graphs": "off",
        "max_captures": 64,
        "safe_output_mode": True,
        "graph_log_url": None,
        "engine": "inductor",
        "fidelity": "close",
        "force_tiling": None,
        "force_provider": None,
    }


def test_is_a_hashable_value():
    assert CompilationConfig() != CompilationConfig(engine="eager")
    provider = {"rms_norm": "triton", "gated_residual": "inductor"}
    one, other = (CompilationConfig(force_provider=pairs) for pairs in (provider, dict(reversed(provider.items()))))
    assert one == other
    assert hash(one) == hash(other)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"enable_freezng": True}, "did you mean 'enable_freezing'"),
        ({"engine": "egaer"}, "did you mean 'eager'"),
        ({"engine": None}, "valid: 'eager', 'inductor'"),
        ({"enable_freezing": 1}, "must be bool, got 1 of type int"),
        ({"max_captures": True}, "must be int, got True of type bool"),
        ({"max_captures": 0}, "at least 1"),
        ({"graph_log_url": 7}, "must be one of str, None, got 7"),
        ({"fusion_patterns": {"enable_rope": False}}, "must be FusionPatterns"),
        ({"force_provider": {"rms_norm": 3}}, "must map names to names"),
        ({"graph_log_url": {"a": "b"}}, "graph_log_url must be one of str, None"),
        ({"aclgraph_only": True}, 'write CompilationConfig(graphs="only")'),
        ({"aclgraph_with_compile": True}, 'write CompilationConfig(graphs="with_compile")'),
        # What this version cannot honour is refused, never ignored.
        ({"graphs": "only", "enable_freezing": True}, "captures it unchanged"),
        ({"graphs": "no"}, "graphs cannot be 'no'"),
        ({"safe_output_mode": False}, "applies to captured graphs"),
        ({"max_captures": 8}, "applies to captured graphs"),
        ({"fidelity": "exact"}, "write engine='eager' with it"),
        ({"force_tiling": "x"}, "'x' is not of the form kernel=tiling"),
        # Compilations do not measure.
        ({"measure_providers": False}, "has no field 'measure_providers'"),
    ],
)
def test_a_wrong_argument_is_an_error_that_helps(arguments, message):
    with pytest.raises(ConfigError) as error:
        CompilationConfig(**arguments)
    assert message in str(error.value)


def test_positional_arguments_and_assignments_are_refused():
    config = CompilationConfig()
    with pytest.raises(ConfigError, match="keyword arguments only"):
        CompilationConfig(True)
    with pytest.raises(ConfigError, match=r"dataclasses\.replace\(\.\.\., engine='eager'\)"):
        config.engine = "eager"
    with pytest.raises(ConfigError, match="FusionPatterns is frozen"):
        config.fusion_patterns.enable_rope = False
    with pytest.raises(ConfigError, match="cannot be deleted"):
        del config.engine


def test_with_changes_a_copy():
    config = CompilationConfig()
    changed = config.with_(engine="eager")
    assert (config.engine, changed.engine) == ("inductor", "eager")
    with pytest.raises(ConfigError, match="no field 'engin'"):
        config.with_(engin="eager")


class TestEnvironment:
    def test_sets_fields_and_nested_fields(self, monkeypatch):
        monkeypatch.setenv("TRITIUM_ENGINE", "eager")
        monkeypatch.setenv("TRITIUM_FUSION_PATTERNS__ENABLE_ROPE", "0")
        monkeypatch.setenv("TRITIUM_PASS_CONFIG__ENABLE_ND_TILING_WORKAROUND", "off")
        monkeypatch.setenv("TRITIUM_FORCE_PROVIDER", "rms_norm=triton, gated_residual=inductor")
        monkeypatch.setenv("TRITIUM_GRAPH_LOG_URL", "logs")
        config = CompilationConfig()
        assert config.engine == "eager"
        assert config.fusion_patterns == FusionPatterns(enable_rope=False)
        assert config.pass_config == PassConfig(enable_nd_tiling_workaround=False)
        assert config.force_provider == (("gated_residual", "inductor"), ("rms_norm", "triton"))
        assert config.graph_log_url == "logs"

    def test_an_argument_wins_over_it_and_it_wins_over_the_default(self, monkeypatch):
        monkeypatch.setenv("TRITIUM_ENGINE", "eager")
        assert CompilationConfig().engine == "eager"
        assert CompilationConfig(engine="inductor").engine == "inductor"
        monkeypatch.setenv("TRITIUM_FUSION_PATTERNS__ENABLE_ROPE", "0")
        given = FusionPatterns(enable_rms_norm=False)
        assert (given.enable_rms_norm, given.enable_rope) == (False, False)
        assert FusionPatterns(enable_rope=True).enable_rope is True

    def test_is_not_read_again_for_a_copy(self, monkeypatch):
        config = CompilationConfig()
        monkeypatch.setenv("TRITIUM_ENGINE", "eager")
        assert config.with_(enable_freezing=True).engine == "inductor"

    def test_booleans(self, monkeypatch):
        for text, value in (("1", True), ("Yes", True), ("ON", True), ("off", False), ("False", False)):
            monkeypatch.setenv("TRITIUM_ENABLE_FREEZING", text)
            assert CompilationConfig().enable_freezing is value

    @pytest.mark.parametrize(
        ("name", "value", "message"),
        [
            ("TRITIUM_ENGIN", "eager", "did you mean 'TRITIUM_ENGINE'"),
            ("TRITIUM_FUSION_PATTERNS__ENABLE_ROPES", "0", "did you mean 'TRITIUM_FUSION_PATTERNS__ENABLE_ROPE'"),
            ("TRITIUM_FUSION_PATTERNS_ENABLE_ROPE", "0", "did you mean 'TRITIUM_FUSION_PATTERNS__ENABLE_ROPE'"),
            ("TRITIUM_ENABLE_FREEZING", "maybe", "must be bool"),
            ("TRITIUM_MAX_CAPTURES", "many", "must be int"),
            ("TRITIUM_ENGINE", "egaer", "did you mean 'eager'"),
            ("TRITIUM_FORCE_PROVIDER", "rms_norm=", "not of the form op=provider"),
            ("TRITIUM_MEASURE_PROVIDERS", "0", "is not a setting of tritium"),
        ],
    )
    def test_a_wrong_variable_is_an_error_that_names_it(self, monkeypatch, name, value, message):
        monkeypatch.setenv(name, value)
        with pytest.raises(ConfigError) as error:
            CompilationConfig()
        assert name in str(error.value)
        assert message in str(error.value)


def test_a_folder_is_not_part_of_the_identity():
    assert CompilationConfig(graph_log_url="a").identity() == CompilationConfig(graph_log_url="b").identity()
    assert CompilationConfig(enable_freezing=True).identity() != CompilationConfig().identity()
    assert CompilationConfig(reuse_blocks=True).identity() != CompilationConfig().identity()
    off = CompilationConfig(fusion_patterns=FusionPatterns(enable_rope=False))
    assert off.identity() != CompilationConfig().identity()


def test_the_attention_in_the_environment_is_checked(monkeypatch):
    assert set(ATTENTIONS) == {"runtime", "static", "lossy", *(provider.name for provider in attention.OP.providers)}
    monkeypatch.setenv("TRITIUM_ATTENTION", "banana")
    with pytest.raises(ConfigError, match="TRITIUM_ATTENTION=banana: unknown attention implementation; valid: "):
        CompilationConfig()
    for name in ATTENTIONS:
        monkeypatch.setenv("TRITIUM_ATTENTION", name)
        CompilationConfig()
