"""`set_attention` on models as diffusers ships them."""

import copy
import pickle

import pytest
import torch

import tritium
from support.small_models import flux, flux_inputs
from tritium import tuning
from tritium.errors import ArgumentError, ArgumentTypeError
from tritium.layers.attention import choose

diffusers = pytest.importorskip("diffusers")


@pytest.fixture(scope="module")
def unet():
    torch.manual_seed(0)
    model = diffusers.UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(32, 32),
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=16,
        attention_head_dim=8,
        norm_num_groups=8,
    ).eval()
    return model, (torch.randn(1, 4, 8, 8), torch.tensor(5), torch.randn(1, 7, 16))


def states(model):
    """What a handle may change: the processors, their attributes, and the forwards of their layers."""
    return [
        (id(layer.processor), type(layer.processor), dict(vars(layer.processor)), vars(layer).get("forward"))
        for layer in model.modules()
        if getattr(layer, "processor", None) is not None
    ]


@torch.inference_mode()
def test_a_transformer_and_back():
    model, inputs = flux(), flux_inputs()
    before, plain = states(model), model(**inputs)[0]
    with tritium.set_attention(model, opt_mode="manual", op_type="chunked") as handle:
        assert handle.layers == len(before)
        served = model(**inputs)[0]
        assert not torch.equal(served, plain)
        torch.testing.assert_close(served, plain, rtol=1e-4, atol=1e-5)
    assert states(model) == before
    assert torch.equal(model(**inputs)[0], plain)
    tritium.set_attention(model)
    torch.testing.assert_close(model(**inputs)[0], plain, rtol=1e-4, atol=1e-5)
    assert len(tuning.verdicts()) == 1


@torch.inference_mode()
def test_two_models_with_two_ways():
    first, second, inputs = flux(), flux(), flux_inputs()
    second.load_state_dict(first.state_dict())
    tritium.set_attention(first, opt_mode="manual", op_type="sdpa")
    tritium.set_attention(second, opt_mode="manual", op_type="chunked")
    assert not torch.equal(first(**inputs)[0], second(**inputs)[0])


@torch.inference_mode()
def test_diffusers_own_call_knows_the_name():
    model, inputs = flux(), flux_inputs()
    plain = model(**inputs)[0]
    tritium.register_attention_backend()
    model.set_attention_backend("tritium")
    try:
        torch.testing.assert_close(model(**inputs)[0], plain, rtol=1e-4, atol=1e-5)
        assert tuning.verdicts()
    finally:
        model.reset_attention_backend()
        # Diffusers sets the name for every model of the process, and resetting does not undo that.
        from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry

        _AttentionBackendRegistry.set_active_backend(AttentionBackendName.NATIVE)


@torch.inference_mode()
def test_an_older_model_and_back(unet):
    model, inputs = unet
    before, plain = states(model), model(*inputs)[0]
    with tritium.set_attention(model, opt_mode="manual", op_type="chunked") as handle:
        assert handle.layers == len(before)
        served = model(*inputs)[0]
        assert not torch.equal(served, plain)
        torch.testing.assert_close(served, plain, rtol=1e-4, atol=1e-5)
    assert states(model) == before
    assert torch.equal(model(*inputs)[0], plain)


@pytest.mark.parametrize("make", [lambda unet: (flux(), (), flux_inputs()), lambda unet: (unet[0], unet[1], {})])
@torch.inference_mode()
def test_compiled_without_a_break(make, unet):
    model, args, kwargs = make(unet)
    plain = model(*args, **kwargs)[0]
    with tritium.set_attention(model):
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(*args, **kwargs)[0], plain, rtol=1e-4, atol=1e-5)


def test_a_mask_for_each_sample_as_diffusers_means_it():
    from diffusers.models.attention_dispatch import dispatch_attention_fn

    member = tritium.register_attention_backend()
    q = torch.randn(3, 3, 2, 8)
    mask = torch.tensor([[True, True, False], [True, False, False], [True, True, True]])
    plain = dispatch_attention_fn(q, q, q, mask)
    torch.testing.assert_close(dispatch_attention_fn(q, q, q, mask, backend=member), plain)
    with pytest.raises(ArgumentError, match="no dropout"):
        dispatch_attention_fn(q, q, q, dropout_p=0.1, backend=member)


