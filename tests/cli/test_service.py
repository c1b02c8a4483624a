"""What an `orchestrator up` process is made of, below the command."""

from __future__ import annotations

import asyncio
import ctypes
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from backends import lifecycle
from orchestrator.cli import up
from orchestrator.cli.service import Service
from orchestrator.home import RunFolder


@pytest.mark.parametrize("fault", [None, OSError("no"), asyncio.CancelledError()], ids=repr)
def test_work_called_off_in_the_background_is_not_reported_as_a_fault_good(
    tmp_path: Path, fault: BaseException | None
) -> None:
    """A second Ctrl-C hastens the stops; the end of the loop calls off what is left of that."""
    nothing: Any = SimpleNamespace()
    service = Service([], nothing, RunFolder(tmp_path), nothing)
    reported: list[dict[str, Any]] = []

    async def work() -> None:
        if fault is not None:
            raise fault
        await asyncio.Event().wait()

    async def run() -> None:
        service._loop = asyncio.get_running_loop()
        service._loop.set_exception_handler(lambda _, context: reported.append(context))
        service._in_background(work())
        await asyncio.sleep(0)  # it has begun, and goes on when this ends

    asyncio.run(run())
    assert reported == []


def test_a_supervisor_has_a_bounded_pool_of_threads_good() -> None:
    """However much would block at once, there are as many threads as are declared."""
    most = 3 * lifecycle.THREADS
    busy = threading.Semaphore(0)
    over = threading.Event()
    seen: list[int] = []

    def block() -> None:
        busy.release()
        over.wait(30)

    async def task() -> None:
        before = threading.active_count()
        waits = [asyncio.create_task(asyncio.to_thread(block)) for _ in range(most)]
        await asyncio.sleep(0)
        for _ in range(lifecycle.THREADS):
            assert busy.acquire(timeout=30)
        seen.append(threading.active_count() - before)
        over.set()
        await asyncio.gather(*waits)

    lifecycle.run(task())
    assert seen == [lifecycle.THREADS]


def test_large_blocks_are_given_back_at_once_good(monkeypatch: pytest.MonkeyPatch) -> None:
    set_to: list[tuple[int, int]] = []
    libc = SimpleNamespace(mallopt=lambda what, value: set_to.append((what, value)))
    monkeypatch.setattr(ctypes, "CDLL", lambda name: libc)
    up._give_memory_back()
    assert set_to == [(-3, 128 << 10)]
    del libc.mallopt
    up._give_memory_back()  # another C library
