"""Who hears the events of a backend."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from orchestrator.log import get_logger

if TYPE_CHECKING:
    from orchestrator.backend import Event

log = get_logger("orchestrator.backend")


class Subscribers:
    """Callbacks that hear every event from when they came; safe to use from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # a leaf: no callback is called while it is held
        self._callbacks: list[Callable[[Event], None]] = []

    def add(self, callback: Callable[[Event], None]) -> Callable[[], None]:
        """Call `callback` with every event from now on; returns the unsubscriber."""
        with self._lock:
            self._callbacks.append(callback)

        def unsubscribe() -> None:
            with self._lock, contextlib.suppress(ValueError):
                self._callbacks.remove(callback)

        return unsubscribe

    def tell(self, event: Event) -> None:
        """Tell all; the fault of one is logged and keeps it from nobody else."""
        with self._lock:
            callbacks = tuple(self._callbacks)
        for callback in callbacks:
            try:
                callback(event)
            except Exception:  # a subscriber's fault is not the engine's
                log.exception("subscriber_failed", profile=event.profile)
