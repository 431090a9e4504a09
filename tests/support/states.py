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


def installed(model):
    """What other code may install on modules, by path: attributes, a forward, a processor, hooks, and a call of its own."""
    return {
        path: (
            sorted(vars(module)),
            id(vars(module).get("forward")),
            id(getattr(module, "processor", None)),
            [list(hooks) for name, hooks in vars(module).items() if name.endswith("_hooks")],
        )
        for path, module in model.named_modules()
    }
