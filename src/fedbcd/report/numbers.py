"""Numbers as people read them, in sentences; the pages' script has the same for tables."""

import math


def in_score(value: float | None, unit: str) -> str:
    """97.3 %, or 0.0312."""
    if value is None or not math.isfinite(value):
        return "–"
    return f"{100 * value:.1f} %" if unit == "share" else in_short(value)


def in_change(value: float, unit: str) -> str:
    """+9.2 points, or −0.21."""
    text = f"{100 * abs(value):.1f}" if unit == "share" else in_short(abs(value))
    if float(text.replace(",", "")) == 0:
        return "±0"
    return f"{'−' if value < 0 else '+'}{text}{' points' if unit == 'share' else ''}"


def in_short(value: float) -> str:
    """Three digits, with separators of thousands and without exponents."""
    size = abs(value)
    if size >= 1000:
        return f"{value:,.0f}"
    if size < 1e-6:
        return "0"
    digits = max(0, 2 - math.floor(math.log10(size)))
    return f"{value:.{min(digits, 8)}f}".rstrip("0").rstrip(".") if digits else f"{value:.0f}"


def in_bytes(value: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if abs(value) < 1000:
            return f"{in_short(value)} {unit}"
        value /= 1000
    return f"{in_short(value)} TB"


def in_seconds(value: float) -> str:
    if value < 1:
        return f"{in_short(1000 * value)} ms"
    if value < 100:
        return f"{in_short(value)} s"
    if value < 5400:
        return f"{value // 60:.0f} min {value % 60:.0f} s"
    return f"{value // 3600:.0f} h {value % 3600 // 60:.0f} min"


def in_time(value: float, kind: str) -> str:
    """Of a clock that counts seconds, or virtual time."""
    return in_seconds(value) if kind == "seconds" else in_short(value)


def listed(texts: list[str]) -> str:
    *before, last = texts or [""]
    return f"{', '.join(before)} and {last}" if before else last
