"""Sparse attention over layers and steps, and on a stock model."""

import gc

import pytest
import torch

import tritium
from support.small_models import flux, flux_inputs
from tritium.errors import ArgumentError, ArgumentTypeError
from tritium.layers.attention.diffusers import attention_layers
from tritium.layers.sparse.diffusers import SparseHandle, _Counter, timestep_of
from tritium.layers.sparse.layout import SparseLayout
from tritium.layers.sparse.masks import Method
from tritium.layers.sparse.schedule import SparseAttention

LAYOUT = SparseLayout((2, 12, 10), 9, 16)


def streams(seed=0, batch=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(batch, LAYOUT.tokens, 2, 16, generator=generator) for _ in range(3)]


def plain(q, k, v, sparsity, sparse_type="rf_v2", scale=None):
    return tritium.sparse_attention(
        q, k, v, input_layout="BSND", sparse_type=sparse_type, latent_shape_q=LAYOUT.latent_shape, txt_len=9,
        block_size=16, sparsity=sparsity, scale=scale,
    )  # fmt: skip


@pytest.fixture
def made(monkeypatch):
    """How many masks were made."""
    count = []
    real = Method.mask
    monkeypatch.setattr(Method, "mask", lambda self, *given: count.append(1) or real(self, *given))
    return count


def test_dense_steps_and_layers_and_the_rest(made):
    attention = SparseAttention(LAYOUT, sparsity=0.6, dense_steps=2, dense_layers={1})
    q, k, v = streams()
    dense, sparse = plain(q, k, v, 0.0), plain(q, k, v, 0.6)
    made.clear()
    for step in range(4):
        for layer in range(3):
            out = attention(q, k, v, step=step, layer=layer)
            torch.testing.assert_close(out, dense if step < 2 or layer == 1 else sparse)
    assert len(made) == 4


def test_a_mask_is_for_some_steps_one_layer_and_one_shape(made):
    attention = SparseAttention(LAYOUT, sparsity=0.6, reuse_steps=3)
    for step in range(7):
        for layer in range(2):
            attention(*streams(step), step=step, layer=layer)
    assert len(made) == 2 * 3
    attention(*streams(0, batch=2), step=7, layer=0)
    assert len(made) == 7
    # A mask of a later step is not used for an earlier one: another image has begun.
    attention(*streams(0, batch=2), step=0, layer=0)
    assert len(made) == 8
    attention.reset()
    attention(*streams(0, batch=2), step=1, layer=0)
    assert len(made) == 9


@pytest.mark.parametrize("sparse_type", ["rf_v2", "radial"])
def test_text_behind_the_latent(sparse_type):
    """The same tokens in another order give the same."""
    q, k, v = streams()
    first, behind = SparseLayout((2, 12, 10), 9, 16), SparseLayout((2, 12, 10), 9, 16, text_first=False)
    expected = SparseAttention(first, sparse_type=sparse_type)(q, k, v, step=0, layer=0)
    moved = [torch.cat([t[:, 9:], t[:, :9]], 1) for t in (q, k, v)]
    out = SparseAttention(behind, sparse_type=sparse_type)(*moved, step=0, layer=0)
    torch.testing.assert_close(torch.cat([out[:, -9:], out[:, :-9]], 1), expected)


@pytest.mark.parametrize("scale", [None, 0.0, -0.3])
@pytest.mark.parametrize("sparse_type", ["rf_v2", "radial", "ada_bsa"])
def test_every_method_gives_what_the_function_gives(sparse_type, scale):
    q, k, v = streams()
    out = SparseAttention(LAYOUT, sparse_type=sparse_type, sparsity=0.5)(q, k, v, step=0, layer=0, scale=scale)
    torch.testing.assert_close(out, plain(q, k, v, 0.5, sparse_type, scale))


def test_a_stream_that_is_permuted_once_needs_no_permuting():
    q, k, v = streams()
    inside = SparseAttention(LAYOUT, sparsity=0.5, permuted=True)
    ordered = [LAYOUT.permute(t) for t in (q, k, v)]
    out = LAYOUT.unpermute(inside(*ordered, step=0, layer=0))
    torch.testing.assert_close(out, plain(q, k, v, 0.5))


