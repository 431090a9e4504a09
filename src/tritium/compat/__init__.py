"""All differences between torch versions, and all private torch APIs that Tritium uses.

Supported: 2.11 to 2.15. On a newer version a missing hook returns None or an empty value here, the part of Tritium that
needs it declines with a reason, and `obstacles` lists these parts for `tritium doctor`.
"""

from tritium.compat import (
    artifacts as artifacts,
)
from tritium.compat import (
    attention as attention,
)
from tritium.compat import (
    cached_code as cached_code,
)
from tritium.compat import (
    capture as capture,
)
from tritium.compat import (
    diffusers as diffusers,
)
from tritium.compat import (
    dynamo as dynamo,
)
from tritium.compat import (
    generated as generated,
)
from tritium.compat import (
    inductor as inductor,
)
from tritium.compat import (
    lowerings as lowerings,
)
from tritium.compat import (
    modules as modules,
)
from tritium.compat import (
    observation as observation,
)
from tritium.compat import (
    obstacles as obstacles,
)
from tritium.compat import (
    operators as operators,
)
from tritium.compat import (
    peft as peft,
)
from tritium.compat import (
    products as products,
)
from tritium.compat import (
    profiler as profiler,
)
from tritium.compat import (
    shapes as shapes,
)
from tritium.compat import (
    tensors as tensors,
)
from tritium.compat import (
    tiling as tiling,
)
from tritium.compat import (
    traced as traced,
)
from tritium.compat import (
    triton_cache as triton_cache,
)
from tritium.compat import (
    versions as versions,
)
