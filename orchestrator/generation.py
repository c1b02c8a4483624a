"""A running generation, sync and async: two thin shells that move bytes between HTTP and a `Call`."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Generator, Iterator
from typing import TYPE_CHECKING, Any, Self

import tenacity

from orchestrator import source as sources
from orchestrator.clients import resend_policy, send
from orchestrator.errors import BackendError, EngineReplaced, RequestError
from orchestrator.tokens import Metrics, Result, Token, ToolCall, Usage
from orchestrator.transport import Call

if TYPE_CHECKING:
    import httpx

    from orchestrator.backend import Endpoint
    from orchestrator.source import Source


class _Outcome:
    """What both kinds of generation tell about themselves; final once the iteration has ended."""

    def __init__(self, source: Source, call: Call) -> None:
        self._source = source
        self._call = call

    @property
    def partial(self) -> str:
        """The text so far."""
        return self._call.stream.text

    @property
    def reasoning(self) -> str:
        """What the model thought so far."""
        return self._call.stream.reasoning

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """The tool calls so far."""
        return self._call.stream.tool_calls

    @property
    def usage(self) -> Usage | None:
        """The server's counts; None until they came."""
        return self._call.stream.usage

    @property
    def finish_reason(self) -> str | None:
        """``stop``, ``length``, ``tool_calls``, ...; None until the end, and after a `close` before it."""
        return self._call.stream.finish_reason

    @property
    def prompt_progress(self) -> tuple[int, int] | None:
        """(tokens read, tokens in all) of the prompt, where the engine tells."""
        return self._call.stream.prompt_progress

    @property
    def warnings(self) -> tuple[str, ...]:
        """Oddities of a stream that succeeded nonetheless."""
        return tuple(self._call.stream.warnings)

    @property
    def metrics(self) -> Metrics:
        """What it cost."""
        return self._call.metrics(sources.memory(self._source))

    def result(self, error: RequestError | BackendError | None = None) -> Result:
        """Return the answer as a value."""
        stream = self._call.stream
        return Result(stream.text, None if error else stream.finish_reason, stream.usage, self.metrics, error)


# -- sync -------------------------------------------------------------------------------------------


class Generation(_Outcome, Iterator[Token]):
    """One answer in the making. The request is sent when the first token is asked for.

    Iterate over it, or drain it with `text`. `close`, leaving its ``with``, dropping it, or an exception in
    the middle (KeyboardInterrupt too) cancels the request on the server; the server lives on. `close` may be
    called from another thread.
    """

    def __init__(self, source: Source, call: Call, client: Callable[[str], httpx.Client]) -> None:
        super().__init__(source, call)
        # A function of its own, not a method: the iterator must not refer to this object, so that dropping
        # the last reference to it closes the request at once.
        self._tokens = _stream(source, call, client)

    def __next__(self) -> Token:
        return next(self._tokens)

    def text(self) -> str:
        """Drain it and return the text.

        Raises:
            RequestError: the request failed; the partial text is in `partial`.
            BackendError: there is no server, or none in time.

        """
        for _ in self:
            pass
        return self.partial

    def close(self) -> None:
        """Cancel the request; harmless when it is over."""
        self._call.stop("closed")
        with contextlib.suppress(ValueError):  # it is running in another thread, which has been woken
            self._tokens.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _stream(
    source: Source, call: Call, client: Callable[[str], httpx.Client]
) -> Generator[Token, None, None]:
    deadline = (
        threading.Timer(call.settings.request, call.stop, ("request",)) if call.settings.request else None
    )
    try:
        with contextlib.ExitStack() as counted:
            if deadline is not None:
                deadline.daemon = True
                deadline.start()
            response = _open(source, call, client, counted)
            try:
                if not call.accept(response):
                    raise call.refuse(response, response.read())
                for chunk in response.stream:  # type: ignore[union-attr] # sync, from a sync client
                    yield from call.feed(chunk)
                    if not call.proceed():
                        break
            finally:
                response.close()
            call.finish()
    except Exception as error:
        if (reason := call.explain(error)) is not None:
            raise reason from (None if reason is error else error)
    finally:
        call.over()
        if deadline is not None:
            deadline.cancel()


def _open(
    source: Source, call: Call, client: Callable[[str], httpx.Client], counted: contextlib.ExitStack
) -> httpx.Response:
    for attempt in tenacity.Retrying(retry=tenacity.retry_if_exception(call.may_resend), **resend_policy()):
        with attempt:
            counted.close()  # the attempt before
            while not _admitted(source, endpoint := source.endpoint(call.patience), counted):
                pass
            http = client(endpoint.url)
            return http.send(call.request(http, endpoint), stream=True)
    raise AssertionError("tenacity returns or raises")


