"""Wrong arguments of the front door: one line of ours, at construction; short forms of right ones."""

import pytest
from torch import nn

import tritium
from support import small_pipelines
from tritium import Choice, CompilationConfig, Plan, Shapes
from tritium.errors import ConfigError, PipelineError, ShapeError, TritiumError

QUIET = Plan(config=CompilationConfig(engine="eager"), progress=False)


class TestShapes:
    @pytest.mark.parametrize(
        ("sizes", "expected"),
        [
            (64, ((64, 64),)),
            ((64, 96), ((64, 96),)),
            ([(64, 96)], ((64, 96),)),
            ([[64, 96], (64, 96)], ((64, 96),)),
            (((side, side) for side in (32, 48)), ((32, 32), (48, 48))),
            (iter([(64, 96)]), ((64, 96),)),
            (range(32, 65, 32), ((32, 32), (32, 64), (64, 32), (64, 64))),
        ],
    )
    def test_forms_of_sizes(self, sizes, expected):
        assert Shapes(sizes=sizes).sizes == expected

    def test_single_counts_and_generators(self):
        shapes = Shapes(sizes=64, batch=2, text_tokens=512)
        assert (shapes.batch, shapes.text_tokens) == ((2,), (512,))
        shapes = Shapes(sizes=64, batch=(n for n in (1, 2)), text_tokens=iter([16]))
        assert (shapes.batch, shapes.text_tokens) == ((1, 2), (16,))

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"sizes": None}, "got None"),
            ({"sizes": "64x64"}, "got '64x64'"),
            ({"sizes": 0}, "got 0"),
            ({"sizes": [(64,)]}, r"got \(64,\)"),
            ({"sizes": [(64, float("nan"))]}, "nan"),
            ({"sizes": [(10**30, 64)]}, "got"),
            ({"sizes": iter([])}, "no call would be inside"),
            ({"sizes": range(0)}, "no call would be inside"),
            ({"sizes": 64, "batch": ()}, "no call would be inside"),
            ({"sizes": 64, "batch": None}, "got None"),
            ({"sizes": 64, "batch": [[1]]}, r"got \[1\]"),
            ({"sizes": 64, "batch": [True]}, "got True"),
            ({"sizes": 64, "text_tokens": None}, "got None"),
            ({"sizes": 64, "frames": 3}, "Shapes has no field 'frames'"),
        ],
    )
    def test_refused(self, arguments, message):
        with pytest.raises(ConfigError, match=message):
            Shapes(**arguments)

    def test_positional(self):
        with pytest.raises(ConfigError, match="keyword arguments only"):
            Shapes([(64, 64)])


class TestPlan:
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"components": ["vae"]}, r"Plan\.components maps"),
            ({"components": None}, r"Plan\.components maps"),
            ({"components": "eager"}, r"Plan\.components maps"),
            ({"components": {3: "eager"}}, "named by a string"),
            ({"blocks": None}, r"Plan\.blocks maps"),
            ({"blocks": ["Block"]}, r"Plan\.blocks maps"),
            ({"blocks": {"transformer": None}}, "class name of a block"),
            ({"blocks": {"transformer": 3}}, "class name of a block"),
            ({"blocks": {"transformer": ()}}, "class name of a block"),
            ({"blocks": {"transformer": (3,)}}, "class name of a block"),
            ({"blocks": {"vae": "X"}}, "'vae', whose encoder and decoder"),
            ({"dynamic": "yes"}, r"Plan\.dynamic must be None, True or False"),
            ({"dynamic": 3}, r"Plan\.dynamic"),
            ({"measure": "no"}, r"Plan\.measure must be True or False"),
            ({"measure": float("nan")}, r"Plan\.measure"),
            ({"progress": "no"}, r"Plan\.progress"),
            ({"check_memory": "no"}, r"Plan\.check_memory"),
            ({"compnents": {}}, "did you mean 'components'"),
        ],
    )
    def test_refused(self, arguments, message):
        with pytest.raises(ConfigError, match=message):
            Plan(**arguments)

    def test_a_choice_has_keywords(self):
        with pytest.raises(ConfigError, match="keyword arguments only"):
            Choice("eager")
        with pytest.raises(ConfigError, match="did you mean 'how'"):
            Choice(hwo="eager")

    def test_a_changed_copy_is_checked(self):
        with pytest.raises(ConfigError, match="did you mean 'measure'"):
            Plan().with_(mesure=True)


LINEAR = nn.Linear(2, 2)


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda: tritium.Backend(fusions=[3]), ConfigError, r"fusions=\.\.\.\) takes several Fusion values, got a int"),
        (lambda: tritium.Backend(passes=3), ConfigError, r"passes=\.\.\.\) takes several Pass values"),
        (lambda: tritium.Backend(passes=[len]), ConfigError, r"takes several Pass values"),
        (lambda: tritium.compile(LINEAR, dynamic_dims=["input"]), ShapeError, "dynamic_dims maps"),
        (lambda: tritium.compile(LINEAR, dynamic_dims={3: [0]}), ShapeError, "named by a string"),
        (lambda: tritium.pad_to(LINEAR, {}, mask="m"), ConfigError, "no dim is named"),
        (lambda: tritium.pad_to(LINEAR, {"input": {}}, mask="m"), ConfigError, "no dim is named"),
        (lambda: tritium.pad_to(LINEAR, {"input": (2,)}, mask="m"), ConfigError, "takes dims as"),
        (lambda: tritium.pad_to(LINEAR, {"input": {"a": (2,)}}, mask="m"), ConfigError, "must be an integer"),
        (lambda: tritium.pad_to(LINEAR, {"input": {0: 3.5}}, mask="m"), ConfigError, "pad_to takes dims as"),
        (lambda: tritium.optimize(None), PipelineError, "takes a DiffusionPipeline or an nn.Module, got NoneType"),
    ],
)
def test_one_line_of_ours(call, kind, message):
    with pytest.raises(kind, match=message) as raised:
        call()
    assert "\n" not in str(raised.value)


class TestHandle:
    @pytest.fixture(scope="class")
    def pipe(self):
        return small_pipelines.flux(1, 1)

    @pytest.mark.parametrize(
        "choices", [{"nope": Choice()}, {"transformer": None}, ["transformer"], {3: Choice()}, {"vae.decode": "nope"}]
    )
    def test_use_refuses_and_switches_nothing(self, pipe, choices):
        with tritium.optimize(pipe, QUIET) as handle:
            before = handle.choices
            mixed = {"vae.encode": "eager", **choices} if isinstance(choices, dict) else choices
            with pytest.raises(TritiumError):
                handle.use(mixed)
            assert handle.choices == before

    def test_use_takes_a_word(self, pipe):
        with tritium.optimize(pipe, QUIET) as handle:
            handle.use({"transformer": "eager"})
            assert handle.choices["transformer"] == Choice(how="eager")

    def test_a_removed_handle_installs_nothing(self, pipe):
        handle = tritium.optimize(pipe, QUIET)
        part = handle.part("transformer")
        handle.remove()
        for use in (lambda: handle.use({"transformer": Choice()}), lambda: part.use(Choice())):
            with pytest.raises(PipelineError, match="handle is removed"):
                use()
        assert not any("_compiled_call_impl" in module.__dict__ for module in pipe.transformer.modules())
        tritium.optimize(pipe, QUIET).remove()

    def test_artifacts_are_a_path(self, pipe):
        with pytest.raises(ConfigError, match="artifacts takes the path"):
            tritium.optimize(pipe, QUIET, artifacts=3)
        assert "_compiled_call_impl" not in pipe.transformer.__dict__
