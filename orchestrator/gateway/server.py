"""The gateway itself: one address, the routes behind it, and the life of both."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import time
from collections.abc import Mapping

from orchestrator.errors import PortTaken, StartError
from orchestrator.gateway.client import Client, Handler
from orchestrator.gateway.dispatch import Dispatcher
from orchestrator.gateway.guard import (
    Guard,
    bracketed,
    is_loopback,
    is_open,
    is_wildcard,
    outside_address,
)
from orchestrator.gateway.limits import Limits
from orchestrator.gateway.llhttp import HttpVersion11
from orchestrator.gateway.route import Route, Upstream
from orchestrator.gateway.wire import Failure, RequestMessage
from orchestrator.log import get_logger

log = get_logger("orchestrator.gateway")

SWEEP_S = 1.0
BEAT_S = 15.0


class Gateway:
    """One stable OpenAI-compatible address in front of engines that come and go.

    Args:
        upstreams: what is served, by the name that clients give as ``model``.
        host: address to listen on; beyond loopback only with `api_key`.
        port: port to listen on; 0 takes a free one.
        api_key: what clients must send as a bearer token, or None.
        wait_s: seconds for which a request waits for an engine that loads or restarts.
        limits: what one client may take.

    Raises:
        ValueError: `host` is beyond loopback and there is no key; see `is_open`.

    """

    def __init__(
        self,
        upstreams: Mapping[str, Upstream],
        *,
        host: str = "127.0.0.1",
        port: int = 8080,
        api_key: str | None = None,
        wait_s: float = 120.0,
        limits: Limits | None = None,
    ) -> None:
        if is_open(host, api_key):
            raise ValueError(f"gateway: {host or 'every address'} is beyond loopback and needs a key")
        host = host.strip("[]")
        # `localhost` may mean ::1 to one program and 127.0.0.1 to another
        self._host = "127.0.0.1" if host == "localhost" else host
        self.port = port
        self.stopping = False
        self.limits = limits or Limits()
        self._guard = Guard(host, api_key)
        self._upstreams = dict(upstreams)
        self._dispatcher = Dispatcher(wait_s, self._about)
        self._clients: set[Client] = set()
        self._held = 0
        self._server: asyncio.Server | None = None
        self._sweeper: asyncio.TimerHandle | None = None
        self._beat_at = 0.0
        self._idle: asyncio.Event | None = None
        self._started = int(time.time())

    @property
    def url(self) -> str:
        """Base URL with ``/v1``, as programs on this machine reach it: a wildcard is no address to ask at."""
        host = self._host
        if is_wildcard(host):
            host = "::1" if ":" in host else "127.0.0.1"
        return f"http://{bracketed(host)}:{self.port}/v1"

    @property
    def outside_url(self) -> str | None:
        """The same as other machines reach it; None when they can't, or it can't be told."""
        if is_loopback(self._host):
            return None
        host = outside_address(":" in self._host) if is_wildcard(self._host) else self._host
        return f"http://{bracketed(host)}:{self.port}/v1" if host else None

    # -- life -------------------------------------------------------------------------------------

    async def start(self) -> int:
        """Listen, follow the engines, and return the port.

        Raises:
            PortTaken: another process listens there.
            StartError: the address can't be listened on.

        """
        self.loop = asyncio.get_running_loop()
        try:
            self._server = await self.loop.create_server(
                lambda: Client(self), self._host or None, self.port, backlog=1024
            )
        except OSError as error:
            where = f"gateway: {bracketed(self._host)}:{self.port}"
            if error.errno == errno.EADDRINUSE:
                raise PortTaken(
                    f"{where} is taken by another process",
                    advice="stop what listens there, or choose another with --port (0 takes a free one)",
                ) from error
            raise StartError(
                f"{where} can't be listened on: {error.strerror or error}", advice="check --host and --port"
            ) from error
        self.port = self._server.sockets[0].getsockname()[1]
        try:
            for name, upstream in self._upstreams.items():
                self.add(name, upstream)
        except BaseException:
            await self.stop(0)
            raise
        self._sweep()
        return self.port

    async def stop(self, drain_s: float = 10.0) -> None:
        """Accept nothing new, give answers under way `drain_s` seconds to end, then end them."""
        self.stopping = True
        if self._server is not None:
            self._server.close()
        for feed in list(self._dispatcher.feeds):
            feed.shut()
        for client in [client for client in self._clients if not client.busy]:
            client.shut()
        await self._all_gone(drain_s)
        for client in list(self._clients):
            client.shut()
        await self._all_gone(min(drain_s, 1.0))
        for client in list(self._clients):
            client.abort()
        await self._all_gone(1.0)
        for name in list(self._dispatcher.routes):
            self.remove(name)
        if self._sweeper is not None:
            self._sweeper.cancel()

    async def _all_gone(self, at_most: float) -> None:
        if not self._clients:
            return
        self._idle = asyncio.Event()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(at_most):
                await self._idle.wait()

    # -- what is served -----------------------------------------------------------------------------

    def add(self, name: str, upstream: Upstream) -> None:
        """Serve one more engine."""
        self._dispatcher.routes[name] = Route(name, upstream, self._dispatcher.publish)

    def remove(self, name: str) -> None:
        """Serve an engine no longer; answers under way are finished."""
        self._dispatcher.routes.pop(name).close()

    # -- for connections ----------------------------------------------------------------------------

    def admit(self, client: Client) -> bool:
        """Count a connection in, or say that there are too many; idle ones give way, the oldest first."""
        if len(self._clients) >= self.limits.clients:
            idle = [each for each in self._clients if each.idle]
            if idle:
                oldest = min(idle, key=lambda each: each.deadline)
                oldest.abort()
                self._clients.discard(oldest)
        if self.stopping or len(self._clients) >= self.limits.clients:
            return False
        self._clients.add(client)
        return True

    def forget(self, client: Client) -> None:
        """Count a connection out."""
        self._clients.discard(client)
        if self._idle is not None and not self._clients:
            self._idle.set()

    def hold_body(self, size: int, total: int) -> Failure | None:
        """Count bytes of a body that is being read; returns why there may not be more."""
        self._held += size
        if total > self.limits.body:
            return self._too_large
        if self._held > self.limits.bodies:
            return Failure(
                503, "gateway: too many large requests at once", "server_error", "overloaded", retry_after=5
            )
        return None

    def release_body(self, size: int) -> None:
        """Count bytes of a body out."""
        self._held -= size

    @property
    def _too_large(self) -> Failure:
        return Failure(
            413, f"gateway: the request is larger than {self.limits.body} bytes", code="request_too_large"
        )

    def refusal(self, message: RequestMessage) -> Failure | None:
        """Return why a request is refused before its body is read, or None."""
        path = message.path.partition("?")[0]
        if message.method == "CONNECT":
            return Failure(405, "gateway: CONNECT is not supported", code="method_not_allowed")
        failure = self._guard.refusal(message, path)
        if failure is not None:
            return failure
        if message.headers.get("Upgrade", "").lower().startswith("websocket"):
            return Failure(501, "gateway: web sockets are not supported", code="upgrade_refused")
        if message.headers.get("Content-Encoding", "identity").lower() != "identity":
            return Failure(415, "gateway: a compressed request is not supported", code="content_encoding")
        coding = message.headers.get("Transfer-Encoding")
        if coding is not None and (coding.strip().lower() != "chunked" or message.version < HttpVersion11):
            return Failure(
                501, "gateway: no transfer coding but chunked is supported", code="transfer_encoding"
            )
        length = message.headers.get("Content-Length")
        if length is not None and int(length) > self.limits.body:
            return self._too_large
        return None

    def handle(self, client: Client, message: RequestMessage, body: bytes) -> Handler | None:
        """Answer a request, now or through the handler that is returned."""
        return self._dispatcher.handle(client, message, body)

    # -- now and then -----------------------------------------------------------------------------------

    def _about(self) -> dict[str, object]:
        return {"url": self.url, "clients": len(self._clients), "since": self._started}

    def _sweep(self) -> None:
        now = self.loop.time()
        self._sweep_once(now)
        if now > self._beat_at:
            self._beat_at = now + BEAT_S
            for feed in self._dispatcher.feeds:
                feed.beat()
        self._sweeper = self.loop.call_later(SWEEP_S, self._sweep)

    def _sweep_once(self, now: float) -> None:
        for client in [client for client in self._clients if 0 < client.deadline < now]:
            client.expire()