def _admitted(source: Source, endpoint: Endpoint, counted: contextlib.ExitStack) -> bool:
    """Count the request at the engine that will get it; False when that one takes no more of them."""
    try:
        counted.enter_context(source.request(endpoint))
    except EngineReplaced:
        return False
    return True


# -- async ------------------------------------------------------------------------------------------


class AsyncGeneration(_Outcome, AsyncIterator[Token]):
    """`Generation` for asyncio: the same, with ``async for``, ``await text()`` and ``await close()``."""

    def __init__(self, source: Source, call: Call, client: Callable[[str], httpx.AsyncClient]) -> None:
        super().__init__(source, call)
        self._tokens = _astream(source, call, client)

    def __anext__(self) -> Awaitable[Token]:
        return self._tokens.__anext__()

    async def text(self) -> str:
        """Drain it and return the text.

        Raises:
            RequestError: the request failed; the partial text is in `partial`.
            BackendError: there is no server, or none in time.

        """
        async for _ in self:
            pass
        return self.partial

    async def close(self) -> None:
        """Cancel the request; harmless when it is over."""
        self._call.stop("closed")
        with contextlib.suppress(RuntimeError):  # another task is reading; it has been woken
            await self._tokens.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


async def _astream(
    source: Source, call: Call, client: Callable[[str], httpx.AsyncClient]
) -> AsyncGenerator[Token, None]:
    watch = _Watch(call)
    try:
        with contextlib.ExitStack() as counted:
            response = await _aopen(source, call, client, watch, counted)
            try:
                if not call.accept(response):
                    raise call.refuse(response, await response.aread())
                async for chunk in response.stream:  # type: ignore[union-attr] # async, from an async client
                    for token in call.feed(chunk):
                        yield token
                    watch.enter()
                    if not call.proceed():
                        break
            finally:
                await response.aclose()
            call.finish()
    except asyncio.CancelledError as error:
        if not watch.cancelled():
            raise
        if (reason := call.explain(RuntimeError())) is not None:
            raise reason from error
    except Exception as error:
        if (reason := call.explain(error)) is not None:
            raise reason from (None if reason is error else error)
    finally:
        call.over()
        watch.end()


async def _aopen(
    source: Source,
    call: Call,
    client: Callable[[str], httpx.AsyncClient],
    watch: _Watch,
    counted: contextlib.ExitStack,
) -> httpx.Response:
    retrying = tenacity.AsyncRetrying(retry=tenacity.retry_if_exception(call.may_resend), **resend_policy())
    async for attempt in retrying:
        with attempt:
            counted.close()  # the attempt before
            while not _admitted(source, endpoint := await _endpoint(source, call), counted):
                pass
            http = client(endpoint.url)
            watch.enter()
            return await send(call, http, call.request(http, endpoint))
    raise AssertionError("tenacity returns or raises")


async def _endpoint(source: Source, call: Call) -> Endpoint:
    try:
        return source.endpoint(0)  # ready, as nearly always: no thread needed
    except BackendError:
        return await asyncio.to_thread(source.endpoint, call.patience)


class _Watch:
    """Ends an async call's wait for the server when a deadline passes or somebody closes the call.

    The reading task is cancelled, as `asyncio.timeout` does, but only while it waits in our own read: between
    two tokens it runs the caller's code, which is none of our business. One timer serves the whole stream.
    """

    def __init__(self, call: Call) -> None:
        self._call = call
        self._task: asyncio.Task[Any] | None = None
        self._cancelling = 0  # cancellations that the task had when it began to wait
        self._loop = asyncio.get_running_loop()
        self._woken = False
        self._timer: asyncio.TimerHandle | None = None
        call.hang_up = self._hang_up
        self._check()

    def enter(self) -> None:
        """Note which task is going to wait."""
        self._task = asyncio.current_task()
        self._cancelling = self._task.cancelling() if self._task is not None else 0

    def _check(self) -> None:
        left = self._call.seconds_left()
        if left < float("inf") and not self._call.stopped:
            self._timer = self._loop.call_later(left, self._check)

    def _hang_up(self) -> None:
        """Wake from any thread: the model may be closed on another loop than the one that reads."""
        with contextlib.suppress(RuntimeError):  # the loop was closed: nobody reads
            self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        if self._call.waiting and not self._call.end_ns and self._task is not None and not self._woken:
            self._woken = True
            self._task.cancel()

    def cancelled(self) -> bool:
        """Whether a cancellation that arrived was ours alone; ours is taken back in any case."""
        if not self._woken or self._task is None:
            return False
        return self._task.uncancel() <= self._cancelling

    def end(self) -> None:
        """Stop watching."""
        if self._timer is not None:
            self._timer.cancel()
