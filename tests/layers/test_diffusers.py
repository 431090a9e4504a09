"""`set_attention` on models as diffusers ships them."""

import copy
import pickle

import pytest
import torch

import tritium
from support.small_models import flux, flux_inputs
from tritium import tuning
from tritium.errors import ArgumentError
from tritium.layers import choose

diffusers = pytest.importorskip("diffusers")
dispatch = pytest.importorskip("diffusers.models.attention_dispatch")


class Stock:
    """A model of diffusers, and its inputs."""

    def __init__(self, name):
        torch.manual_seed(0)
        self.args, self.kwargs = (), {}
        if name == "flux":
            self.model, self.kwargs = flux(), flux_inputs()
            return
        # An older model: its processors call PyTorch's attention.
        self.model = diffusers.UNet2DConditionModel(
            sample_size=8,
            block_out_channels=(32, 32),
            down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
            cross_attention_dim=16,
            attention_head_dim=8,
            norm_num_groups=8,
        ).eval()
        self.args = torch.randn(1, 4, 8, 8), torch.tensor(5), torch.randn(1, 7, 16)

    @torch.inference_mode()
    def call(self, model=None):
        return (self.model if model is None else model)(*self.args, **self.kwargs)[0]

    def layers(self):
        return [layer for layer in self.model.modules() if getattr(layer, "processor", None) is not None]

    def state(self):
        """What a handle may change: the processors, their attributes, and the forwards of their layers."""
        return [
            (id(layer.processor), type(layer.processor), dict(vars(layer.processor)), vars(layer).get("forward"))
            for layer in self.layers()
        ]

    def backends(self):
        return {vars(layer.processor).get("_attention_backend") for layer in self.layers()}

    def providers(self, monkeypatch):
        """The names of the providers that a call chooses."""
        names, real = set(), choose.choose
        with monkeypatch.context() as patch:
            patch.setattr(choose, "choose", lambda *given: names.add(given[2]) or real(*given))
            tuning.forget()
            self.call()
        return names


@pytest.fixture(params=["flux", "unet"])
def stock(request):
    return Stock(request.param)


def named(model, name):
    return tritium.set_attention(model, opt_mode="manual", op_type=name)


def test_there_and_back(stock):
    before, plain = stock.state(), stock.call()
    with named(stock.model, "chunked") as handle:
        assert handle.layers == len(before)
        changed = stock.call()
        assert not torch.equal(changed, plain)
        torch.testing.assert_close(changed, plain, rtol=1e-4, atol=1e-5)
        for other in (copy.deepcopy(stock.model), pickle.loads(pickle.dumps(stock.model))):
            assert torch.equal(stock.call(other), changed)
    assert stock.state() == before
    assert torch.equal(stock.call(), plain)
    tritium.set_attention(stock.model)
    torch.testing.assert_close(stock.call(), plain, rtol=1e-4, atol=1e-5)
    assert tuning.verdicts()


def test_two_models_with_two_providers():
    first, second = Stock("flux"), Stock("flux")
    second.model.load_state_dict(first.model.state_dict())
    named(first.model, "sdpa")
    named(second.model, "chunked")
    assert not torch.equal(first.call(), first.call(second.model))


def test_compiled_without_a_break(stock):
    plain = stock.call()
    with tritium.set_attention(stock.model):
        compiled = torch.compile(stock.model, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(stock.call(compiled), plain, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("first_removed", [0, 1])
def test_two_handles_are_removed_in_any_order(stock, first_removed, monkeypatch):
    before, plain = stock.state(), stock.call()
    handles = [named(stock.model, name) for name in ("chunked", "math")]
    assert stock.providers(monkeypatch) == {"math"}
    handles.pop(first_removed).remove()
    assert stock.providers(monkeypatch) == {("chunked", "math")[1 - first_removed]}
    handles.pop().remove()
    assert stock.state() == before
    assert torch.equal(stock.call(), plain)


def test_the_same_attention_twice_is_removed_twice(stock):
    before = stock.state()
    first, second = tritium.set_attention(stock.model), tritium.set_attention(stock.model)
    backends = stock.backends()
    first.remove()
    assert stock.backends() == backends
    assert stock.state() != before
    second.remove()
    second.remove()
    assert stock.state() == before


def test_a_backend_that_other_code_has_set_since_stays():
    stock = Stock("flux")
    first = tritium.set_attention(stock.model)
    stock.model.set_attention_backend("native")
    native = stock.backends()
    second = tritium.set_attention(stock.model)
    assert stock.backends() != native
    first.remove()
    assert stock.backends() != native
    second.remove()
    assert stock.backends() == native
    first, second = tritium.set_attention(stock.model), tritium.set_attention(stock.model, opt_mode="static")
    stock.model.set_attention_backend("native")
    for handle in (first, second):
        handle.remove()
        assert stock.backends() == native


def test_a_processor_that_layers_share(stock):
    shared = stock.layers()[0].processor
    for layer in stock.layers():
        if type(layer.processor) is type(shared):
            layer.processor = shared
    before, plain = stock.state(), stock.call()
    with named(stock.model, "math") as handle:
        assert handle.layers == len(stock.layers())
        torch.testing.assert_close(stock.call(), plain, rtol=1e-4, atol=1e-5)
    assert stock.state() == before


def test_a_processor_that_is_a_module_is_skipped_and_named():
    stock = Stock("flux")
    stock.model.transformer_blocks[0].attn.processor = torch.nn.Identity()
    handle = tritium.set_attention(stock.model)
    assert handle.skipped == ["transformer_blocks.0.attn"]
    assert handle.layers == len(stock.layers()) - 1


def test_set_attention_backend_knows_the_name():
    stock = Stock("flux")
    plain = stock.call()
    tritium.register_attention_backend()
    stock.model.set_attention_backend("tritium")
    try:
        torch.testing.assert_close(stock.call(), plain, rtol=1e-4, atol=1e-5)
        assert tuning.verdicts()
    finally:
        stock.model.reset_attention_backend()
        # Diffusers sets the name for every model of the process, and resetting does not undo that.
        dispatch._AttentionBackendRegistry.set_active_backend(dispatch.AttentionBackendName.NATIVE)


def test_a_mask_for_each_sample_as_diffusers_means_it():
    member = tritium.register_attention_backend()
    q = torch.randn(3, 3, 2, 8)
    mask = torch.tensor([[True, True, False], [True, False, False], [True, True, True]])
    plain = dispatch.dispatch_attention_fn(q, q, q, mask)
    torch.testing.assert_close(dispatch.dispatch_attention_fn(q, q, q, mask, backend=member), plain)
    with pytest.raises(ArgumentError, match="no dropout"):
        dispatch.dispatch_attention_fn(q, q, q, dropout_p=0.1, backend=member)


def test_errors():
    with pytest.raises(ArgumentError, match="Linear has no attention layers of diffusers"):
        tritium.set_attention(torch.nn.Linear(2, 2))
    with pytest.raises(ArgumentError, match="did you mean 'cudnn'"):
        named(flux(), "cudn")
    with pytest.raises(ArgumentError, match="diffusers has an attention backend 'native' of its own"):
        tritium.register_attention_backend("native")
