"""What the gateway answers by itself: the list of models, health, status, and the stream of events."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from orchestrator.backend import Event
from orchestrator.gateway.wire import Failure

if TYPE_CHECKING:
    from orchestrator.gateway.client import Client
    from orchestrator.gateway.route import Route

JSON = [(b"Content-Type", b"application/json"), (b"Cache-Control", b"no-store")]
EVENTS = [(b"Content-Type", b"text/event-stream"), (b"Cache-Control", b"no-store")]
MAX_QUEUED = 256


def encode(value: object) -> bytes:
    """Return a value as JSON; what JSON lacks becomes text."""
    return msgspec.json.encode(value, enc_hook=str)


def model_entry(route: Route, created: int) -> dict[str, Any]:
    """Return one entry of ``/v1/models``."""
    return {
        "id": route.name,
        "object": "model",
        "created": created,
        "owned_by": "orchestrator",
        "state": route.state,
    }


def health(routes: Mapping[str, Route]) -> tuple[int, dict[str, Any]]:
    """Return status and body of ``/health``: 200 only when every profile would be served now."""
    ready = bool(routes) and all(route.pool is not None for route in routes.values())
    states = {name: route.state for name, route in routes.items()}
    return (200 if ready else 503), {"status": "ok" if ready else "unavailable", "profiles": states}


class Status:
    """Answers ``/api/status``; called off when the client goes."""

    def __init__(self, client: Client, routes: Mapping[str, Route], about: Mapping[str, object]) -> None:
        self._client = client
        self._task = client.run(self._answer(routes, about))

    async def _answer(self, routes: Mapping[str, Route], about: Mapping[str, object]) -> None:
        # engines are asked in threads, as they may take a moment
        asked = [asyncio.to_thread(route.upstream.status) for route in routes.values()]
        value = {"gateway": about, "profiles": await asyncio.gather(*asked)}
        self._client.answer(200, JSON, encode(value))

    def client_gone(self) -> None:
        """Call the work off."""
        self._task.cancel()

    def pause(self) -> None:
        """Nothing is written before the answer is whole."""

    def resume(self) -> None:
        """Nothing waits."""

    def shut(self) -> None:
        """Answer that there will be none."""
        self._task.cancel()
        self._client.fail(Failure(503, "gateway: it is stopping", "server_error", "stopping"))


class Feed:
    """Sends events to one listener; what a slow one can't take in time is dropped and counted."""

    def __init__(self, client: Client, feeds: set[Feed], snapshot: list[Event]) -> None:
        self._client, self._feeds = client, feeds
        self._queue: deque[bytes] = deque()
        self._missed = 0
        client.begin(200, EVENTS, None)
        client.write(b": events of the profiles\n\n")
        for event in snapshot:
            self.send(event)
        feeds.add(self)

    def send(self, event: Event) -> None:
        """Send an event, or keep it while the listener is slow."""
        line = b"event: %b\ndata: %b\n\n" % (event.name.encode(), encode(event))
        if not self._client.paused:
            self._client.write(line)
        elif len(self._queue) < MAX_QUEUED:
            self._queue.append(line)
        else:
            self._missed += 1

    def beat(self) -> None:
        """Send a comment, so that a listener that is gone is noticed."""
        if not self._client.paused:
            self._client.write(b":\n\n")

    def pause(self) -> None:
        """Events are kept while the client is paused."""

    def resume(self) -> None:
        """Send what was kept, and how many were not."""
        while self._queue and not self._client.paused:
            self._client.write(self._queue.popleft())
        if self._missed and not self._client.paused:
            self._client.write(b'event: missed\ndata: {"count":%d}\n\n' % self._missed)
            self._missed = 0

    def client_gone(self) -> None:
        """Listen no longer."""
        self._feeds.discard(self)

    def shut(self) -> None:
        """End the stream."""
        self._feeds.discard(self)
        self._client.end()
