"""The restart budget: how many restarts within how long, and how long to wait before each."""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from orchestrator.profile import Restart


class Budget:
    """At most `attempts` restarts within `window` seconds; a stable run resets the count."""

    def __init__(self, rules: Restart, clock: Callable[[], float] = time.monotonic) -> None:
        self.rules = rules
        self._clock = clock
        self._restarts: deque[float] = deque()

    @property
    def spent(self) -> int:
        """How many restarts count now."""
        return len(self._restarts)

    def is_empty(self, uptime: float) -> bool:
        """Say whether an engine that was ready for `uptime` seconds may not be restarted again."""
        now, rules = self._clock(), self.rules
        if rules.attempts and uptime >= rules.window / rules.attempts:
            self._restarts.clear()  # runs this long could never spend the budget
        while self._restarts and now - self._restarts[0] > rules.window:
            self._restarts.popleft()
        return len(self._restarts) >= rules.attempts

    def pause(self) -> float:
        """Return the seconds to wait: exponential, up to a fifth less so that engines don't come in step."""
        shortest, longest = self.rules.backoff
        pause = min(longest, shortest * 2.0 ** min(self.spent, 32))
        return pause * random.uniform(0.8, 1.0)  # noqa: S311 - not a secret

    def spend(self) -> None:
        """Count a restart that begins now."""
        self._restarts.append(self._clock())

    def reset(self) -> None:
        """Forget every restart."""
        self._restarts.clear()
