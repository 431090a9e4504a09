"""All differences between torch versions, and all private torch APIs that Tritium uses.

Supported: 2.11 to 2.15. On a newer version a missing hook returns None or an empty value here, the part of Tritium that
needs it declines with a reason, and `declined` lists these parts for `tritium doctor`.
"""

from tritium.compat import (  # noqa: F401 - read as `compat.NAME`
    artifacts,
    attention,
    cached_code,
    capture,
    collectives,
    declined,
    diffusers,
    dynamo,
    generated,
    inductor,
    late_kernels,
    lowerings,
    modules,
    observation,
    operators,
    peft,
    pending,
    profiler,
    shapes,
    sharing,
    tensors,
    tiling,
    traced,
    triton_cache,
    versions,
)
