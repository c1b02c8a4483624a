"""One request over HTTP: what the sync and the async shell share.

Connections are not kept after a stream. llama-server closes its own after each stream, and a client that
reuses the dying connection loses requests; a fresh connection on loopback costs a fraction of a millisecond,
and `ttft_s` starts when it is open. A request is sent again only while not one byte of an answer has come.

Deadlines: `timeouts.stall` counts the time without progress while we wait for the server, not the time a
caller takes between tokens. Only events are progress (tokens, or llama-server's news of a prompt being read);
comments such as its pings come from a thread that outlives a hung engine. `timeouts.request` counts all time.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import httpcore
import httpx

from orchestrator.chunks import bad_status, json_or_text
from orchestrator.errors import ProtocolError, RequestError, Stalled, Unreachable
from orchestrator.log import get_logger
from orchestrator.request import sendable
from orchestrator.tokens import Metrics, Token
from orchestrator.wire import Stream

if TYPE_CHECKING:
    from orchestrator.backend import Endpoint
    from orchestrator.source import Settings

CONNECT_TIMEOUT = 10.0

log = get_logger("orchestrator.model")


class Call:
    """The state of one request; does no I/O.

    Attributes:
        path: the endpoint's path.
        body: makes the request's body for the endpoint that it will go to.
        settings: deadlines, and how long to wait for a server.
        on_end: called once, when the call is over.
        error: what the call failed with.
        stream: what has come back.
        sent_ns: when the request was sent on an open connection.
        end_ns: when it was over; 0 before.
        stopped: why we ended it ourselves, else empty: ``closed`` by its owner, ``model`` closed under it,
            ``request``, ``stall``.
        waiting: whether somebody waits for bytes of the server right now.
        hang_up: wakes whoever waits, so that it looks at `stopped`.

    """

    def __init__(
        self,
        path: str,
        body: Callable[[Endpoint], dict[str, Any]],
        settings: Settings,
        on_end: Callable[[Call], None],
    ) -> None:
        self.path = path
        self.body = body
        self.settings = settings
        self.on_end = on_end
        self.stream = Stream()
        self.error: Exception | None = None
        self.sent_ns = 0
        self.end_ns = 0
        self.stopped = ""
        self.answered = False
        self.waiting = False
        self.hang_up: Callable[[], None] = lambda: None
        self._begun_ns = time.perf_counter_ns()
        self._idle_ns = self._begun_ns

    @property
    def patience(self) -> float:
        """Seconds to wait for a server that is not ready."""
        return min(self.settings.start, self.settings.request or self.settings.start)

    # -- sending ------------------------------------------------------------------------------------

    def request(self, client: httpx.Client | httpx.AsyncClient, endpoint: Endpoint) -> httpx.Request:
        """Return the request for this endpoint.

        Raises:
            RequestError: the endpoint's engine lacks an option, a value can't be sent, or the call was ended
                meanwhile.

        """
        if self.stopped:
            raise RequestError("request: ended before it was sent")
        headers = {"Accept": "text/event-stream", "Accept-Encoding": "identity"}
        if endpoint.key:
            headers["Authorization"] = f"Bearer {endpoint.key}"
        # aiohttp would count the caller's time between two tokens too; the async shell has its own watch.
        limits = (self.settings.stall, self.settings.request) if isinstance(client, httpx.Client) else ()
        patience = min((seconds for seconds in limits if seconds), default=None)
        with sendable("request"):
            return client.build_request(
                "POST",
                endpoint.url + self.path,
                json=self.body(endpoint),
                headers=headers,
                timeout=httpx.Timeout(patience, connect=CONNECT_TIMEOUT, pool=None),
                extensions={"trace": self.trace},
            )

    def mark_sent(self) -> None:
        """Note that the request goes out now, on a connection that is open."""
        self.sent_ns = self._idle_ns = time.perf_counter_ns()
        self.waiting = True
        if self.stopped:  # while it was connecting
            self.hang_up()

    def trace(self, event: str, details: Mapping[str, Any]) -> None:
        """Take from httpcore's events what a sync call needs: its socket, and when the request is sent."""
        if event.endswith(("connect_tcp.complete", "start_tls.complete")):
            connection: socket.socket = details["return_value"].get_extra_info("socket")
            self.hang_up = lambda: _shut_down(connection)
            if self.stopped:
                self.hang_up()
        elif event.endswith("send_request_headers.started"):
            self.mark_sent()

    def may_resend(self, error: BaseException) -> bool:
        """Whether the connection failed before the answer's head, and neither we nor a deadline ended it.

        Nothing was delivered then, so sending again can't repeat anything.
        """
        return isinstance(error, httpx.TransportError) and not self.stopped and not _timed_out(error)

    def accept(self, response: httpx.Response) -> bool:
        """Look at the answer's head; False when its body is an error to be read and given to `refuse`."""
        self.answered = True
        kind = response.headers.get("content-type", "")
        return response.status_code == 200 and kind.partition(";")[0].strip() == "text/event-stream"

    def refuse(self, response: httpx.Response, body: bytes) -> RequestError:
        """Return the error for an answer that is not a stream."""
        if response.status_code != 200:
            return bad_status(response.status_code, json_or_text(body))
        kind = response.headers.get("content-type", "nothing")
        return ProtocolError(f"request: expected an event stream, got {kind}: {body[:200]!r}")

    # -- reading ------------------------------------------------------------------------------------

    def feed(self, chunk: bytes) -> list[Token]:
        """Take a read; the caller then delivers the tokens and calls `proceed`."""
        now = time.perf_counter_ns()
        self.waiting = False
        return self.stream.feed(chunk, now)

    def proceed(self) -> bool:
        """Whether to read on.

        Raises:
            RequestError: the stream failed.

        """
        stream = self.stream
        if stream.error is not None:
            raise stream.error
        if stream.done or self.stopped:
            return False
        self.waiting = True
        if stream.progressed:
            self._idle_ns = time.perf_counter_ns()
            return True
        self.seconds_left()
        return not self.stopped

    def seconds_left(self) -> float:
        """Return the time until the next deadline (inf: none), ending the call when one has passed."""
        now = time.perf_counter_ns()
        limits = self.settings
        left = float("inf")
        if limits.stall:
            left = limits.stall - ((now - self._idle_ns) / 1e9 if self.waiting else 0)
            if left <= 0:
                self.stop("stall")
        if limits.request:
            left = min(left, limits.request - (now - self._begun_ns) / 1e9)
            if left <= 0:
                self.stop("request")
        return left

    def stop(self, why: str) -> None:
        """End the call from outside, for a reason as in `stopped`. The first reason stays."""
        if not self.stopped and not self.end_ns:
            self.stopped = why
            self.hang_up()

    # -- the end ------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Judge a body that was read to its end.

        Raises:
            RequestError: it was not a success.

        """
        if self.stopped and not self.stream.done:
            if (reason := self._ended_by_us()) is not None:
                raise reason
            return
        self.stream.end()
        for warning in self.stream.warnings:
            log.warning("stream", path=self.path, warning=warning)

    def explain(self, error: Exception) -> Exception | None:
        """Return what to raise for an error, and keep it; None when it is only its owner's `close`."""
        self.error = self._explain(error)
        return self.error

    def _explain(self, error: Exception) -> Exception | None:
        if self.stopped:
            return self._ended_by_us()
        if not isinstance(error, httpx.TransportError):
            return error
        if self.sent_ns and _timed_out(error):
            return self._stalled()
        what = str(error) or type(error).__name__
        if self.answered:
            return self.stream.interrupted(f"the connection broke: {what}")
        return Unreachable(
            f"request: no answer: {what}", advice="check that the server runs, and its address"
        )

    def _ended_by_us(self) -> RequestError | None:
        if self.stopped == "closed":
            return None
        if self.stopped == "model":  # who reads did not ask for that, and must not take a part for the whole
            return self.stream.error or self.stream.interrupted("the model was closed")
        return self._stalled()

    def _stalled(self) -> Stalled:
        limits = self.settings
        spent = (time.perf_counter_ns() - self._begun_ns) / 1e9
        if limits.request and (self.stopped == "request" or spent >= limits.request):
            why, key = f"not finished after {limits.request:g} s", "request"
        else:
            why, key = f"no progress for {limits.stall:g} s", "stall"
        return Stalled(f"request: {why}", partial=self.stream.text, advice=f"`timeouts.{key}` sets the limit")

    def over(self) -> None:
        """Note that nothing more will happen."""
        self.end_ns = time.perf_counter_ns()
        self.on_end(self)

    def metrics(self, memory: Any = None) -> Metrics:
        """Return what the call cost, so far if it is not over."""
        if not self.sent_ns:  # it never was: counted from 0, it would have lasted since the machine's start
            return Metrics(memory=memory)
        return self.stream.metrics(self.sent_ns, self.end_ns or time.perf_counter_ns(), memory)


def _timed_out(error: Exception) -> bool:
    """Whether a deadline has passed; httpx-aiohttp says ConnectTimeout for dropped connections as well."""
    if isinstance(error, httpx.ConnectTimeout):
        return isinstance(error.__cause__, TimeoutError | httpcore.ConnectTimeout)
    return isinstance(error, httpx.TimeoutException)


def _shut_down(connection: socket.socket) -> None:
    """Wake a thread that reads from a socket; closing it would not."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
