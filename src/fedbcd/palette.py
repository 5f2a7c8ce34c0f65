"""The colours of methods and of what servers do: one table, for pages and for figures.

Neighbours in the table differ by a contrast of 3:1 or more, in light and in dark, so that they can
be told apart in grey; so do all of them and the paper they stand on. Methods without an entry, and
several runs of one method, are told apart by dashes and marks besides.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Look:
    """How a line is drawn, on light and on dark paper."""

    light: str
    dark: str
    mark: str  # at the end of the line, and in legends
    dash: tuple[int, ...] = ()


METHODS = {
    "fedbcd-i": Look("#0a3e80", "#b2d1f9", "circle"),
    "fedbcd": Look("#1795d0", "#1378a8", "square"),
    "fedavg-ft": Look("#6b2c03", "#fcc29c", "diamond"),
    "fedavg": Look("#d27409", "#aa5e07", "triangle"),
    "local": Look("#3c4046", "#cccfd4", "cross", (2, 3)),
    "fedprox": Look("#229e71", "#1b815b", "down"),
}
OTHERS = (
    Look("#77154a", "#f4bfdb", "circle", (7, 3)),
    Look("#a377dd", "#8b54d4", "square", (8, 2, 2, 2)),
    Look("#044832", "#0ceaa0", "diamond", (4, 2)),
    Look("#e16561", "#d62f2a", "triangle", (12, 3)),
)
# what a server's time goes into: in the timeline, and in the bars below it
TIMES = {
    "update": ("#6fb98a", "#2f6b47"),
    "visit": ("#1d6b3c", "#8fe3b3"),
    "straggler": ("#b3261e", "#ff8a80"),
    "waiting": ("#c9ced5", "#434a52"),
    "mix": ("#a24c00", "#ffb26b"),
    "arrival": ("#9cc7e8", "#2d5f86"),
    "work": ("#2f7fbd", "#6db3ea"),
    "aggregation": ("#a24c00", "#ffb26b"),
}
DASHES = ((), (8, 4), (2, 3), (10, 3, 2, 3))
PAPER, INK = ("#ffffff", "#1c2024"), ("#000000", "#ffffff")  # of cards, light and dark
SHADE = 0.44  # the last of several runs of one method, towards whichever of the two is far


def looks_of(methods: Sequence[str]) -> list[Look]:
    """One for each run (or group of seeds), by its method; several of one method are a ramp of one
    hue, in order.
    """
    others = iter(range(len(methods)))
    strange: dict[str, Look] = {}
    for name in methods:
        if name not in METHODS and name not in strange:
            strange[name] = OTHERS[next(others) % len(OTHERS)]
    known = METHODS | strange
    all_, seen, found = Counter(methods), Counter[str](), []
    for name in methods:
        found.append(_again(known[name], seen[name], all_[name]))
        seen[name] += 1
    return found


def _again(look: Look, place: int, of: int) -> Look:
    """The run at this place among several of one method."""
    if of == 1:
        return look
    share = SHADE * place / (of - 1)
    light, dark = (
        _mixed(colour, paper if contrast(colour, paper) > 6 else ink, share)
        for colour, paper, ink in zip((look.light, look.dark), PAPER, INK, strict=True)
    )
    return Look(light, dark, look.mark, DASHES[place % len(DASHES)])


def _mixed(colour: str, other: str, share: float) -> str:
    """`colour` with a share of another."""
    parts = zip(_parts(colour), _parts(other), strict=True)
    return "#" + "".join(f"{round(a + share * (b - a)):02x}" for a, b in parts)


def _parts(colour: str) -> list[int]:
    """Red, green, blue: 0 to 255."""
    return [int(colour[k : k + 2], 16) for k in (1, 3, 5)]


def contrast(one: str, other: str) -> float:
    """Of two colours, by WCAG: 1 to 21."""
    low, high = sorted((_luminance(one), _luminance(other)))
    return (high + 0.05) / (low + 0.05)


def _luminance(colour: str) -> float:
    linear = (
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4
        for part in (value / 255 for value in _parts(colour))
    )
    return sum(w * part for w, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def as_plain(look: Look) -> dict[str, Any]:
    return asdict(look)


def style_sheet() -> str:
    """The table as variables of CSS."""
    light, dark = (
        "".join(f"--{name}: {both[place]}; " for name, both in TIMES.items()) for place in (0, 1)
    )
    return (
        f":root {{ {light}}}\n"
        f'@media (prefers-color-scheme: dark) {{ :root:not([data-theme="light"]) {{ {dark}}} }}\n'
        f':root[data-theme="dark"] {{ {dark}}}\n'
    )