def test_density_is_the_mean_of_what_was_done():
    attention = SparseAttention(LAYOUT, sparsity=0.8, dense_steps=1)
    with pytest.raises(ArgumentError, match="nothing was computed"):
        attention.density()
    q, k, v = streams()
    attention(q, k, v, step=0, layer=0)
    assert attention.density() == 1.0
    attention(q, k, v, step=1, layer=0)
    assert 0.5 < attention.density() < 1.0


def test_the_report_shows_who_computes_and_how_densely():
    # Those of other tests are shown for as long as they live.
    gc.collect()
    attention = SparseAttention(LAYOUT, sparsity=0.8)
    q, k, v = streams()

    def function(q, k, v):
        return tritium.attention_forward(q, k, v) + plain(q, k, v, 0.5)

    config = tritium.CompilationConfig(engine="eager")
    with torch.inference_mode():
        compiled = torch.compile(function, backend=tritium.Backend(config), fullgraph=True)
        torch.testing.assert_close(compiled(q, k, v), function(q, k, v))
        assert not [entry for entry in tritium.explain(compiled).attention if entry["graph"] == "-"]
        attention(q, k, v, step=0, layer=0)
    report = tritium.explain(compiled)
    dense, sparse, scheduled = report.to_dict()["attention"]
    assert dense["by"] in ("sdpa", "math", "chunked")
    assert "249 queries, 249 keys, 2 heads of 16" in dense["what"]
    assert (sparse["by"], sparse["what"]) == (
        "reference", "sparse, torch.float32 on cpu, 249 queries in 16 blocks, 249 keys"
    )  # fmt: skip
    assert scheduled["density"] == attention.density() < 1
    assert f"density {attention.density():.3f} over 1 calls" in str(report)


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"reuse_steps": 0}, ArgumentError),
        ({"sparsity": 2}, ArgumentError),
        ({"sparse_type": "none"}, ArgumentError),
        ({"layout": (1, 2, 3)}, ArgumentTypeError),
        ({"by": "nobody"}, ArgumentError),
    ],
)
def test_errors(given, error):
    with pytest.raises(error):
        SparseAttention(**{"layout": LAYOUT, **given})


@pytest.mark.parametrize("permuted", [False, True])
@pytest.mark.parametrize("sparse_type", ["rf_v2", "ada_bsa"])
def test_streams_that_do_not_fit_the_layout(sparse_type, permuted):
    """A kernel would read tokens that are not there, or leave some out."""
    attention = SparseAttention(LAYOUT, sparse_type=sparse_type, permuted=permuted)
    q, k, v = streams()
    for given, error, words in (
        ((q[:, :7], k[:, :7], v[:, :7]), ArgumentError, "q has 7 tokens, and the layout 249"),
        ((q, k[:, 1:], v[:, 1:]), ArgumentError, "k has 248 tokens, and the layout 249"),
        ((q, k[..., :8], v[..., :8]), ArgumentError, "heads of one width"),
        ((q, k.double(), v), ArgumentTypeError, "must have one dtype"),
        ((q[0], k[0], v[0]), ArgumentError, "rank 4"),
    ):
        with pytest.raises(error, match=words):
            attention(*given, step=0, layer=0)


