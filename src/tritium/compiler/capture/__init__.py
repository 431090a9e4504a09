"""CAPTURE: record a compiled graph as a static device graph, and replay it.

1. `split`    cut the graph at boundary ops; each piece is a region of its own, and its `spec` what is known of it
2. `key`      what must be equal for two calls to share a recording
3. `inputs`   owned buffers that the caller's tensors are copied into
4. `graph`    the device's graph: CUDA's own, or an emulation on a CPU that is as strict
5. `outputs`  how long a result stays valid, and what that costs
6. `weights`  which weights a recording reads, and where they lay
7. `region`   puts them together: one piece with its recordings, the least recently used of which make room
8. `idle`     whether a capture pays, from events around ordinary calls
"""

from tritium.compiler.capture.region import Region
from tritium.compiler.capture.spec import Spec

__all__ = ["Region", "Spec"]
