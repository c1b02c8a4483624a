"""What an engine holds of its cards while it runs, for those who look often and must never wait or fail."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from orchestrator.hardware.gpu import Gpu

EVERY = 1.0  # seconds between two looks
PATIENCE = 0.5  # seconds that one who asks waits; a hung driver never answers
STALE = 15.0  # seconds after which a look that does not end means that nothing is known


class Reader(Protocol):
    """Who knows what is in use; `GpuMemory` is one. May raise anything."""

    def used(self, gpu: Gpu) -> int | None:
        """Return the bytes in use by anyone."""

    def processes(self, gpu: Gpu, among: Collection[int]) -> dict[int, int]:
        """Return which process ids, among these, hold how many bytes."""


@dataclass(frozen=True, slots=True)
class CardUse:
    """One card of an engine at one moment. Sizes are bytes, None where nobody says.

    Attributes:
        id: the card's, as `Gpu.id`.
        name: the card's.
        memory_total: what an engine can use at most.
        memory_used: in use by anyone.
        memory_engine: of that by the engine's process tree.

    """

    id: str
    name: str
    memory_total: int | None
    memory_used: int | None
    memory_engine: int | None


class Live:
    """Looks at some cards at most once a second, in a thread of its own, and keeps what it saw."""

    def __init__(
        self, reader: Reader, gpus: Sequence[Gpu], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Prepare; nothing is read yet."""
        self._reader = reader
        self._gpus = tuple(gpus)
        self._clock = clock
        self._changed = threading.Condition()
        self._unknown = tuple(CardUse(gpu.id, gpu.name, gpu.total or None, None, None) for gpu in self._gpus)
        self._seen = self._unknown
        self._at: float | None = None  # when the last look began
        self._looking = False

    def of(self, pids: Collection[int], patience: float = PATIENCE) -> tuple[CardUse, ...]:
        """Return what the cards hold, of which so much for these processes; what can't be read is None.

        Never raises. What was seen within the last second is given again; who asks while a look is on its
        way waits until it is `patience` seconds old, and gets what was seen before.
        """
        if not self._gpus:
            return ()
        with self._changed:
            now = self._clock()
            if not self._looking and (self._at is None or now - self._at >= EVERY):
                self._looking, self._at = True, now
                look = threading.Thread(target=self._look, args=(frozenset(pids),), daemon=True)
                look.start()
            age = now - self._at if self._at is not None else 0.0
            self._changed.wait_for(lambda: not self._looking, max(0.0, patience - age))
            return self._unknown if self._looking and age > STALE else self._seen

    def _look(self, pids: frozenset[int]) -> None:
        seen = [self._card(card, gpu, pids) for card, gpu in zip(self._unknown, self._gpus, strict=True)]
        with self._changed:
            self._seen = tuple(seen)
            self._looking = False
            self._changed.notify_all()

    def _card(self, found: CardUse, gpu: Gpu, pids: frozenset[int]) -> CardUse:
        # each by itself: the driver may tell the one and not the other. Whatever goes wrong with a library, a
        # program or a file of the kernel, a look at what runs must not fail for it
        with contextlib.suppress(Exception):
            found = replace(found, memory_used=self._reader.used(gpu) if gpu.total else None)
        with contextlib.suppress(Exception):
            # in another pid namespace, and on WSL2, the driver lists nobody or no size: that is not zero
            found = replace(found, memory_engine=sum(self._reader.processes(gpu, pids).values()) or None)
        return found
