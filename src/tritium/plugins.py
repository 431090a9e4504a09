"""What plug-ins declare: ops, providers, fusions and their patterns, passes and techniques outside of this package.

Entry point groups: `tritium.providers`, `tritium.fusions`, `tritium.passes`, `tritium.techniques`.
"""

from tritium.fusions import patterns
from tritium.fusions.fusion import Fusion, Match
from tritium.ops.bridge import custom_op
from tritium.ops.op import Arguments, Op, Provider, Trial
from tritium.passes import Applied, ConfigRequest, Decline, Pass, PassContext
from tritium.techniques.technique import Note, Part, Technique

__all__ = [
    "Applied",
    "Arguments",
    "ConfigRequest",
    "Decline",
    "Fusion",
    "Match",
    "Note",
    "Op",
    "Part",
    "Pass",
    "PassContext",
    "Provider",
    "Technique",
    "Trial",
    "custom_op",
    "patterns",
]
