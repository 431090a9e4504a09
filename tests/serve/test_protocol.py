"""Requests as hypothesis writes them: what the gate lets through keeps the model's promises, the rest is a 400."""

import math

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from pydantic import ValidationError

from support.fake_runner import model, video_model
from tritium.serve.engine import Done, Job, Refused
from tritium.serve.faults import Fault, of_refusal
from tritium.serve.gate import accept
from tritium.serve.protocol import Accepted, ImageRequest, Sampling, VideoRequest, form_fields, images_response, usage
from tritium.serve.settings import Settings

MODELS = (model(), video_model())
SETTINGS = Settings()

ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-5, 70)
    | st.floats()
    | st.sampled_from(("", "1", "64x64", "tiny", "auto", "ink")),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(("name", "scale", "steps")), inner, max_size=3)
    ),
    max_leaves=5,
)
LIKELY = {
    "prompt": st.text(max_size=20),
    "model": st.sampled_from(("tiny", "film", None)),
    "size": st.sampled_from(("64x64", "96x64", "auto", "64x96", None)),
    "n": st.integers(0, 12),
    "num_inference_steps": st.integers(0, 60),
    "seed": st.integers(-1, 2**64),
    "guidance_scale": st.floats(-1, 101),
}


def requests(kind):
    fields = {name: LIKELY.get(name, ANYTHING) for name in kind.model_fields}
    options = st.fixed_dictionaries({}, optional=dict.fromkeys(Sampling.model_fields, ANYTHING))
    fields["tritium"] = st.none() | options
    required = {"prompt": fields.pop("prompt")}
    few = st.lists(st.sampled_from(sorted(fields)), max_size=4, unique=True)
    return few.flatmap(lambda names: st.fixed_dictionaries({**required, **{name: fields[name] for name in names}}))


def answer(kind, body):
    """Return the job of a request, or its fault."""
    try:
        request = kind.model_validate(body)
        return accept(request, "video" if kind is VideoRequest else "image", MODELS, SETTINGS)
    except (ValidationError, Fault) as refused:
        return refused


def check(job, chosen):
    assert job.size in chosen.sizes
    assert 1 <= job.steps <= chosen.max_steps
    assert 1 <= job.n <= 10
    assert job.frames in chosen.frames
    assert 0 <= job.seed < 2**63 - 16
    assert job.guidance is None or 0 <= job.guidance <= 100
    assert {lora.name for lora in job.loras} <= set(chosen.loras)
    assert job.recipe in (None, *chosen.recipes)
    assert job.fidelity in (None, *chosen.fidelities)
    assert 0 < job.timeout <= 3600
    assert math.isfinite(sum(lora.scale for lora in job.loras))


@settings(max_examples=200, deadline=None)
@given(requests(ImageRequest))
def test_an_accepted_image_keeps_the_promises(body):
    accepted = answer(ImageRequest, body)
    if isinstance(accepted, Accepted):
        check(accepted.job, MODELS[0])
        assert accepted.job.kind == "image"
    elif isinstance(accepted, Fault):
        assert (accepted.status, accepted.retry) in ((400, False), (404, False))
        assert accepted.message


@settings(max_examples=100, deadline=None)
@given(requests(VideoRequest))
def test_an_accepted_video_keeps_the_promises(body):
    accepted = answer(VideoRequest, {"model": "film", **body})
    if isinstance(accepted, Accepted):
        check(accepted.job, MODELS[1])
        assert accepted.background


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(st.from_regex(r"\A(n|tritium|lora)(\[[a-z]{0,2}\]){0,3}\Z"), st.sampled_from(("1", "x", "{}"))),
        max_size=6,
    )
)
def test_any_form_is_read_or_refused(items):
    try:
        fields, status = form_fields(items), 200
    except Fault as fault:
        fields, status = {}, fault.status
    assert status in (200, 400)
    assert status == 400 or set(fields) == {name.split("[")[0] for name, _ in items}


