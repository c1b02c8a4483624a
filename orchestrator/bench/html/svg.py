"""Plots that are as wide as there is room for: places are percentages, so that text keeps its size.

A plot is one `<svg>` of fixed height and full width. Marks differ in shape as well as in colour.
"""

from __future__ import annotations

import itertools
import math
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from orchestrator.bench.html.markup import Child, Markup, shown, tag

LEFT, RIGHT = 2.0, 98.0  # percent between which data lie, so that marks at the ends are whole
SHAPES = (
    "",  # a circle
    "M-4.5,-4.5H4.5V4.5H-4.5Z",
    "M0,-5.5L5.5,4.5H-5.5Z",
    "M0,-6L6,0L0,6L-6,0Z",
    "M0,5.5L5.5,-4.5H-5.5Z",
    "M-2,-5.5H2V-2H5.5V2H2V5.5H-2V2H-5.5V-2H-2Z",
)
CROSS = "M-4,-4L4,4M-4,4L4,-4"


@dataclass(frozen=True, slots=True)
class Axis:
    """Values to percentages of the width (or to pixels, with `start` and `end`)."""

    low: float
    high: float
    log: bool = False
    start: float = LEFT
    end: float = RIGHT

    def share(self, value: float) -> float:
        """Return where a value lies, 0 to 1; what is outside lies at the end."""
        low, high, at = self.low, self.high, value
        if self.log:
            low, high, at = math.log(low), math.log(high), math.log(max(at, 1e-300))
        return min(1.0, max(0.0, (at - low) / (high - low))) if high > low else 0.5

    def at(self, value: float) -> float:
        """Return the place of a value."""
        return self.start + self.share(value) * (self.end - self.start)

    def x(self, value: float) -> str:
        """Return the place of a value as a percentage."""
        return f"{self.at(value):.2f}%"

    def ticks(self, about: int = 4) -> list[float]:
        """Return round values within the axis, few enough for a telephone's width."""
        if self.log and len(found := _log_ticks(self.low, self.high)) > 2:
            return found
        step = _step((self.high - self.low) / about)
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        return [count * step for count in range(first, last + 1)]


def _step(rough: float) -> float:
    magnitude = 10.0 ** math.floor(math.log10(rough))
    return float(next(m * magnitude for m in (1, 2, 2.5, 5, 10) if m * magnitude >= rough * 0.999))


def _log_ticks(low: float, high: float) -> list[float]:
    for steps in ((1, 1.5, 2, 3, 5, 7), (1, 2, 5), (1, 3), (1,)):
        exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        found = [m * 10.0**e for e in exponents for m in steps if low <= m * 10.0**e <= high]
        if len(found) <= 6:
            return found
    return found[:: math.ceil(len(found) / 6)]


def span(values: Iterable[float], least: float = 0.02, room: float = 0.06) -> tuple[float, float]:
    """Return the ends of an axis around values: with room, and not narrower than `least` of the middle."""
    found = sorted(values)
    low, high = found[0], found[-1]
    width = max(high - low, least * max(abs(low), abs(high)), 1e-9)
    middle = (low + high) / 2
    reach = width * (0.5 + room)
    bottom = middle - reach
    return (max(0.0, bottom) if low >= 0 else bottom), middle + reach


def plot(name: str, title: str, description: str, height: float, *parts: Child) -> Markup:
    """Return a plot with its title and its description for those who can't see it."""
    return tag(
        "svg",
        tag("title", title, id=f"{name}-title"),
        tag("desc", description, id=f"{name}-desc"),
        parts,
        id=name,
        class_="plot",
        role="img",
        width="100%",
        height=height,
        aria_labelledby=f"{name}-title",
        aria_describedby=f"{name}-desc",
    )


def text(x: str, y: float, words: str, class_: str = "", stands: str = "start") -> Markup:
    """Return a text; `y` is its baseline."""
    return tag("text", words, x=x, y=y, class_=class_ or None, text_anchor=stands)


def line(x1: str, y1: float, x2: str, y2: float, class_: str) -> Markup:
    """Return a line."""
    return tag("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=class_)


def bar(axis: Axis, low: float, high: float, y: float, height: float, class_: str) -> Markup:
    """Return a rectangle from one value to another."""
    at = axis.at(low)
    width = max(0.15, axis.at(high) - at)
    return tag("rect", x=f"{at:.2f}%", y=y, width=f"{width:.2f}%", height=height, class_=class_)


def mark(x: str, y: float, arm: int, class_: str, hint: str, size: float = 1.0) -> Markup:
    """Return an arm's mark at a place, with a hint for the mouse."""
    style = f"{class_} arm{arm % len(SHAPES)}"
    if not (shape := SHAPES[arm % len(SHAPES)]):
        return tag("circle", tag("title", hint), cx=x, cy=y, r=4.8 * size, class_=style)
    return _path(x, y, shape, style, hint, size)


def cross(x: str, y: float, hint: str) -> Markup:
    """Return the mark of what does not count."""
    return _path(x, y, CROSS, "void", hint, 1.0)


def _path(x: str, y: float, shape: str, class_: str, hint: str, size: float) -> Markup:
    scaled = f"scale({size:g})" if size != 1 else None
    drawn = tag("path", tag("title", hint), d=shape, class_=class_, transform=scaled)
    return tag("svg", drawn, x=x, y=y, width="1", height="1")


def scale(axis: Axis, y: float, top: float, label: Callable[[float], str], about: int = 4) -> list[Markup]:
    """Return an axis below a plot: lines up to `top`, and labels where there is room for them."""
    found, taken = [], -1.0
    for tick in axis.ticks(about):
        place, words = axis.at(tick), label(tick)
        stands, wide = anchor(place, words), 2 * _half(words)
        left = place - {"start": 0.0, "middle": wide / 2, "end": wide}[stands]
        found.append(line(f"{place:.2f}%", top, f"{place:.2f}%", y, "grid"))
        if left > taken:
            found.append(text(f"{place:.2f}%", y + 15, words, "tick", stands))
            taken = left + wide + 1
    return found


def track(points: Sequence[tuple[str, float]], class_: str) -> list[Markup]:
    """Return the lines from point to point."""
    return [line(*a, *b, class_) for a, b in itertools.pairwise(points)]


def anchor(place: float, words: str) -> str:
    """Return how a text stands to its place (percent), so that it leaves no plot of 300 pixels or more."""
    half = _half(words)
    return "start" if place < half else "end" if place > 100 - half else "middle"


def _half(words: str) -> float:
    return 1.3 * sum(map(_breadth, words))  # half the width, in percent of 300 pixels


def short(words: str, most: float = 24.0) -> str:
    """Return a name that fits into a plot: its beginning and its end; `most` counts ordinary letters."""
    words = " ".join(shown(words).split())
    if sum(map(_breadth, words)) <= most:
        return words
    return f"{_fitting(words, most / 2)}…{_fitting(words[::-1], most / 2)[::-1]}"


def _fitting(words: str, most: float) -> str:
    """Return the beginning that is no broader."""
    breadths = itertools.accumulate(map(_breadth, words))
    return words[: sum(1 for _ in itertools.takewhile(lambda breadth: breadth <= most, breadths))]


def _breadth(character: str) -> float:
    if unicodedata.east_asian_width(character) in "WF":
        return 2.0
    return 1.4 if character.isupper() or character in "mw@%" else 1.0
