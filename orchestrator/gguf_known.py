"""Remembers the vocabularies of files read before, so that the next file with the same one is read faster.

A folder of models holds few tokenizers. Walking one costs tens of milliseconds, comparing it with the bytes
of one that was walked before about one; nothing is guessed, every byte is compared.
"""

from __future__ import annotations

import os

_MOST = 64 << 20  # bytes kept: some ten vocabularies with their merges
_LEAST = 1024  # strings; shorter arrays are walked as fast


class Known:
    """Arrays of strings met in earlier files; pass one to `gguf_header.read` for a whole folder."""

    def __init__(self) -> None:
        self._bodies: dict[int, list[bytes]] = {}  # number of strings -> the arrays of that length
        self._order: list[tuple[int, bytes]] = []
        self._bytes = 0

    def length(self, descriptor: int, at: int, count: int) -> int | None:
        """Return how many bytes the array of `count` strings at `at` has, None when it is a new one."""
        for body in self._bodies.get(count, ()):
            if os.pread(descriptor, 64, at) == body[:64] and os.pread(descriptor, len(body), at) == body:
                return len(body)
        return None

    def keep(self, descriptor: int, at: int, count: int, length: int) -> None:
        """Remember an array that was walked; the oldest are forgotten when they become too many."""
        if count < _LEAST or length > _MOST // 2:
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