def test_forms_nest():
    items = [("n", "2"), ("tritium[steps]", "3"), ("tritium[loras][][name]", "a"), ("tritium[loras][][name]", "b")]
    assert form_fields(items) == {"n": "2", "tritium": {"steps": "3", "loras": [{"name": "a"}, {"name": "b"}]}}
    assert form_fields([("tritium", '{"steps": 3}')]) == {"tritium": {"steps": 3}}
    for contradiction in ([("n", "1"), ("n[a]", "2")], [("n[a]", "2"), ("n", "1")]):
        with pytest.raises(Fault, match="contradict"):
            form_fields(contradiction)
    assert form_fields([("x[]", "1"), ("x[]", "2")]) == {"x": ["1", "2"]}


def test_seeds_are_random_unless_they_are_chosen():
    seeds = {answer(ImageRequest, {"prompt": "x"}).job.seed for _ in range(20)}
    assert len(seeds) == 20
    assert len({answer(ImageRequest, {"prompt": "x"}).job.id for _ in range(20)}) == 20


def test_a_timeout_is_the_shortest_of_all():
    def timeout(patience=None, **options):
        request = ImageRequest(prompt="x", tritium=Sampling(**options))
        return accept(request, "image", MODELS, SETTINGS, patience=patience).job.timeout

    assert timeout() == 600
    assert timeout(patience=30) == 30
    assert timeout(patience=30, timeout=5.0) == 5
    assert timeout(patience=7000) == 600
    # Its client does not wait for a background job.
    assert timeout(patience=30, background=True) == 3600


@pytest.mark.parametrize(
    ("seconds", "frames"), [("4", 33), ("4.125", 33), ("8", 65), ("8.3", 65), ("12", None), ("nan", None), ("x", None)]
)
def test_seconds_of_a_video_are_promised_frames(seconds, frames):
    accepted = answer(VideoRequest, {"prompt": "x", "model": "film", "seconds": seconds})
    if frames is None:
        assert (accepted.param, accepted.status) == ("seconds", 400)
    else:
        assert accepted.job.frames == frames


def test_usage_counts_patches_and_tokens():
    job = Job(id="a", model="tiny", prompt="one two", width=96, height=64, steps=4, n=3)
    counted = usage(Accepted(job=job, quality="auto", pixels=257), {"text_tokens": 77})
    assert (counted["input_tokens"], counted["output_tokens"], counted["total_tokens"]) == (79, 72, 151)
    assert counted["input_tokens_details"] == {"image_tokens": 2, "text_tokens": 77}


def test_a_response_names_what_was_used():
    job = Job(id="a", model="tiny", prompt="x", width=64, height=64, steps=4, guidance=2.0)
    response = images_response(Accepted(job=job, quality="high"), Done(images=(b"1",), facts={"batched": 2}), 5)
    assert response["data"] == [{"b64_json": "MQ=="}]
    assert response["tritium"] == {
        "id": "a",
        "model": "tiny",
        "seed": 0,
        "steps": 4,
        "guidance_scale": 2.0,
        "batched": 2,
    }


@pytest.mark.parametrize(
    ("code", "after", "status", "headers"),
    [
        ("queue_full", 2.34, 429, {"x-should-retry": "true", "retry-after": "3", "retry-after-ms": "2340"}),
        ("queue_full", None, 400, {"x-should-retry": "false"}),
        ("deadline", 1.0, 429, {"x-should-retry": "true", "retry-after": "1", "retry-after-ms": "1000"}),
        ("draining", 5.0, 503, {"x-should-retry": "true", "retry-after": "5", "retry-after-ms": "5000"}),
    ],
)
def test_refusals_say_when_to_come_back(code, after, status, headers):
    fault = of_refusal(Refused(code, "full", after))
    assert (fault.status, fault.all_headers()) == (status, headers)
