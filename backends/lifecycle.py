"""The state of one backend as its callers see it: what they wait on, and the events they hear.

The supervisor thread changes it, everybody may read it. All of it is guarded by one condition, `changed`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from orchestrator.backend import ALIVE, Endpoint, Event, State
from orchestrator.errors import OrchestratorError, StartCancelled, StartTimeout
from orchestrator.log import get_logger
from orchestrator.subscribers import Subscribers

if TYPE_CHECKING:
    from backends.process import Child
    from orchestrator.home import RunFolder
    from orchestrator.profile import Profile

log = get_logger("orchestrator.backend")

P = ParamSpec("P")
T = TypeVar("T")

TAIL_LINES = 20
THREADS = 4  # of a supervisor, at most, for what would block its loop


class _Threads(ThreadPoolExecutor):
    """A pool that works on when the main thread has ended: an engine may be stopped at exit, or later."""

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Run in a thread of the pool, else in one of its own."""
        try:
            return super().submit(fn, *args, **kwargs)
        except RuntimeError as error:
            if "cannot schedule" not in str(error):  # it says so when pools take nothing more
                raise
            alone: Future[T] = Future()
            threading.Thread(target=_settle, args=(alone, lambda: fn(*args, **kwargs)), daemon=True).start()
            return alone


def _settle(future: Future[T], work: Callable[[], T]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(work())
    except BaseException as error:  # whoever awaits it is told
        future.set_exception(error)


def run(task: Coroutine[Any, Any, None]) -> None:
    """Run a supervisor's task on an event loop of its own, with a bounded pool of threads."""

    async def bounded() -> None:
        asyncio.get_running_loop().set_default_executor(_Threads(THREADS))
        await task

    asyncio.run(bounded())


class Lifecycle:
    """State, endpoint, error, events and requests in flight of one backend."""

    def __init__(self, profile: Profile, backend: str) -> None:
        self.profile = profile
        self.backend = backend
        self.changed = threading.Condition()
        self.state = State.STOPPED
        self.current: Endpoint | None = None
        self.error: OrchestratorError | None = None
        self.child: Child | None = None
        self.folder: RunFolder | None = None
        self.ready_at: float | None = None
        self.load_s: float | None = None
        self.stage = ""
        self.restarts = 0
        self.in_flight = 0
        self.subscribers = Subscribers()

    @property
    def title(self) -> str:
        """What messages start with."""
        return f"{self.backend}: {self.profile.name}"

    # -- the supervisor's side; the condition is held -----------------------------------------------------
    def become(self, state: State, **fields: Any) -> None:
        """Change the state, wake who waits and tell subscribers."""
        before, self.state = self.state, state
        if state is not State.READY:
            self.current = None
        self.changed.notify_all()
        self.tell("state", before=str(before), **fields)

    def tell(self, name: str, **fields: Any) -> None:
        """Tell an event to the log and to subscribers."""
        event = Event(time.time(), self.profile.name, name, self.state, fields)
        if name != "stage":
            log.info(name, profile=self.profile.name, state=str(self.state), **fields)
        self.subscribers.tell(event)

    # -- the callers' side ----------------------------------------------------------------------------------
    def wait_ready(self, timeout: float | None) -> Endpoint:
        """Wait for the endpoint of a ready engine, at most `timeout` seconds unless that is None.

        Raises:
            StartTimeout: it is not ready by then; it goes on.
            StartCancelled: it was stopped.
            OrchestratorError: what ended it.

        """
        deadline = None if timeout is None else time.monotonic() + timeout
        with self.changed:
            while True:
                if self.state is State.READY and self.current is not None:
                    return self.current
                if self.state not in ALIVE:
                    raise self.error or StartCancelled(
                        f"{self.title}: is {self.state}", profile=self.profile.name, advice="start it again"
                    )
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    raise StartTimeout(
                        f"{self.title}: not ready in {timeout:g} s, still {self.state}",
                        profile=self.profile.name,
                        log_tail=self.child.tail.lines(TAIL_LINES) if self.child else (),
                        advice="it goes on loading; ask again, or see `orchestrator logs`",
                    )
                self.changed.wait(left)

    @contextlib.contextmanager
    def request(self) -> Iterator[None]:
        """Count a request as in flight while the context is open."""
        with self.changed:
            self.in_flight += 1
        try:
            yield
        finally:
            with self.changed:
                self.in_flight -= 1

    def status(self) -> Mapping[str, Any]:
        """Return what `ps` and ``/api/status`` show; memory in bytes, times in seconds."""
        with self.changed:
            child, endpoint, ready_at, state = self.child, self.current, self.ready_at, self.state
            error, folder = self.error, self.folder
        alive = child is not None and not child.gone.is_set()
        cards = child.cards.of(child.everybody()) if child and child.cards and alive else ()
        return {
            "name": self.profile.name,
            "profile": str(self.profile.source or self.profile.name),
            "backend": self.backend,
            "state": str(state),
            "pid": os.getpid(),
            "engine_pids": child.tree() if child and alive else [],
            "url": endpoint.url if endpoint else None,
            "uptime_s": round(time.monotonic() - ready_at, 3) if ready_at else None,
            "load_s": self.load_s,
            "restarts": self.restarts,
            "in_flight": self.in_flight,
            "memory": child.sample().rss if child and alive else 0,
            "gpus": [asdict(card) for card in cards],
            "stage": self.stage,
            "error": str(error) if error else None,
            "advice": error.advice if error else None,
            "log": str(folder.log) if folder else None,
        }
