"""`tritium.pad_to`: a few lengths serve all, and padding that is read is found out."""

import pytest
import torch
from diffusers import PixArtTransformer2DModel
from torch import nn

import tritium
from tritium import Backend, CompilationConfig
from tritium.errors import ConfigError, ShapeError


class Reader(nn.Module):
    """Attends to a prompt; ignores what its mask hides, if it is told to."""

    def __init__(self, honest=True):
        super().__init__()
        self.honest = honest
        self.name = "reader"

    def forward(self, hidden_states, encoder_hidden_states, encoder_attention_mask=None):
        mask = None
        if encoder_attention_mask is not None and self.honest:
            mask = encoder_attention_mask[:, None].bool()
        out = nn.functional.scaled_dot_product_attention(
            hidden_states, encoder_hidden_states, encoder_hidden_states, attn_mask=mask
        )
        return {"sample": out, "prompt": encoder_hidden_states * 2}


def inputs(text, batch=2):
    return torch.randn(batch, 5, 8), torch.randn(batch, text, 8)


DIMS = {"encoder_hidden_states": {1: (4, 8, 16)}}


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


class TestPadding:
    def test_results_are_those_without_padding(self):
        model = Reader()
        padded = tritium.pad_to(model, DIMS)
        for text in (1, 3, 4, 7, 16):
            x, y = inputs(text)
            found, right = padded(x, encoder_hidden_states=y), model(x, y)
            torch.testing.assert_close(found["sample"], right["sample"])
            assert torch.equal(found["prompt"], right["prompt"])

    def test_the_model_sees_the_buckets_alone(self):
        seen = set()

        def model(hidden_states, encoder_hidden_states, encoder_attention_mask=None):
            if not proving:
                seen.add((encoder_hidden_states.shape[1], tuple(encoder_attention_mask.sum(1).tolist())))
            return Reader()(hidden_states, encoder_hidden_states, encoder_attention_mask)

        padded, proving = tritium.pad_to(model, DIMS), True
        for text in (3, 7):
            padded(*inputs(text))
        proving = False
        for text in (2, 3, 5, 7):
            padded(*inputs(text))
        assert seen == {(4, (2, 2)), (4, (3, 3)), (8, (5, 5)), (8, (7, 7))}

    def test_a_mask_of_the_callers_is_padded(self):
        padded = tritium.pad_to(Reader(), DIMS)
        x, y = inputs(6)
        mask = torch.tensor([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]])
        torch.testing.assert_close(padded(x, y, mask)["sample"], Reader()(x, y, mask)["sample"])

    def test_one_compilation_serves_a_bucket(self):
        compiled = torch.compile(Reader(), backend=Backend(CompilationConfig(engine="eager")), dynamic=False)
        padded = tritium.pad_to(compiled, DIMS)
        for text in (5, 6, 7, 8):
            x, y = inputs(text)
            torch.testing.assert_close(padded(x, y)["sample"], Reader()(x, y)["sample"])
        # A tensor that needs no padding has no mask made of a comparison, and still the same layout.
        assert len(tritium.explain(compiled).records) == 1

    def test_random_numbers_are_the_callers(self):
        padded = tritium.pad_to(Reader(), DIMS)
        x, y = inputs(6)
        before = torch.get_rng_state()
        padded(x, y)
        assert torch.equal(torch.get_rng_state(), before)

    def test_a_module_stays_what_it_was(self):
        padded = tritium.pad_to(Reader(), DIMS)
        assert padded.name == "reader"
        assert isinstance(padded, nn.Module)

    def test_a_stock_model(self):
        model = PixArtTransformer2DModel(
            num_attention_heads=2,
            attention_head_dim=8,
            in_channels=4,
            out_channels=4,
            num_layers=1,
            cross_attention_dim=16,
            caption_channels=12,
            sample_size=8,
            norm_num_groups=1,
            use_additional_conditions=False,
        ).eval()
        padded = tritium.pad_to(model, {"encoder_hidden_states": {1: (8, 16)}})
        x, text = torch.randn(1, 4, 8, 8), torch.randn(1, 5, 12)
        call = {"timestep": torch.tensor([3]), "added_cond_kwargs": {"resolution": None, "aspect_ratio": None}}
        with torch.no_grad():
            found = padded(x, encoder_hidden_states=text, **call).sample
            right = model(x, encoder_hidden_states=text, **call).sample
        torch.testing.assert_close(found, right)


class TestRefusals:
    def test_a_model_that_takes_no_mask(self):
        with pytest.raises(ConfigError, match="no way to ignore padding: no argument takes a mask for 'x'"):
            tritium.pad_to(lambda x: x, {"x": {1: (4,)}})

    def test_a_mask_that_is_not_honoured(self):
        padded = tritium.pad_to(Reader(honest=False), DIMS)
        with pytest.raises(ShapeError, match="reads the padding although encoder_attention_mask masks it"):
            padded(*inputs(3))

    def test_a_length_above_all_buckets(self):
        with pytest.raises(ShapeError, match="encoder_hidden_states has size 17, and the largest bucket"):
            tritium.pad_to(Reader(), DIMS)(*inputs(17))

    @pytest.mark.parametrize(
        ("dims", "mask", "message"),
        [
            ({"encoder_hiden_states": {1: (4,)}}, None, "did you mean 'encoder_hidden_states'"),
            ({"encoder_hidden_states": {1: ()}}, None, "integers above 0"),
            ({"encoder_hidden_states": {1: (4,)}}, "attention", "has no argument 'attention'"),
            ({"encoder_hidden_states": {1: (4,)}}, {"hidden_states": "encoder_attention_mask"}, "is not padded"),
            ({"encoder_hidden_states": {1: (4,), 2: (8,)}}, None, "one dim of it can be padded"),
        ],
    )
    def test_names_and_sizes_that_mean_nothing(self, dims, mask, message):
        with pytest.raises((ConfigError, ShapeError), match=message):
            tritium.pad_to(Reader(), dims, mask=mask)

    def test_an_additive_mask(self):
        x, y = inputs(6)
        with pytest.raises(ShapeError, match="adds negative numbers"):
            tritium.pad_to(Reader(), DIMS)(x, y, torch.full((2, 6), -1e4))
