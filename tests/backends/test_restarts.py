"""The restart budget, on a clock of its own."""

from __future__ import annotations

import pytest

from backends.restarts import Budget
from orchestrator.profile import Restart


class Clock:
    """A clock that goes when it is told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def budget(clock: Clock, **rules: object) -> Budget:
    return Budget(Restart(**{"attempts": 3, "window": 300, "backoff": (0.5, 30), **rules}), clock)


def crash(tried: Budget, uptime: float = 0.0) -> bool:
    """Let an engine end; returns whether it is started again."""
    if tried.is_empty(uptime):
        return False
    tried.spend()
    return True


def test_so_many_restarts_and_no_more_bad(clock: Clock) -> None:
    tried = budget(clock)
    assert [crash(tried) for _ in range(5)] == [True, True, True, False, False]
    assert tried.spent == 3
    tried.reset()
    assert crash(tried)


def test_none_is_none_bad(clock: Clock) -> None:
    tried = budget(clock, attempts=0)
    assert not crash(tried)
    assert not crash(tried, uptime=1e6)


def test_what_is_older_than_the_window_counts_no_more_good(clock: Clock) -> None:
    tried = budget(clock)
    for _ in range(3):
        assert crash(tried)
        clock.now += 100
    assert not crash(tried)  # the first is exactly as old as the window
    clock.now += 1
    assert crash(tried)
    assert tried.spent == 3
    assert not crash(tried)


def test_a_run_that_could_never_spend_the_budget_resets_it_good(clock: Clock) -> None:
    tried = budget(clock)
    for _ in range(3):
        assert crash(tried)
    assert not crash(tried, uptime=99.9)
    assert crash(tried, uptime=100.0)  # one in 100 s makes three in 300 s
    assert tried.spent == 1


def test_pauses_double_up_to_the_longest_and_differ_good(clock: Clock) -> None:
    tried = budget(clock, attempts=1000)  # the most that a profile may allow
    for expected in (0.5, 1, 2, 4, 8, 16, 30, 30, 30):
        pauses = [tried.pause() for _ in range(200)]
        assert 0.8 * expected <= min(pauses) <= max(pauses) <= expected
        assert len(set(pauses)) > 100, "engines that died together do not come back in step"
        tried.spend()
    for _ in range(1000):  # neither does a number grow too large
        tried.spend()
    assert tried.pause() <= 30


def test_a_clock_that_is_set_back_or_forward_is_not_ours_good() -> None:
    import time

    assert Budget(Restart())._clock is time.monotonic
