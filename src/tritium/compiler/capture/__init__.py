"""CAPTURE: capture a compiled graph as a static device graph, and replay it.

1. `stage`    cut the graph at boundary ops; each piece between them is a separate region
2. `bucket`   facts about a piece, and the key that two calls must share to replay the same capture
3. `inputs`   owned buffers that the caller's tensors are copied into
4. `graph`    the device graph: CUDA's, or an equally strict emulation on a CPU
5. `outputs`  the lifetime of results, and its cost
6. `weights`  the weights that a capture reads, and their addresses
7. `region`   one piece with its captures, least recently used ones evicted
8. `auto`     decides from events around ordinary calls whether a capture pays
"""

from tritium.compiler.capture.bucket import Spec
from tritium.compiler.capture.outputs import copied_results
from tritium.compiler.capture.region import Region

__all__ = ["Region", "Spec", "copied_results"]
