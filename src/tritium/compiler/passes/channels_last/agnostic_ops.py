"""List operations whose values do not depend on input strides, and which can keep a memory format."""

from __future__ import annotations

import operator

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name

from tritium import compat

_NAMES = """
    add sub mul div true_divide truediv neg pow square sqrt rsqrt exp sigmoid tanh abs clamp clamp_min clamp_max minimum
    maximum where addcmul lerp silu relu relu6 gelu leaky_relu elu mish hardswish hardsigmoid softplus dropout
    to float half bfloat16 type_as detach clone contiguous
    pad interpolate cat concat concatenate group_norm layer_norm rms_norm normalize linear mean sum amax amin
    avg_pool2d avg_pool3d permute transpose swapaxes swapdims movedim moveaxis reshape view flatten unflatten squeeze
    unsqueeze expand repeat repeat_interleave stack chunk split split_with_sizes unbind getitem select narrow flip
    pixel_shuffle pixel_unshuffle
""".split()  # noqa: SIM905 - shorter than one name per line
JOINS = frozenset({torch.cat, torch.concat, torch.concatenate})

# Operations whose values do not depend on input strides, as functions and as method names.
AGNOSTIC = frozenset(
    {
        *_NAMES,
        *(
            getattr(space, name)
            for space in (torch, F, compat.operators.NN, operator)
            for name in _NAMES
            if hasattr(space, name)
        ),
    }
)
DROPOUTS = frozenset({F.dropout, torch.dropout})
# Operations that read sizes but no memory.
QUERIES = frozenset({"size", "dim", "numel", "ndimension"})
