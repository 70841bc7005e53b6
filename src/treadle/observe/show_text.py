"""Format numbers, times and long texts for a terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence

_SPARKS = "▁▂▃▄▅▆▇█"


def shorten_middle(text: str, max_length: int) -> str:
    """Cut the middle out of a long text; the end, where the answer is, keeps a little more than the start.

    >>> shorten_middle("abcdefghijklmnop", 10)
    'abc … mnop'
    """
    if len(text) <= max_length:
        return text
    kept = max(2, max_length - 3)
    start = kept // 2
    return f"{text[:start]} … {text[len(text) - (kept - start) :]}"


def sparkline(values: Sequence[float], width: int) -> str:
    """Return a row of bars of at most `width` characters; longer histories are averaged into that many bars.

    The scale runs from the smallest to the largest bar. Values that are not finite are left out.

    >>> sparkline([0.0, 0.5, 1.0], 10)
    '▁▅█'
    """
    finite = [v for v in values if math.isfinite(v)]
    count = min(width, len(finite))
    bars = []
    for bar in range(count):
        part = finite[bar * len(finite) // count : (bar + 1) * len(finite) // count]
        bars.append(sum(part) / len(part))
    if not bars:
        return ""
    bottom, height = min(bars), max(bars) - min(bars)
    if height == 0:
        return _SPARKS[0] * count
    return "".join(_SPARKS[round((v - bottom) / height * (len(_SPARKS) - 1))] for v in bars)


def number(value: float | None) -> str:
    """Return a number in two to four digits; `-` if there is none.

    >>> [number(v) for v in (None, 0, 0.01234, 1.5, 123.4, 45678, 2.5e6, 0.00001)]
    ['-', '0', '0.0123', '1.50', '123', '45.7k', '2.50M', '1.0e-05']
    """
    if value is None:
        return "-"
    if not math.isfinite(value):
        return str(float(value))
    size = abs(value)
    if size == 0:
        return "0"
    if size < 0.001:
        return f"{value:.1e}"
    for limit, digits in ((0.1, 4), (1, 3), (10, 2), (100, 1), (10_000, 0)):
        if size < limit:
            return f"{value:.{digits}f}"
    if size < 1e6:
        return f"{value / 1e3:.1f}k" if size < 1e5 else f"{value / 1e3:.0f}k"
    return f"{value / 1e6:.2f}M" if size < 1e9 else f"{value / 1e9:.2f}G"


def clock(seconds: float | None) -> str:
    """Return a duration as text: seconds below a minute, then m:ss or h:mm:ss.

    >>> [clock(s) for s in (None, 4.25, 41, 161, 3725)]
    ['-', '4.2 s', '41 s', '2:41', '1:02:05']
    """
    if seconds is None or not math.isfinite(seconds):
        return "-"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    hours, minutes = whole // 3600, whole // 60 % 60
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"


def percent(fraction: float) -> str:
    """Return a share in per cent; a small share is never shown as 0.

    >>> percent(0.254), percent(0.001), percent(0)
    ('25%', '<1%', '0%')
    """
    return "<1%" if 0 < fraction < 0.005 else f"{100 * fraction:.0f}%"
