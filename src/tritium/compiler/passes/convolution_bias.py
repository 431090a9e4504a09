"""Add a convolution's bias in the kernel of the norm that follows it.

Before:  conv2d(x, w, b) -> tritium::group_norm_silu(., provider="triton")
After:   conv2d(x, w)    -> tritium::group_norm_silu(., offset=b, provider="triton")

On a GPU the bias of a convolution is a separate operation. Inductor fuses it into generated kernels that read the
result, but not into owned kernels: it would read and write the whole image once more for the bias.
"""

from __future__ import annotations

from collections import Counter

from torch import fx

from tritium import ops
from tritium.graph import argument, spatial_convolutions, value_of
from tritium.ops import REFERENCE, Op
from tritium.passes import Applied, Decline, Pass, PassContext

OFFSET = "offset"

ON_A_CPU = "on a CPU a convolution adds its bias itself"
AS_EAGER_DOES = "engine 'eager' adds biases where the model does"
NOTHING_TO_DO = "no kernel of ours reads what a convolution with a bias gives"
READ_ELSEWHERE = "something else reads the convolution's result too"


def decline(device_type: str, engine: str) -> str | None:
    """Return why biases are not moved, or None.

    >>> decline("cuda", "inductor")
    >>> decline("cpu", "inductor")
    'on a CPU a convolution adds its bias itself'
    """
    if engine == "eager":
        return AS_EAGER_DOES
    if device_type == "cpu":
        return ON_A_CPU
    return None if device_type == "cuda" else f"not measured on {device_type!r}"


def run(graph: fx.Graph, context: PassContext) -> Applied | Decline:
    reason = context.read_only or decline(context.device_type, context.config.engine)
    if reason is not None:
        return Decline(reason)
    with_offset = {op.overload: op for op in ops.catalog().values() if OFFSET in op.parameters}
    moved, declined = 0, Counter[str]()
    for convolution in spatial_convolutions(graph):
        if argument(convolution, 2, "bias") is None:
            continue
        norms = [user for user in convolution.users if user.target in with_offset and user.args[0] is convolution]
        if not norms:
            continue
        reason = _decline_norm(convolution, norms[0], with_offset[norms[0].target])
        if reason is None:
            _move_bias(convolution, norms[0])
            moved += 1
        else:
            declined[reason] += 1
    if moved:
        return Applied(f"the norms after {moved} convolutions add their biases", declined)
    return Decline("; ".join(f"{count} biases: {reason}" for reason, count in declined.items()) or NOTHING_TO_DO)


def _decline_norm(convolution: fx.Node, norm: fx.Node, op: Op) -> str | None:
    if list(convolution.users) != [norm] or norm.all_input_nodes.count(convolution) != 1:
        return READ_ELSEWHERE
    provider = norm.kwargs["provider"]
    if provider == REFERENCE:
        return f"{op.name!r} is computed by its reference"
    arguments = {**dict(zip(op.parameters, norm.args, strict=False)), OFFSET: argument(convolution, 2, "bias")}
    fakes = {name: value_of(value) if isinstance(value, fx.Node) else value for name, value in arguments.items()}
    return ops.providers(op)[str(provider)].decline(op.bind(**fakes))


def _move_bias(convolution: fx.Node, norm: fx.Node) -> None:
    norm.kwargs = {**norm.kwargs, OFFSET: argument(convolution, 2, "bias")}
    if len(convolution.args) > 2:
        convolution.update_arg(2, None)
    else:
        convolution.kwargs = {name: value for name, value in convolution.kwargs.items() if name != "bias"}


PASS = Pass("convolution_bias", run)
