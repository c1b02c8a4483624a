"""The HTTP clients that models use, and the small questions they ask a server."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import httpx
import tenacity

from orchestrator.chunks import bad_status, json_or_text
from orchestrator.errors import ProtocolError, RequestError, Unreachable
from orchestrator.request import sendable

if TYPE_CHECKING:
    from orchestrator.backend import Endpoint
    from orchestrator.transport import Call

# The call that the running task is sending; aiohttp's tracing tells it when the request is really sent.
_sending: contextvars.ContextVar[Call] = contextvars.ContextVar("sending")

# -- asking a server something small ---------------------------------------------------------------


@contextlib.contextmanager
def reaching(what: str) -> Iterator[None]:
    """Turn the HTTP client's errors into ours."""
    try:
        yield
    except httpx.TransportError as error:
        raise Unreachable(
            f"{what}: no answer: {error or type(error).__name__}",
            advice="check that the server runs, and its address",
        ) from error


def tokenise_request(
    client: httpx.Client | httpx.AsyncClient, endpoint: Endpoint, text: str
) -> httpx.Request:
    """Return the question for a text's tokens, in the words of llama-server and of vLLM at once.

    Raises:
        RequestError: the text can't be sent.

    """
    body = {"content": text, "add_special": True, "prompt": text, "add_special_tokens": True}
    headers = {"Authorization": f"Bearer {endpoint.key}"} if endpoint.key else {}
    with sendable("tokenize"):
        return client.build_request(
            "POST",
            endpoint.url + "/tokenize",
            json={"model": endpoint.model, **body},
            headers=headers,
            timeout=30,
        )


def tokenised(response: httpx.Response) -> list[int]:
    """Return the tokens in the answer.

    Raises:
        BadStatus: the server refuses, or can't tokenise.
        ProtocolError: it answers something else.

    """
    body = json_or_text(response.content)
    if response.status_code != 200:
        raise bad_status(response.status_code, body)
    tokens = body.get("tokens") if isinstance(body, dict) else None
    if not isinstance(tokens, list) or not all(isinstance(token, int) for token in tokens):
        raise ProtocolError(f"tokenize: no tokens in the answer: {response.content[:200]!r}")
    return tokens


# -- clients ----------------------------------------------------------------------------------------


def resend_policy() -> dict[str, Any]:
    """Return tenacity's arguments for both shells: four tries within about half a second."""
    return {
        "stop": tenacity.stop_after_attempt(4),
        "wait": tenacity.wait_exponential(multiplier=0.05, max=0.5),
        "reraise": True,
    }


def client_options(url: str) -> dict[str, Any]:
    """Return what an httpx client for this server needs: no proxy and no certificates for local ones."""
    parts = urlsplit(url)
    local = parts.hostname in ("localhost", "::1") or (parts.hostname or "").startswith("127.")
    return {"trust_env": not local, "verify": parts.scheme == "https"}


def sync_client(url: str) -> httpx.Client:
    """Return a client that opens a connection for each request."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    return httpx.Client(limits=limits, **client_options(url))


def closed() -> RequestError:
    """Return the error of who asks a model that was closed."""
    return RequestError("request: the model is closed", advice="load it, or connect to it, again")


class AsyncClients:
    """The same for asyncio, one for each event loop: a client belongs to its loop."""

    def __init__(self) -> None:
        self._known: dict[asyncio.AbstractEventLoop, tuple[httpx.AsyncClient, Callable[[], None]]] = {}
        self._lock = threading.Lock()  # loops may run in several threads
        self._closed = False

    def here(self, url: str) -> httpx.AsyncClient:
        """Return the running loop's client.

        Raises:
            RequestError: they were closed.

        """
        loop = asyncio.get_running_loop()
        with self._lock:
            if self._closed:
                raise closed()
            if loop not in self._known:
                for ended in [other for other in self._known if other.is_closed()]:
                    self._known.pop(ended)[1]()
                self._known[loop] = _async_client(url)
            return self._known[loop][0]

    async def close(self) -> None:
        """Close all; those of other loops keep no connections, and are only let go."""
        with self._lock:
            self._closed = True
            mine = self._known.pop(asyncio.get_running_loop(), None)
            others = list(self._known.values())
            self._known.clear()
        for _, let_go in others:
            let_go()
        if mine is not None:
            await mine[0].aclose()


def _async_client(url: str) -> tuple[httpx.AsyncClient, Callable[[], None]]:
    """Return a client on aiohttp's transport, and what lets it go without its loop.

    The transport takes half of httpcore's CPU time for each event.
    """
    import aiohttp
    from httpx_aiohttp import AiohttpTransport

    options = client_options(url)

    def session() -> aiohttp.ClientSession:
        connector = aiohttp.TCPConnector(limit=0, force_close=True, ssl=transport.ssl_context)
        tracing = aiohttp.TraceConfig()
        tracing.on_request_headers_sent.append(_headers_sent)
        return aiohttp.ClientSession(
            connector=connector, trace_configs=[tracing], trust_env=options["trust_env"]
        )

    transport = AiohttpTransport(client=session, **options)

    def let_go() -> None:
        if isinstance(transport.client, aiohttp.ClientSession):
            transport.client.detach()

    return httpx.AsyncClient(transport=transport, **options), let_go


async def send(call: Call, client: httpx.AsyncClient, request: httpx.Request) -> httpx.Response:
    """Send an async call's request and return the answer's head."""
    token = _sending.set(call)
    try:
        return await client.send(request, stream=True)
    finally:
        _sending.reset(token)


async def _headers_sent(*_: Any) -> None:
    if (call := _sending.get(None)) is not None:
        call.mark_sent()
