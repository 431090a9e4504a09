"""Format numbers with their units."""

from __future__ import annotations

from collections.abc import Callable


def optional(form: Callable[[float], str]) -> Callable[[float | None], str]:
    """Return a format that writes None as a dash."""
    return lambda value: "–" if value is None else form(value)


def number(value: float) -> str:
    """Return a number with three digits, without an exponent if that is short.

    >>> [number(value) for value in (0, 0.1234, 3.0, 12.34, 1234.5, 1234567)]
    ['0', '0.123', '3', '12.3', '1,234', '1,234,567']
    """
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def bytes_text(count: float) -> str:
    """Return a number of bytes with a fitting unit.

    >>> [bytes_text(count) for count in (12, 1536, 3 << 30)]
    ['12 B', '1.5 KiB', '3.0 GiB']
    """
    if count < 1024:
        return f"{count:.0f} B"
    for unit in ("KiB", "MiB"):
        count /= 1024
        if count < 1024:
            return f"{count:.1f} {unit}"
    return f"{count / 1024:.1f} GiB"


def rate(value: float, unit: str) -> str:
    """Return a rate with a decimal prefix.

    >>> rate(4.3e12, "B/s"), rate(98e9, "FLOP/s")
    ('4.3 TB/s', '98 GFLOP/s')
    """
    for factor, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= factor:
            return f"{value / factor:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}"


def percent(share: float) -> str:
    """Return a share as a percentage.

    >>> [percent(share) for share in (0.004, 0.056, 0.5)]
    ['0.4 %', '5.6 %', '50 %']
    """
    return f"{100 * share:.0f} %" if share >= 0.1 else f"{100 * share:.1f} %"


def count(value: int, one: str, many: str | None = None) -> str:
    """Return a number with its noun.

    >>> count(1, "graph"), count(2, "graph"), count(0, "match", "matches")
    ('1 graph', '2 graphs', 'no matches')
    """
    noun = one if value == 1 else many or f"{one}s"
    return f"{value or 'no'} {noun}"
