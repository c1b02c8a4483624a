"""One name that clients ask for, and what stands behind it at this moment."""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from orchestrator.backend import Endpoint, Event, State
from orchestrator.errors import OrchestratorError
from orchestrator.gateway.engine import Pool
from orchestrator.gateway.wire import Failure

# States that lead to ready by themselves: a request waits for that.
PASSING = frozenset({State.STARTING, State.RESTARTING})


class Named(Protocol):
    """Whatever has a name; a profile."""

    @property
    def name(self) -> str:
        """The name that requests give as their model."""


class Upstream(Protocol):
    """What the gateway asks of an engine; every `orchestrator.backend.Backend` is one.

    `state`, `endpoint(0)`, `request` and `subscribe` are called from the event loop and must not block.
    """

    @property
    def profile(self) -> Named:
        """The profile that is served."""

    @property
    def state(self) -> State:
        """Where the engine is in its life."""

    def endpoint(self, timeout: float | None = None) -> Endpoint:
        """Return the endpoint of a ready engine, or raise BackendError after `timeout` seconds."""

    def request(self, endpoint: Endpoint) -> AbstractContextManager[None]:
        """Count a request to `endpoint` as in flight while the context is open; may raise EngineReplaced."""

    def subscribe(self, callback: Callable[[Event], None]) -> Callable[[], None]:
        """Call `callback` with every event, from any thread; returns the unsubscriber."""

    def status(self) -> dict[str, Any]:
        """Return what is known about the engine; may block for a moment."""


class Route:
    """Follows one upstream; its pool is there exactly while the engine is ready.

    Attributes:
        name: what clients call it.
        state: the upstream's state when it last changed.
        pool: connections to the ready engine, or None.
        waiting: requests that wait for it to become ready.

    """

    def __init__(self, name: str, upstream: Upstream, on_event: Callable[[Event], None]) -> None:
        self.name = name
        self.state = State.STOPPED
        self.pool: Pool | None = None
        self.waiting = 0
        self.removed = False
        self._retired: weakref.WeakSet[Pool] = weakref.WeakSet()  # answers under way keep theirs alive
        self._told: State | None = None
        self._on_event = on_event
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self.upstream = upstream
        loop = self._loop

        def from_any_thread(event: Event) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(self._take, event)

        self._unsubscribe = upstream.subscribe(from_any_thread)
        self.refresh()

    def _take(self, event: Event) -> None:
        if self.removed:
            return
        self.refresh()
        if event.name == "cut":
            for pool in self._retired:
                pool.cut = pool.cut or pool.endpoint.url == event.fields["url"]
        self._on_event(event)

    def refresh(self) -> None:
        """Read the upstream's state anew: events may overtake each other, the state can't."""
        self.state = self.upstream.state
        endpoint = None
        if self.state is State.READY:
            try:
                endpoint = self.upstream.endpoint(0)
            except OrchestratorError:
                self.state = self.upstream.state
        before = (self._told, self.pool)
        self._told = self.state
        if self.pool is not None and self.pool.endpoint != endpoint:
            self.pool.close()
            self._retired.add(self.pool)
            self.pool = None
        if endpoint is not None and self.pool is None:
            self.pool = Pool(endpoint, self._loop)
        if (self._told, self.pool) != before:
            self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def changed(self, at_most: float) -> None:
        """Wait for the next change, `at_most` seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(at_most):
                await self._changed.wait()

    @property
    def worth_waiting(self) -> bool:
        """Whether the engine will be ready without anybody's help."""
        return not self.removed and (self.state in PASSING or self.state is State.READY)

    def close(self) -> None:
        """Follow no longer; who waits is told so."""
        self.removed = True
        self._unsubscribe()
        if self.pool is not None:
            self.pool.close()
            self.pool = None
        self._wake()

    async def unavailable(self) -> Failure:
        """Return why a request can't be served now, with the engine's own reason where it has one."""
        what, retry = f"gateway: {self.name} is {self.state}", None
        code, advice = f"engine_{self.state}", None
        if self.removed:
            return Failure(404, f"gateway: {self.name} is no longer served", code="model_not_found")
        if self.worth_waiting:
            code, retry = "engine_loading", 5
            what += " and did not become ready in time"
        elif self.state is State.FAILED:
            status = await asyncio.to_thread(self.upstream.status)
            reason, advice = status.get("error"), status.get("advice")
            what += f": {reason}" if reason else ""
            advice = advice or f"see `orchestrator logs {self.name}`"
        else:
            advice = f"start it with `orchestrator up`, or see `orchestrator logs {self.name}`"
        return Failure(503, what, "server_error", code, advice=advice, retry_after=retry)
