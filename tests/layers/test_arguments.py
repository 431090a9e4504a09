"""The check of arguments that all layer functions share."""

import fractions

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tritium
from tritium.errors import ArgumentError, ArgumentTypeError


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"query": [1]}, ArgumentTypeError, "query must be torch.Tensor, got list"),
        ({"key": None}, ArgumentTypeError, "key must be torch.Tensor, got NoneType"),
        ({"fused": 1}, ArgumentTypeError, "fused must be bool, got 1"),
        ({"attn_mask": [True]}, ArgumentTypeError, "attn_mask must be torch.Tensor | None, got list"),
        ({"scale": "1"}, ArgumentTypeError, "scale must be float | None, got '1'"),
        ({"op_type": ["sdpa"]}, ArgumentTypeError, "op_type must be str | None, got list"),
        ({"opt_mode": 1}, ArgumentTypeError, "opt_mode must be one of runtime, static, manual, lossy, got 1"),
        (
            {"opt_mode": "fast"},
            ArgumentError,
            "there is no opt_mode 'fast'; valid: 'lossy', 'manual', 'runtime', 'static'",
        ),
        ({"layout": "BSDN"}, ArgumentError, "there is no layout 'BSDN'; did you mean 'BSND'"),
        ({"value": torch.ones(2, 7, 4, 8).int()}, ArgumentTypeError, "value must be float16, .*, got torch.int32"),
        ({"query": torch.ones(2, 7, 4, 8, device="meta")}, ArgumentError, "query on meta, key on cpu"),
    ],
)
def test_errors(changes, error, words):
    given = {name: torch.ones(2, 7, 4, 8) for name in ("query", "key", "value")}
    with pytest.raises(error, match=words.replace("|", r"\|")):
        tritium.attention_forward(**{**given, **changes})


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: tritium.RMSNorm((4, 4)), "hidden_size must be int, got tuple"),
        (
            lambda: tritium.layernorm_scale_shift(nn.Identity(), *[torch.ones(1, 1, 1)] * 3),
            "nn.LayerNorm, got Identity",
        ),
        (lambda: tritium.set_attention("transformer"), "module must be nn.Module, got 'transformer'"),
        (lambda: tritium.register_attention_backend("mine", 3), "attend must be Callable.*, got 3"),
        (lambda: tritium.attention_forward_varlen(*[torch.ones(7, 2, 8)] * 3, "07", [0, 7]), "got '07'"),
    ],
)
def test_annotations_of_every_kind(call, words):
    with pytest.raises(ArgumentTypeError, match=words):
        call()


def test_numbers_of_other_libraries(random):
    norm, x = tritium.RMSNorm(np.int64(4), fractions.Fraction(1, 10)), random(2, 4)
    torch.testing.assert_close(norm(x), F.rms_norm(x, (4,), eps=0.1))


def test_a_norm_on_another_device():
    with pytest.raises(ArgumentError, match="one device, got x on meta, weight on cpu"):
        tritium.RMSNorm(8)(torch.ones(2, 8, device="meta"))
