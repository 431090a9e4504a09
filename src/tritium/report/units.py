"""Format numbers with their units."""

from __future__ import annotations

_NONE = "–"


def number(value: float | None) -> str:
    """Return a number with three digits, without an exponent if that is short.

    >>> [number(value) for value in (None, 0, 0.1234, 3.0, 12.34, 1234.5, 1234567)]
    ['–', '0', '0.123', '3', '12.3', '1,234', '1,234,567']
    """
    if value is None:
        return _NONE
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def bytes_text(count: float | None) -> str:
    """Return a number of bytes with a fitting unit.

    >>> [bytes_text(count) for count in (None, 12, 1536, 3 << 30)]
    ['–', '12 B', '1.5 KiB', '3.0 GiB']
    """
    if count is None:
        return _NONE
    size = float(count)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def rate(value: float, unit: str) -> str:
    """Return a rate with a decimal prefix.

    >>> rate(4.3e12, "B/s"), rate(98e9, "FLOP/s")
    ('4.3 TB/s', '98 GFLOP/s')
    """
    for factor, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= factor:
            return f"{value / factor:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}"


def percent(share: float | None) -> str:
    """Return a share as a percentage.

    >>> [percent(share) for share in (None, 0.004, 0.056, 0.5)]
    ['–', '0.4 %', '5.6 %', '50 %']
    """
    if share is None:
        return _NONE
    return f"{share:.0%}".replace("%", " %") if share >= 0.1 else f"{share:.1%}".replace("%", " %")


def microseconds(value: float | None) -> str:
    return _NONE if value is None else f"{value:,.1f}"


def times(ratio: float | None) -> str:
    return _NONE if ratio is None else f"{ratio:.2f}×"


def operations(value: float | None) -> str:
    return _NONE if value is None else rate(value, "FLOP")


def count(value: int, one: str, many: str | None = None) -> str:
    """Return a number with its noun.

    >>> count(1, "graph"), count(2, "graph"), count(0, "match", "matches")
    ('1 graph', '2 graphs', 'no matches')
    """
    noun = one if value == 1 else many or f"{one}s"
    return f"{value or 'no'} {noun}"
