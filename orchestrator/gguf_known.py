"""Steps over arrays of strings in bulk, for who reads a whole folder of models.

A vocabulary has hundreds of thousands of strings, each behind its length, so that only the one before tells
where the next begins. Two ways are quicker than walking, and both are exact: an array met before is compared
byte for byte; of a new one the places that look like a length are found with numpy, all at once, and then
each has to end where the next begins. What does not is walked.
"""

from __future__ import annotations

import os
from typing import Any

_MOST = 64 << 20  # bytes kept: some ten vocabularies with their merges
_LEAST = 1024  # strings; shorter arrays are walked as fast
_WINDOW = 1 << 18  # bytes looked at at once: what is made of them stays in a processor's cache
_HEAD = 64  # bytes that tell most arrays apart
_ALONE = 16  # strings in _LEAST that may be walked alone; with more the array is not worth the effort


class Known:
    """Arrays of strings met in earlier files; pass one to `gguf_header.read` for a whole folder."""

    def __init__(self) -> None:
        self._bodies: dict[int, list[bytes]] = {}  # number of strings -> the arrays of that length
        self._order: list[tuple[int, bytes]] = []
        self._bytes = 0

    def length(self, descriptor: int, at: int, count: int) -> int | None:
        """Return how many bytes the `count` strings at `at` have, little-endian; None: walk them."""
        if count < _LEAST:
            return None
        start = os.pread(descriptor, _HEAD, at)
        for body in self._bodies.get(count, ()):
            if body.startswith(start) and os.pread(descriptor, len(body), at) == body:
                return len(body)
        length = measured(descriptor, at, count)
        if length is not None:
            self._keep(descriptor, at, count, length)
        return length

    def _keep(self, descriptor: int, at: int, count: int, length: int) -> None:
        """Remember an array; the oldest are forgotten when they become too many."""
        if length > _MOST // 2:
            return
        body = os.pread(descriptor, length, at)
        if len(body) != length:
            return
        self._bodies.setdefault(count, []).append(body)
        self._order.append((count, body))
        self._bytes += length
        while self._bytes > _MOST:
            oldest_count, oldest = self._order.pop(0)
            self._bodies[oldest_count].remove(oldest)
            self._bytes -= len(oldest)


def measured(descriptor: int, at: int, count: int, window: int = _WINDOW) -> int | None:
    """Return how many bytes the `count` strings at `at` have.

    None where that can't be told quickly: the file ends before they do, or many of them are long or hold
    zeros. Nothing is guessed: every length that is added up was read where a string before it ends.
    """
    start, alone, size = at, _ALONE * count // _LEAST, os.fstat(descriptor).st_size
    while count and at <= size:
        seen = os.pread(descriptor, window, at)
        if len(seen) < 8:
            return None
        links = _Links(seen)
        place = 0
        while count and place + 8 <= len(seen):
            steps, place = links.follow(place, count)
            count -= steps
            alone -= steps == 1
            if alone < 0:
                return None
        at += place
    return at - start if at <= size else None


class _Links:
    """The places in a window where a length may be, and which of them lead to the next one."""

    def __init__(self, window: bytes) -> None:
        import numpy as np

        self._window = window
        self._find: Any = np.searchsorted
        size = len(window)
        single: Any = np.frombuffer(window, np.uint8)
        # below 256 a length is a byte and seven zeros, among them four that are a word of their own
        words: Any = np.flatnonzero(np.frombuffer(window, "<u4", size // 4) == 0) * 4
        place = words[(words >= 4) & (words <= size - 8)] - 1
        zeros = single[place] == 0
        for _ in range(3):  # back to the byte before the zeros
            place -= zeros
            zeros &= single[place] == 0
        self.starts: Any = place
        # of the seven, four at least follow the byte at once: that leaves three to be looked at
        above = single[place + 5] | single[place + 6] | single[place + 7]
        ends = place + 8 + single[place]
        # the last of each chain: it does not end where the next may begin
        last = np.ones(len(place), bool)
        last[:-1] = (ends[:-1] != place[1:]) | (above[:-1] != 0)
        self.lasts: Any = np.flatnonzero(last)

    def follow(self, place: int, most: int) -> tuple[int, int]:
        """Return how many strings from `place` on, at least one, and the place behind them."""
        index = int(self._find(self.starts, place))
        steps = 1
        if index < len(self.starts) and self.starts[index] == place:
            last = int(self.lasts[self._find(self.lasts, index)])
            steps = min(last - index + 1, most)
            place = int(self.starts[index + steps - 1])
        return steps, place + 8 + int.from_bytes(self._window[place : place + 8], "little")
