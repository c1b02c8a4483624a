"""Gets what a plan lacks before its engine is launched, on a thread that whoever stops need not wait for."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Sequence

from orchestrator.backend import Lacking


class _CalledOff(Exception):
    """Nobody waits any longer."""


async def fetch(wanted: Sequence[Lacking], progress: Callable[[int, int], None]) -> None:
    """Get everything, one after the other; cancelling this leaves what has arrived for the next time.

    Args:
        wanted: what a plan lacks.
        progress: called on another thread, with bytes done and in total.

    Raises:
        OrchestratorError: it can't be had, or made.

    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()
    unwanted = threading.Event()

    def hear(arrived: int, total: int) -> None:
        if unwanted.is_set():
            raise _CalledOff
        progress(arrived, total)

    def settle(error: Exception | None) -> None:
        if done.cancelled():
            return
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)

    def work() -> None:
        error: Exception | None = None
        try:
            for each in wanted:
                each.fetch(hear)
        except Exception as fault:  # whatever it is, who waits is told
            error = fault
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(settle, error)

    # not the loop's own threads: their end is waited for, and a stalled network takes seconds to notice
    threading.Thread(target=work, name="fetch-model", daemon=True).start()
    try:
        await done
    finally:
        unwanted.set()
