"""The state of a model as users see it: compare it, and where its parameters are."""

import torch


def snapshot(model):
    """Copies of the values of a state dict."""
    return {name: value.clone() for name, value in model.state_dict().items()}


def addresses(model):
    return {name: parameter.data_ptr() for name, parameter in model.named_parameters()}


def equal(first, second):
    """Whether two state dicts have the same names, dtypes and bits."""
    return list(first) == list(second) and all(
        one.dtype == other.dtype and torch.equal(one, other)
        for one, other in zip(first.values(), second.values(), strict=True)
    )