class TestImages:
    """Where another image begins, by the timesteps of forwards."""

    @staticmethod
    def steps(*times, calls=1):
        counter = _Counter(SparseAttention(LAYOUT), calls, lambda args, kwargs: args[0])
        steps = []
        for time in times:
            if time is None:
                SparseHandle(counter).reset()
                continue
            counter.begin(None, (time,), {})
            steps.append((counter.forwards - 1) // calls)
        return steps

    def test_up_down_and_two_calls_a_step(self):
        down = [1.0, 0.75, 0.5, 0.25]
        assert self.steps(*down, *down) == [0, 1, 2, 3] * 2
        assert self.steps(*down[::-1], *down[::-1]) == [0, 1, 2, 3] * 2
        twice = [time for time in down for _ in range(2)]
        assert self.steps(*twice, *twice, calls=2) == [0, 0, 1, 1, 2, 2, 3, 3] * 2

    def test_images_of_few_steps(self):
        assert self.steps(1.0, 1.0, 1.0) == [0, 0, 0]
        assert self.steps(1.0, 1.0, 1.0, 1.0, calls=2) == [0, 0, 0, 0]
        assert self.steps(1.0, 0.5, 1.0, 0.5) == [0, 1, 0, 1]

    def test_each_image_has_a_direction(self):
        down = [1.0, 0.75, 0.5, 0.25]
        # After one in the other direction, the next but one is right, and so is the next after a reset.
        assert self.steps(0.5, *down, *down)[-4:] == [0, 1, 2, 3]
        assert self.steps(*down[::-1], *down, *down)[-4:] == [0, 1, 2, 3]
        assert self.steps(*down[::-1], None, *down)[-4:] == [0, 1, 2, 3]

    @pytest.mark.parametrize("steps", [1, 2, 4, 25, 50])
    @pytest.mark.parametrize(
        ("name", "options"),
        [
            ("FlowMatchEulerDiscreteScheduler", {}),
            ("EulerAncestralDiscreteScheduler", {"timestep_spacing": "trailing"}),
            ("HeunDiscreteScheduler", {}),
            ("PNDMScheduler", {"skip_prk_steps": True}),
            ("LCMScheduler", {}),
            ("UniPCMultistepScheduler", {}),
            ("DPMSolverMultistepScheduler", {"use_karras_sigmas": True}),
            ("DDIMInverseScheduler", {}),
            # Its times go up a little between steps.
            ("KDPM2AncestralDiscreteScheduler", {"use_karras_sigmas": True}),
        ],
    )
    def test_schedulers_as_they_are(self, name, options, steps):
        scheduler = getattr(pytest.importorskip("diffusers"), name)(**options)
        scheduler.set_timesteps(steps)
        times = scheduler.timesteps.tolist()
        assert self.steps(*times, *times) == [*range(len(times))] * 2


def assert_no_backend_is_left():
    from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry

    names = [*AttentionBackendName, *_AttentionBackendRegistry._backends]
    assert not [name for name in names if "sparse" in name.value]


class TestStock:
    @staticmethod
    def model():
        inputs = flux_inputs()
        text = inputs["encoder_hidden_states"].shape[1]
        tokens = inputs["hidden_states"].shape[1]
        return flux(), inputs, SparseLayout((1, 1, tokens), text, 8)

    @staticmethod
    def at(inputs, time):
        return {**inputs, "timestep": torch.full_like(inputs["timestep"], time)}

    @torch.inference_mode()
    def test_dense_first_then_sparse_then_back(self):
        model, inputs, layout = self.model()
        before, later = model(**inputs)[0], self.at(inputs, 0.3)
        dense = model(**later)[0]
        handle = tritium.set_sparse_attention(model, layout, sparsity=0.7, dense_steps=1)
        torch.testing.assert_close(model(**inputs)[0], before, rtol=1e-4, atol=1e-5)
        assert handle.density() == 1.0
        second = model(**later)[0]
        assert not torch.allclose(second, dense, rtol=1e-4, atol=1e-5)
        assert handle.density() < 1.0
        # Another image.
        handle.reset()
        torch.testing.assert_close(model(**later)[0], dense, rtol=1e-4, atol=1e-5)
        handle.remove()
        assert torch.equal(model(**inputs)[0], before)
        assert_no_backend_is_left()

    @torch.inference_mode()
    def test_layers_stay_dense_and_steps_count_two_calls(self, made):
        model, inputs, layout = self.model()
        before = model(**inputs)[0]
        layers = len(attention_layers(model))
        with tritium.set_sparse_attention(model, layout, sparsity=0.7, dense_layers=range(layers)) as handle:
            torch.testing.assert_close(model(**inputs)[0], before, rtol=1e-4, atol=1e-5)
            assert handle.layers == layers
        with tritium.set_sparse_attention(model, layout, sparsity=0.7, calls_per_step=2, dense_steps=1, reuse_steps=2):
            for _ in range(2):
                torch.testing.assert_close(model(**inputs)[0], before, rtol=1e-4, atol=1e-5)
            assert not made
            for time in (0.3, 0.3, 0.2, 0.2):
                model(**self.at(inputs, time))
            # Each of the two calls of a step has separate masks, which are used for two steps.
            assert len(made) == 2 * layers

    @torch.inference_mode()
    def test_video_without_text_in_its_stream(self, made):
        """Wan has a separate attention to its prompt, which stays dense."""
        from tritium.bench import workloads

        (wan,) = workloads.find("wan")
        built = wan.build("cpu", torch.float32, small=True)
        model, inputs = built.model, built.inputs
        before = model(**inputs)[0]
        with tritium.set_sparse_attention(model, SparseLayout((3, 8, 10), 0, 16), sparsity=0.6) as handle:
            after = model(**inputs)[0]
            assert len(made) == len(model.blocks)
            assert 0.5 < handle.density() < 0.9
        assert not torch.allclose(after, before, rtol=1e-4, atol=1e-5)
        assert torch.equal(model(**inputs)[0], before)

    @torch.inference_mode()
    def test_other_tokens_stay_dense(self):
        model, inputs, _ = self.model()
        before = model(**inputs)[0]
        with (
            tritium.set_sparse_attention(model, SparseLayout((1, 5, 7), 3, 8), sparsity=0.9),
            pytest.warns(RuntimeWarning, match="the layout has 38 tokens") as caught,
        ):
            for _ in range(2):
                torch.testing.assert_close(model(**inputs)[0], before, rtol=1e-4, atol=1e-5)
        (said,) = (str(warning.message) for warning in caught)
        tokens = inputs["hidden_states"].shape[1] + inputs["encoder_hidden_states"].shape[1]
        assert f"{tokens} queries and {tokens} keys" in said

    @torch.inference_mode()
    @pytest.mark.parametrize("times", [(1.0, 0.6, 0.2), (0.0, 0.5, 0.9)], ids=["down", "up"])
    def test_every_image_begins_dense_and_with_new_masks(self, made, times):
        model, inputs, layout = self.model()
        layers = len(attention_layers(model))

        def draw():
            """How many masks each step makes."""
            counts = []
            for time in times:
                made.clear()
                model(**self.at(inputs, time))
                counts.append(len(made))
            return counts

        with tritium.set_sparse_attention(model, layout, sparsity=0.7, dense_steps=1, reuse_steps=2) as handle:
            first = draw()
            density = handle.density()
            assert first == [0, layers, 0]
            assert draw() == first
            assert draw() == first
            # Over all images.
            assert handle.density() == pytest.approx(density)

    @torch.inference_mode()
    def test_a_model_without_a_timestep_warns(self, made):
        model, inputs, layout = self.model()
        block = model.transformer_blocks[0]
        with pytest.warns(RuntimeWarning, match=r"has no parameter timestep.*handle\.reset\(\)"):
            handle = tritium.set_sparse_attention(block, layout, sparsity=0.7, dense_steps=1)
        with handle:
            for expected in (0, 1, 2):
                model(**inputs)
                assert len(made) == expected
            handle.reset()
            model(**inputs)
            assert len(made) == 2

    @torch.inference_mode()
    def test_a_forward_without_attentions_is_no_reason_to_warn(self, recwarn):
        """Caches of diffusers leave them out of some."""
        model, inputs, layout = self.model()
        with tritium.set_sparse_attention(model, layout, sparsity=0.7) as handle:
            handle._counter.begin(model, (), {})
            handle._counter.end()
            model(**inputs)
        assert not [warning for warning in recwarn if issubclass(warning.category, RuntimeWarning)]

    def test_where_the_timestep_is(self):
        class Named(torch.nn.Module):
            def forward(self, x, y, timesteps=None):
                return x

        wrapped = Named()
        wrapped.forward = lambda *args, **kwargs: Named.forward(wrapped, *args, **kwargs)
        for module in (Named(), wrapped, torch.compile(Named())):
            read = timestep_of(module)
            assert read((0, 0, 3.0), {}) == read((0, 0, torch.tensor([1.0, 3.0])), {}) == 3.0
            assert read((0, 0), {"timesteps": torch.tensor(3)}) == 3.0
            assert read((0, 0), {}) is None
        assert timestep_of(torch.nn.Linear(2, 2)) is None

    def test_errors_leave_nothing_behind(self):
        model, _, layout = self.model()
        with pytest.raises(ArgumentError, match="calls_per_step must be 1 or more, got 0"):
            tritium.set_sparse_attention(model, layout, calls_per_step=0)
        with pytest.raises(ArgumentError, match="no attention layers"):
            tritium.set_sparse_attention(torch.nn.Linear(2, 2), layout)
        assert_no_backend_is_left()