@torch.inference_mode()
def test_a_processor_that_is_a_module_is_left_alone_and_named():
    class Own(torch.nn.Module):
        def forward(self, attn, hidden_states, *args, **kwargs):
            return hidden_states, hidden_states[:, :1]

    model = flux()
    model.transformer_blocks[0].attn.processor = Own()
    handle = tritium.set_attention(model)
    assert handle.skipped == ["transformer_blocks.0.attn"]
    assert handle.layers == len(states(model)) - 1


@pytest.fixture
def providers_of(monkeypatch):
    """The names of the providers that a call chooses."""

    def run(call):
        names = set()
        with monkeypatch.context() as patch:
            real = choose.choose
            patch.setattr(choose, "choose", lambda *given: names.add(given[2]) or real(*given))
            tuning.forget()
            call()
        return names

    return run


@pytest.mark.parametrize("first_removed", [0, 1])
@pytest.mark.parametrize("make", ["flux", "unet"])
@torch.inference_mode()
def test_two_handles_are_removed_in_any_order(make, first_removed, unet, providers_of):
    model, inputs = (flux(), flux_inputs()) if make == "flux" else unet

    def call():
        return model(**inputs)[0] if isinstance(inputs, dict) else model(*inputs)[0]

    before, plain = states(model), call()
    handles = [tritium.set_attention(model, opt_mode="manual", op_type=name) for name in ("chunked", "math")]
    assert providers_of(call) == {"math"}
    handles.pop(first_removed).remove()
    assert providers_of(call) == {("chunked", "math")[1 - first_removed]}
    handles.pop().remove()
    assert states(model) == before
    assert torch.equal(call(), plain)


def test_the_same_attention_twice_is_removed_twice():
    model = flux()
    before = states(model)
    first, second = tritium.set_attention(model), tritium.set_attention(model)
    changed = states(model)
    first.remove()
    assert states(model) == changed != before
    second.remove()
    second.remove()
    assert states(model) == before


def test_a_backend_that_other_code_has_set_since_stays():
    model = flux()

    def backends():
        return {vars(m.processor).get("_attention_backend") for m in model.modules() if hasattr(m, "processor")}

    first = tritium.set_attention(model)
    model.set_attention_backend("native")
    native = backends()
    second = tritium.set_attention(model)
    assert backends() != native
    first.remove()
    assert backends() != native
    second.remove()
    assert backends() == native
    first, second = tritium.set_attention(model), tritium.set_attention(model, opt_mode="static")
    model.set_attention_backend("native")
    first.remove()
    assert backends() == native
    second.remove()
    assert backends() == native


@torch.inference_mode()
def test_a_processor_that_layers_share(unet):
    model, inputs = unet
    layers = [m for m in model.modules() if getattr(m, "processor", None) is not None]
    kept = [layer.processor for layer in layers]
    for layer in layers:
        layer.processor = kept[0]
    before, plain = states(model), model(*inputs)[0]
    with tritium.set_attention(model, opt_mode="manual", op_type="math") as handle:
        assert handle.layers == len(layers)
        torch.testing.assert_close(model(*inputs)[0], plain, rtol=1e-4, atol=1e-5)
    assert states(model) == before
    for layer, processor in zip(layers, kept, strict=True):
        layer.processor = processor


@pytest.mark.parametrize("make", ["flux", "unet"])
@torch.inference_mode()
def test_a_copy_computes_like_its_model(make, unet):
    model, inputs = (flux(), flux_inputs()) if make == "flux" else unet

    def call(model):
        return model(**inputs)[0] if isinstance(inputs, dict) else model(*inputs)[0]

    with tritium.set_attention(model, opt_mode="manual", op_type="math"):
        copies = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
        changed = call(model)
    for one in copies:
        assert torch.equal(call(one), changed)


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        (("native",), ArgumentError, "diffusers has an attention backend 'native' of its own"),
        ((5,), ArgumentTypeError, "name must be a string, got 5"),
        (("mine", 3), ArgumentTypeError, "attend must be a Callable, got 3"),
    ],
)
def test_names_that_cannot_be_registered(given, error, words):
    with pytest.raises(error, match=words):
        tritium.register_attention_backend(*given)


def test_errors():
    with pytest.raises(ArgumentError, match="Linear has no attention layers of diffusers"):
        tritium.set_attention(torch.nn.Linear(2, 2))
    with pytest.raises(ArgumentTypeError, match="module must be a Module, got 'transformer'"):
        tritium.set_attention("transformer")
    with pytest.raises(ArgumentError, match="did you mean 'cudnn'"):
        tritium.set_attention(flux(), opt_mode="manual", op_type="cudn")
