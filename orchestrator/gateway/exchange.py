"""One request on its way through: waiting, sending, relaying, and what a dying engine means to it.

What may be sent again is decided here. Until the first byte of an answer has come, nothing was
delivered, so the request may go out once more; from then on never.
"""

from __future__ import annotations

import asyncio
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import msgspec

from orchestrator.errors import EngineReplaced
from orchestrator.gateway.engine import Link, Pool
from orchestrator.gateway.route import Route
from orchestrator.gateway.wire import BODILESS, Failure, RequestMessage, ResponseMessage, request_head
from orchestrator.log import get_logger

if TYPE_CHECKING:
    from orchestrator.gateway.client import Client

log = get_logger("orchestrator.gateway")

MAX_WAITING = 256
# A JSON answer up to this size is passed on when it is whole, so that an engine that dies within it
# can be answered with an error instead of half a document.
MAX_HELD = 4 * 2**20
# A server-sent event is passed on when it is whole; one larger than this goes in pieces.
MAX_EVENT = 2**20
# An engine that refuses a connection is about to be reported dead; this is how long nobody said so.
REFUSED_PAUSE_S = 0.25
_BLANK = (b"\n\n", b"\r\n\r\n", b"\r\r")


class Exchange:
    """Carries one request to an engine and its answer back."""

    def __init__(
        self,
        client: Client,
        route: Route,
        message: RequestMessage,
        body: bytes,
        model: str | None,
        wait_s: float,
    ) -> None:
        self._client, self._route, self._message = client, route, message
        self._body, self._model, self._wait_s = body, model, wait_s
        self._link: Link | None = None
        self._task: asyncio.Task[None] | None = None
        self._counted: AbstractContextManager[None] | None = None
        self._stale: Pool | None = None
        self._resent = False
        self._head: ResponseMessage | None = None
        self._held: list[bytes] | None = None
        self._held_size = 0
        self._events = False
        self._rest = b""
        self._split = False
        self._final = b""

    # -- towards the engine ---------------------------------------------------------------------

    def start(self) -> None:
        """Send the request, or wait until that is possible."""
        pool = self._route.pool
        link = pool.take() if pool is not None else None
        if link is not None:
            self._send(link)
        else:
            self._acquire(fresh=False)

    def _acquire(self, *, fresh: bool) -> None:
        self._task = self._client.run(self._wait_and_send(fresh=fresh))

    async def _wait_and_send(self, *, fresh: bool) -> None:
        route, loop = self._route, asyncio.get_running_loop()
        deadline = loop.time() + self._wait_s
        if self._resent:
            # the engine has most likely died; until that is known its socket may take this to its grave
            await route.changed(REFUSED_PAUSE_S)
        if route.waiting >= MAX_WAITING:
            self._client.fail(
                Failure(
                    503,
                    f"gateway: {route.name} has too many requests waiting",
                    "server_error",
                    "overloaded",
                    retry_after=5,
                )
            )
            return
        route.waiting += 1
        try:
            while route.worth_waiting and loop.time() < deadline:
                pool = route.pool
                if pool is None:
                    await route.changed(deadline - loop.time())
                    continue
                link = None if fresh else pool.take()
                if link is None:
                    try:
                        link = await pool.connect()
                    except OSError:
                        route.refresh()
                        await route.changed(min(REFUSED_PAUSE_S, deadline - loop.time()))
                        continue
                if route.pool is not pool:
                    link.abort()  # it was replaced meanwhile
                    continue
                self._task = None
                self._send(link)
                return
            failure = await route.unavailable()
        finally:
            route.waiting -= 1
        self._client.fail(failure)

    def _send(self, link: Link) -> None:
        message, endpoint, body = self._message, link.pool.endpoint, self._body
        if self._model is not None and self._model != endpoint.model:
            body = with_model(body, endpoint.model)
        counted = self._route.upstream.request(endpoint)
        try:
            counted.__enter__()
        except EngineReplaced:
            link.abort()
            self._route.refresh()
            self._acquire(fresh=False)
            return
        self._link, self._counted = link, counted
        head = request_head(
            message, link.pool.prefix + message.path, link.pool.authority, len(body), endpoint
        )
        link.send(self, head + body)

    # -- from the engine --------------------------------------------------------------------------

    def on_head(self, message: ResponseMessage) -> None:
        """Decide how the answer is passed on: events one by one, JSON whole, all else as it comes."""
        self._head = message
        self._body = b""
        self._client.drop_body()
        kind = message.headers.get("Content-Type", "").partition(";")[0].strip().lower()
        self._events = kind == "text/event-stream"
        if kind == "application/json":
            self._held = []
        else:
            self._begin()

    def _begin(self) -> None:
        head = self._head
        assert head is not None
        length = None if self._events else head.headers.get("Content-Length")
        self._client.begin(head.code, head.raw_headers, None if length is None else int(length))
        if self._client.paused:
            self.pause()

    def on_data(self, data: bytes) -> None:
        """Pass on the next bytes of the body."""
        if self._held is not None:
            self._held.append(data)
            self._held_size += len(data)
            if self._held_size > MAX_HELD:
                held, self._held = self._held, None
                self._begin()
                self._client.write(b"".join(held))
        elif self._events:
            self._pass_events(data)
        else:
            self._client.write(data)

    def _pass_events(self, data: bytes) -> None:
        if self._rest:
            data, self._rest = self._rest + data, b""
        whole = data.endswith(b"\n\n")
        if not whole:
            end = max((at + len(blank) for blank in _BLANK if (at := data.rfind(blank)) >= 0), default=0)
            if len(data) - end <= MAX_EVENT:
                data, self._rest, whole = data[:end], data[end:], True
        if data:
            self._final, self._split = data, not whole
            self._client.write(data)

    def on_end(self) -> None:
        """Finish: the answer is whole."""
        head = self._head
        assert head is not None
        self._link = None
        if not head.chunked and "Content-Length" not in head.headers and self._torn(head):
            self.on_lost()
            return
        self._release()
        if self._held is not None:
            self._client.answer(head.code, head.raw_headers, b"".join(self._held))
            return
        if self._rest:
            self._client.write(self._rest)
        self._client.end()

    def _torn(self, head: ResponseMessage) -> bool:
        """Say whether an answer lacks its end that only the end of its connection marks.

        A dying engine ends its connections too, so what was held or followed tells; all else can't be told.
        """
        if self._events:
            return b"data: [DONE]" not in (self._final + self._rest)[-64:]
        if self._held is None or head.code in BODILESS:
            return False
        try:
            msgspec.json.decode(b"".join(self._held), type=msgspec.Raw)
        except msgspec.DecodeError:
            return True
        except RecursionError:  # JSON all the same
            return False
        return False

    def on_lost(self) -> None:
        """Send again if nothing had come, else say that the answer ends here."""
        link, self._link = self._link, None
        self._release()
        if link is not None and not link.received and self._may_resend(link):
            self._acquire(fresh=True)
            return
        name = self._route.name
        log.warning("gateway.answer_lost", profile=name, path=self._message.path.partition("?")[0])
        failure = Failure(
            502,
            f"gateway: {name}: the engine ended while it was answering",
            "server_error",
            "engine_died",
            advice="ask again; the engine is restarted if its profile allows it",
        )
        if link is not None and link.pool.cut:
            failure = Failure(
                502,
                f"gateway: {name}: another engine has taken over, and this answer outlasted the drain time",
                "server_error",
                "engine_switched",
                advice="ask again; a switch may be given more time for answers under way",
            )
        self._break_off(failure)

    def _may_resend(self, link: Link) -> bool:
        """Say whether the request may go out once more.

        An engine that closes an idle connection in the moment when it is reused has not seen the
        request: that costs nothing. A second loss after such a one counts as the first, unless another
        engine is there by now: then the first one was a death.
        """
        if link.reused and self._stale is None:
            self._stale = link.pool
            return True
        if self._resent or (self._stale is not None and self._stale is not link.pool):
            return False
        self._resent = True
        return True

    # -- the client ---------------------------------------------------------------------------------

    def client_gone(self) -> None:
        """Stop at once, whatever the stage, so that the engine stops too."""
        self.cancel()

    def cancel(self) -> None:
        """Let go of the engine and of every wait."""
        if self._task is not None:
            self._task.cancel()
        link, self._link = self._link, None
        if link is not None:
            link.abort()
        self._release()

    def shut(self) -> None:
        """End now because the gateway stops: with an error where the answer allows one."""
        self.cancel()
        self._break_off(Failure(503, "gateway: it is stopping", "server_error", "stopping", retry_after=5))

    def _break_off(self, failure: Failure) -> None:
        """End the answer with an error, as far as it still can hold one."""
        if self._head is None or self._held is not None:
            self._client.fail(failure)
        elif self._events:
            self._client.write((b"\n\n" if self._split else b"") + failure.event())
            self._client.end()
        else:
            self._client.abort()

    def pause(self) -> None:
        """Read no more from the engine: the client is slower."""
        if self._link is not None:
            self._link.pause()

    def resume(self) -> None:
        """Read on."""
        if self._link is not None:
            self._link.resume()

    def _release(self) -> None:
        counted, self._counted = self._counted, None
        if counted is not None:
            counted.__exit__(None, None, None)


def with_model(body: bytes, model: str) -> bytes:
    """Return a JSON object with its ``model`` set, every other value as it was."""
    values = msgspec.json.decode(body, type=dict[str, msgspec.Raw]) if body else {}
    values["model"] = msgspec.Raw(msgspec.json.encode(model))
    return msgspec.json.encode(values)
