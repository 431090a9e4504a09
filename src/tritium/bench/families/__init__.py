"""Stock diffusers denoisers of many families, one value each: full width, few blocks, random weights.

On a CPU the same classes run with tiny widths.
"""

from __future__ import annotations

from collections.abc import Sequence

from tritium.bench.families import images, unets, videos
from tritium.bench.families.family import Family
from tritium.errors import ConfigError, nearest

# The whole U-Net comes last: it compiles for minutes.
FAMILIES: tuple[Family, ...] = (*images.FAMILIES, *videos.FAMILIES, *unets.FAMILIES)

# A call without names measures these on a CPU: two kinds of blocks, a U-Net, and a call with a timestep per token.
FEW = ("flux-512", "pixart-512", "wan-per-token", "sd15-512")


def find(names: Sequence[str]) -> list[Family]:
    """Return the families of these names in the order of the catalogue; raise for an unknown name."""
    known = {family.name: family for family in FAMILIES}
    for name in names:
        if name not in known:
            raise ConfigError(f"there is no family {name!r} in `tritium bench families`; {nearest(name, known)}")
    return [family for family in FAMILIES if family.name in names]
